"""What a cache could save is counted right."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import persia
from benchmarks import reuse


@given(st.lists(st.lists(st.integers(0, 5), unique=True), max_size=10), st.integers(0, 4))
def test_a_copy_serves_until_its_age(batches, age):
    hits = 0
    for id_ in range(6):
        fetched = None
        for number, batch in enumerate(batches):
            if id_ in batch:
                if fetched is not None and number - fetched <= age:
                    hits += 1
                else:
                    fetched = number
    expected = hits / max(1, sum(map(len, batches)))
    assert reuse.saved([[np.array(batch, np.uint64)] for batch in batches], age) == expected


def test_features_of_one_table_share_its_rows():
    batch = persia.Batch(
        {
            name: persia.IdColumn(np.array(ids, np.uint64))
            for name, ids in (("a", [1, 2]), ("b", [2, 3]), ("c", [1, 1]))
        },
        np.zeros((2, 0), np.float32),
        np.zeros((2, 1), np.float32),
    )
    (found,) = reuse.distinct([batch], {"a": "t", "b": "t", "c": "u"})
    assert [ids.tolist() for ids in found] == [[1, 2, 3], [1]]
