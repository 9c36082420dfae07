"""A row becomes the same bits on each way to a batch, and those of the twin."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.feature_cases import WAYS, different_rows, from_lists, random_case
from hypothesis import given, settings
from hypothesis import strategies as st

from support.examples import examples
from support.twins.features import dense_row, label_value

SEEN_LABELS = ("from_lists", "from_numpy", "from_arrow", "from_parquet", "from_csv", "from_jsonl", "from_kafka_json",
               "from_kafka_msgpack", "from_kafka_arrow")  # fmt: skip


@settings(max_examples=examples(200))
@given(st.randoms(use_true_random=False), st.integers(1, 12))
def test_rules_give_the_bits_of_the_twin(random, rows):
    case = random_case(random, rows)
    batch = from_lists(case, None)
    batch.validate(case.schema)
    names = case.schema.dense_names
    expected = [
        [
            number
            for name, feature in zip(names, case.schema.dense_features, strict=True)
            for number in dense_row(feature, case.columns[name][row])
        ]
        for row in range(rows)
    ]
    expected = np.array(expected, np.float32).reshape(rows, case.schema.dense_width)
    np.testing.assert_array_equal(batch.dense.view(np.uint32), expected.view(np.uint32))
    (label,) = case.schema.labels
    np.testing.assert_array_equal(batch.labels[:, 0], [label_value(label, value) for value in case.columns["y"]])


@pytest.mark.parametrize("way", WAYS[1:], ids=lambda way: way.__name__)
@given(random=st.randoms(use_true_random=False), rows=st.integers(1, 12))
def test_all_ways_give_the_same_bits(way, tmp_path_factory, random, rows):
    case = random_case(random, rows)
    batch = way(case, tmp_path_factory.mktemp("rows"))
    labels = way.__name__ in SEEN_LABELS
    assert batch.labels.shape == (rows, int(labels))
    assert different_rows(from_lists(case, None), batch, labels=labels) == 0
