"""Drift: PSI by its formula, buckets of training, sums over NN workers."""

import itertools
import math

import msgspec
import numpy as np
import pytest

import persia
from persia.errors import ConfigError
from persia.metrics.drift import (
    MIN_ROWS,
    DriftCounts,
    DriftReference,
    ValueBuckets,
    compared_columns,
    count_ids,
    merged_drift,
)
from persia.metrics.psi import ID_BUCKETS, LENGTH_BUCKETS, MODERATE, SIGNIFICANT, bucket_ids, bucket_lengths, psi

NAMES = (["item", "tags"], ["age", "flag", "constant"], ["click"])


def rows(n, seed=0, shift=0.0, scale=1.0):
    """Returns dense features and ids of rows."""
    rng = np.random.default_rng(seed)
    flag = (rng.random(n) < 0.1 + shift / 10).astype(np.float32)
    dense = np.stack([rng.normal(shift, scale, n), flag, np.full(n, 5 + shift)], 1).astype(np.float32)
    items = (rng.zipf(1.3, n) % 100_000).astype(np.uint64)
    lengths = rng.integers(0, 4, n)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tags = rng.integers(0, 50, offsets[-1]).astype(np.uint64)
    return dense, [(items, None), (tags, offsets)]


def counted(n, seed=0, **options):
    counts = DriftCounts(*NAMES)
    dense, columns = rows(n, seed, **options)
    counts.add_rows(dense, count_ids(columns))
    counts.add_logits(dense[:, :1] * 2 - 1)
    return counts


def formula(expected, actual):
    e, a = np.asarray(expected) / np.sum(expected), np.asarray(actual) / np.sum(actual)
    return np.sum((a - e) * np.log(a / e))


def test_psi_is_its_formula():
    rng = np.random.default_rng(0)
    for _ in range(20):
        expected, actual = rng.integers(1, 1000, (2, 12))
        assert psi(expected, actual) == pytest.approx(formula(expected, actual), rel=1e-12)
        assert psi(expected, expected) == 0
        assert psi(expected, 3 * expected) == pytest.approx(0, abs=1e-12)
    # Shares of 0.5 and 0.5, then 0.8 and 0.2: 0.3 * ln(1.6) - 0.3 * ln(0.4).
    assert psi([1, 1], [4, 1]) == pytest.approx(0.3 * math.log(4))
    assert psi([10, 0], [10, 10]) == pytest.approx(-0.5 * math.log(0.5) + 0.45 * math.log(10))  # 0 counts as a half.
    assert math.isnan(psi([0, 0], [1, 2]))
    assert 0 < MODERATE < SIGNIFICANT


def test_ids_and_lengths_fall_into_buckets():
    ids = np.arange(100_000, dtype=np.uint64)
    counts = bucket_ids(ids)
    assert counts.sum() == len(ids)
    assert counts.min() > 0.95 * len(ids) / ID_BUCKETS
    assert (bucket_ids(ids << np.uint64(40)) > 0).all()
    lengths = bucket_lengths(np.array([0, 1, 2, 3, 4, 5, 8, 9, 1 << 15, (1 << 15) + 1, 1 << 40]))
    assert lengths.tolist() == [1, 1, 1, 2, 2, 1, *[0] * 10, 1, 2]
    assert len(lengths) == LENGTH_BUCKETS
    (table,) = count_ids([(ids[:6], np.array([0, 0, 2, 6]))])
    assert table[:ID_BUCKETS].tolist() == bucket_ids(ids[:6]).tolist()
    assert table[ID_BUCKETS:].tolist() == bucket_lengths(np.array([0, 2, 4])).tolist()


def direct(edges, values):
    """Returns counts by bucket, the last one of NaN."""
    known = values[~np.isnan(values)]
    bounds = [-np.inf, *edges, np.inf]
    numbers = [int(((known >= a) & (known < b)).sum()) for a, b in itertools.pairwise(bounds)]
    numbers[-1] += int((known == np.inf).sum())
    return [*numbers, int(np.isnan(values).sum())]


