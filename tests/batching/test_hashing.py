import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from persia import batching
from persia.errors import DataError
from support.twins import batching as reference

POOLS = {threads: batching.ThreadPool(threads) for threads in (1, 3)}
threads = pytest.mark.parametrize("threads", POOLS)
seeds = st.integers(0, 2**64 - 1)


@given(data=st.binary(max_size=200), seed=seeds)
def test_reference_is_xxhash(data, seed):
    assert reference.xxh64(data, seed) == xxhash.xxh64_intdigest(data, seed)


@threads
@given(rows=st.lists(st.tuples(*[seeds] * 5), max_size=20), columns=st.integers(1, 5), seed=seeds)
def test_cross(threads, rows, columns, seed):
    table = [np.array([row[c] for row in rows], np.uint64) for c in range(columns)]
    found = batching.hash_cross(table, POOLS[threads], seed=seed)
    expected = [xxhash.xxh64_intdigest(np.array(row[:columns], "<u8").tobytes(), seed) for row in rows]
    assert found.tolist() == expected
    assert reference.hash_cross(table, seed=seed).tolist() == expected


def test_cross_depends_on_the_order():
    a, b = np.array([1], np.uint64), np.array([2], np.uint64)
    assert batching.hash_cross([a, b], POOLS[1])[0] != batching.hash_cross([b, a], POOLS[1])[0]


@pytest.mark.parametrize(
    "columns",
    [[], [np.zeros(2, np.int64)], [np.zeros(2, np.uint64), np.zeros(3, np.uint64)], [np.zeros((2, 2), np.uint64)]],
)
def test_crosses_that_do_not_fit_are_refused(columns):
    with pytest.raises(DataError):
        batching.hash_cross(columns, POOLS[1])
