"""Batches with a permuted input are those of permuted raw columns."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import persia
from persia.batching.batch import Batch
from persia.batching.permuted_inputs import emptied, input_groups, permuted
from persia.schema import Buckets, DenseFeature, IdFeature, Remainder, TimePart
from support.examples import examples

SCHEMA = persia.Schema(
    [
        IdFeature("user", dim=4),
        IdFeature("items", dim=4, pooling=None, max_length=3),
        IdFeature("actions", dim=4, pooling=None, max_length=3, aligned_with="items"),
        IdFeature("tags", dim=4, weights="shares"),
        IdFeature("bucket", dim=4, bucketize=Buckets("price", edges=[0.0, 1.0])),
        IdFeature("hour", dim=4, time=TimePart("ts", "hour")),
        IdFeature("weekday", dim=4, time=TimePart("ts", "weekday")),
        IdFeature("user_x_hour", dim=4, cross=("user", "hour")),
        IdFeature("small", dim=4, of="user", mapping=Remainder(3)),
    ],
    [
        DenseFeature("price", fill=0, missing_indicator=True),
        DenseFeature("vector", size=2),
        "age",
    ],
)

RAW = {
    "user": ["user"],
    "items, actions": ["items", "actions"],
    "tags": ["tags", "shares"],
    "price": ["price"],
    "ts": ["ts"],
    "vector": ["vector"],
    "age": ["age"],
}
"""Columns of the data that each group reads."""


def columns(rows, seed):
    rng = np.random.default_rng(seed)
    lists = [rng.integers(0, 9, rng.integers(0, 5)).tolist() for _ in range(rows)]
    tags = [rng.integers(0, 9, rng.integers(0, 3)).tolist() for _ in range(rows)]
    price = rng.normal(size=rows)
    price[rng.random(rows) < 0.3] = np.nan
    return {
        "user": [None if rng.random() < 0.2 else int(rng.integers(0, 5)) for _ in range(rows)],
        "items": lists,
        "actions": [[int(i) % 2 for i in each] for each in lists],
        "tags": tags,
        "shares": [rng.random(len(each)).tolist() for each in tags],
        "price": price,
        "ts": np.datetime64("2024-05-01T00", "s") + rng.integers(0, 10**6, rows).astype("timedelta64[s]"),
        "vector": rng.normal(size=(rows, 2)).astype(np.float32),
        "age": rng.normal(size=rows).astype(np.float32),
        "label": rng.integers(0, 2, rows),
    }


def picked(column, order):
    return column[order] if isinstance(column, np.ndarray) else [column[i] for i in order]


def assert_equal(found, expected):
    assert list(found.id_features) == list(expected.id_features)
    for name, column in expected.id_features.items():
        own = found.id_features[name]
        rows = range(len(expected))
        for part in ("values", "weights"):
            got = [getattr(own.slice(i, i + 1), part) for i in rows]
            want = [getattr(column.slice(i, i + 1), part) for i in rows]
            assert [None if g is None else g.tolist() for g in got] == [None if w is None else w.tolist() for w in want]
    for part in ("dense", "labels"):
        np.testing.assert_array_equal(getattr(found, part), getattr(expected, part))


@settings(deadline=None, max_examples=examples(25))
@given(rows=st.integers(1, 9), seed=st.integers(0, 2**32), data=st.data())
def test_a_permuted_batch_is_that_of_permuted_columns(rows, seed, data):
    raw = columns(rows, seed)
    batch = Batch.from_columns(SCHEMA, raw)
    group = data.draw(st.sampled_from([each for each in input_groups(SCHEMA) if each.name in RAW]))
    order = np.array(data.draw(st.permutations(range(rows))), np.int64)
    start = data.draw(st.integers(0, rows - 1))
    expected = Batch.from_columns(SCHEMA, raw | {name: picked(raw[name], order) for name in RAW[group.name]})
    found = permuted(SCHEMA, batch, group, start, order[start:])
    found.validate(SCHEMA)
    assert_equal(found, expected.slice(start, rows))


def test_features_of_a_column_and_aligned_ones_are_one_group():
    groups = {group.name: set(group.features) for group in input_groups(SCHEMA)}
    assert groups == {
        "user": {"user", "user_x_hour", "small"},
        "items, actions": {"items", "actions"},
        "tags": {"tags"},
        "price": {"bucket", "price"},
        "ts": {"hour", "weekday", "user_x_hour"},
        "vector": {"vector"},
        "age": {"age"},
        "user_x_hour": {"user_x_hour"},
    }


def test_groups_that_a_later_feature_links_are_joined():
    schema = persia.Schema(
        [
            IdFeature("a", dim=4, max_length=3),
            IdFeature("b", dim=4, weights="w"),
            IdFeature("c", dim=4, weights="w"),
            IdFeature("d", dim=4, max_length=3),
            IdFeature("e", dim=4, max_length=3, of="b", mapping=Remainder(3), aligned_with="d"),
            IdFeature("f", dim=4, max_length=3, cross=("a", "g"), aligned_with="h"),
            IdFeature("g", dim=4),
            IdFeature("h", dim=4, max_length=3),
        ]
    )
    groups = [set(group.features) for group in input_groups(schema)]
    assert groups == [{"a", "g", "h", "f"}, {"b", "c", "d", "e"}]


@pytest.mark.parametrize("name", ["user", "items, actions", "price", "user_x_hour"])
def test_an_emptied_group_has_no_ids_and_the_means(name):
    batch = Batch.from_columns(SCHEMA, columns(20, 1))
    (group,) = [each for each in input_groups(SCHEMA) if each.name == name]
    means = batch.dense.mean(axis=0)
    found = emptied(SCHEMA, batch, group, 5, 7, means)
    found.validate(SCHEMA)
    rows = batch.slice(5, 12)
    for feature in batch.id_features:
        if feature in group.features:
            assert len(found.id_features[feature].values) == 0
        else:
            assert found.id_features[feature].values.tolist() == rows.id_features[feature].values.tolist()
    changed = [k for dense in group.dense_features for k in range(len(means))[SCHEMA.dense_slices[dense]]]
    for k in range(len(means)):
        np.testing.assert_array_equal(found.dense[:, k], np.full(7, means[k]) if k in changed else rows.dense[:, k])
    assert len(changed) == (2 if name == "price" else 0)