@pytest.mark.parametrize(
    "values",
    [
        np.random.default_rng(0).normal(size=5000),
        -np.random.default_rng(0).exponential(size=5000),
        np.random.default_rng(0).integers(0, 3, 5000),
        np.full(5000, -7.5),
        np.where(np.arange(5000) % 3 == 0, np.nan, np.arange(5000) - 2000),
        np.full(5000, np.nan),
    ],
    ids=["normal", "negative", "few", "one", "missing", "nothing"],
)
def test_numbers_fall_into_buckets_of_about_as_many_rows(values):
    values = values.astype(np.float32)
    counts = DriftCounts([], ["x"], [])
    for part in np.array_split(values, 7):
        counts.add_rows(part[:, None], np.zeros((0, ID_BUCKETS + LENGTH_BUCKETS), np.int64))
    buckets = counts.reference().dense["x"]
    assert buckets.counts == direct(buckets.edges, values)
    assert buckets.counts[0] == 0
    assert buckets.counts[-2] == 0
    distinct = len(np.unique(values[~np.isnan(values)]))
    if distinct > 100:
        assert len(buckets.edges) == 11
        known = np.isfinite(values).sum()
        assert max(buckets.counts[:-1]) < 0.13 * known
    shifted = DriftCounts([], ["x"], [])
    shifted.add_rows((values + 5000)[:, None], np.zeros((0, ID_BUCKETS + LENGTH_BUCKETS), np.int64))
    found = shifted.compared(counts.reference())["x"]
    assert found == pytest.approx(psi(buckets.counts, direct(buckets.edges, values + 5000)))
    assert (found > SIGNIFICANT) == (distinct > 0)


def test_drift_shows_where_it_is():
    reference = counted(20_000).reference()
    same = counted(20_000, seed=1).compared(reference)
    assert set(same) == {"item", "item.length", "tags", "tags.length", "age", "flag", "constant", "click.prediction"}
    assert max(same.values()) < 0.01
    moved = counted(20_000, seed=1, shift=1.0).compared(reference)
    assert {name for name, index in moved.items() if index > SIGNIFICANT} == {"age", "constant", "click.prediction"}
    assert moved["flag"] == pytest.approx(psi([18_000, 2_000], [16_000, 4_000]), rel=0.3)
    other = counted(20_000, seed=1)
    other._ids[0] = np.roll(other._ids[0], 1)
    assert other.compared(reference)["item"] > SIGNIFICANT
    assert counted(MIN_ROWS - 1).compared(reference) == {}
    assert counted(MIN_ROWS - 1).reference() is None
    assert DriftCounts(["item"], [], []).compared(reference) == {}
    fewer = DriftReference(2000, {}, {}, {"age": reference.dense["age"]}, {})
    assert set(counted(2000).compared(fewer)) == {"age"}


def test_counts_of_nn_workers_add_up():
    parts, whole = [counted(3000, seed=seed) for seed in range(3)], DriftCounts(*NAMES)
    for seed in range(3):
        dense, columns = rows(3000, seed)
        whole.add_rows(dense, count_ids(columns))
        whole.add_logits(dense[:, :1] * 2 - 1)
    payloads = []
    for part in parts:
        merged_drift(part, lambda mine: payloads.append(mine) or [mine])
    for part in parts:
        assert merged_drift(part, lambda _: payloads).reference() == whole.reference()
    assert parts[0].rows == 3000  # As they were.
    assert len(payloads[0]) < 200_000


def test_memory_is_bounded_and_recent_rows_weigh_more():
    counts = counted(1000)
    dense, columns = rows(1000, shift=3.0)
    ids = count_ids(columns)
    for _ in range(3000):
        counts.add_rows(dense, ids)
    assert counts.rows < 1 << 20
    assert counts._dense[0].sum() <= counts.rows + 1000
    recent = DriftCounts(*NAMES)
    recent.add_rows(dense, ids)
    assert recent.compared(counts.reference())["age"] < 0.02


def test_a_reference_is_checked_when_it_is_read():
    reference = counted(2000).reference()
    data = msgspec.json.encode(reference)
    assert msgspec.json.decode(data, type=DriftReference) == reference
    assert len(data) < 5000
    plain = msgspec.json.decode(data)
    for change in (
        {"rows": -1},
        {"ids": {"item": [1]}},
        {"lengths": {"item": [1] * 99}},
        {"dense": {"age": {"edges": [1.0, 1.0], "counts": [1, 2, 3, 4]}}},
        {"dense": {"age": {"edges": [1.0], "counts": [1]}}},
        {"dense": {"age": {"edges": [1e300], "counts": [1, 2, 3]}}},
        {"dense": {"age": {"edges": [float(i) for i in range(99)], "counts": [0] * 101}}},
        {"other": 1},
    ):
        with pytest.raises((msgspec.ValidationError, ConfigError)):
            msgspec.json.decode(msgspec.json.encode({**plain, **change}), type=DriftReference)
    with pytest.raises(ConfigError, match="expected finite, ascending edges"):
        ValueBuckets([2.0, 1.0], [0, 0, 0, 0])


def test_long_vectors_are_left_out_of_drift():
    schema = persia.Schema(
        [persia.IdFeature("item", dim=2)],
        dense_features=["age", persia.DenseFeature("title", size=768), persia.DenseFeature("place", size=2)],
    )
    assert compared_columns(schema) == {"age": 0, "place[0]": 769, "place[1]": 770}
