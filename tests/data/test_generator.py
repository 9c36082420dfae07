"""The synthetic click log: ids, labels, days, drift, the best AUC."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from persia import data
from persia.data.generator import expected_auc
from persia.data.zipf import Zipf
from persia.errors import ConfigError


def gather(reader: data.Synthetic, epoch: int = 0) -> tuple[Any, Any, Any]:
    batches = list(reader.batches(epoch))
    p = np.concatenate([reader.probabilities(epoch, k) for k in range(len(batches))])
    ids = np.concatenate([np.stack([c.values for c in b.id_features.values()], 1) for b in batches])
    return ids, np.concatenate([b.labels[:, 0] for b in batches]), p


@pytest.mark.parametrize(
    "options", [{}, {"dense_features": 3, "drift": 0.3, "days": 5}, {"ids_per_feature": 20, "pairs": 12}]
)
def test_best_auc_is_what_the_true_probabilities_reach(options: dict[str, Any]) -> None:
    reader = data.synthetic(60_000, batch_size=8192, **options)
    _, labels, p = gather(reader)
    # The standard error of an AUC of 60,000 rows is about 0.002.
    assert roc_auc_score(labels, p) == pytest.approx(reader.best_auc(60_000), abs=0.004)
    assert reader.best_auc(15_000) == pytest.approx(expected_auc(p[:15_000]), abs=1e-12)


def test_the_default_best_auc_is_about_080() -> None:
    for seed in range(3):
        assert 0.78 < data.synthetic(40_000, seed=seed, batch_size=8192).best_auc() < 0.82


def test_expected_auc_against_all_pairs() -> None:
    rng = np.random.default_rng(0)
    p = rng.choice(rng.random(20, np.float32), 60)
    won = total = 0.0
    for i in range(60):
        for j in range(60):
            if i != j:
                weight = float(p[i]) * (1 - float(p[j]))
                total += weight
                won += weight * ((p[i] > p[j]) + 0.5 * (p[i] == p[j]))
    assert expected_auc(p) == pytest.approx(won / total, rel=1e-9)


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 1.05, 2.0])
@pytest.mark.parametrize("n", [1, 2, 1000])
def test_ids_follow_zipf(exponent: float, n: int) -> None:
    ranks = Zipf(n, exponent).sample(np.random.default_rng(0), 200_000)
    weights = np.arange(1, n + 1) ** -exponent
    expected = 200_000 * weights / weights.sum()
    counts = np.bincount(ranks, minlength=n)
    assert len(counts) == n
    assert (((counts - expected) ** 2 / expected).sum() - (n - 1)) < 6 * max(2 * (n - 1), 1) ** 0.5


def test_zipf_over_very_many_ids() -> None:
    ranks = Zipf(10**12, 1.05).sample(np.random.default_rng(0), 10_000)
    assert ranks.min() == 0
    assert 10**10 < ranks.max() < 10**12


def test_all_pairs_are_the_sum_over_each() -> None:
    reader = data.synthetic(500, batch_size=500, id_features=6, ids_per_feature=9)
    every = data.synthetic(500, batch_size=500, id_features=6, ids_per_feature=9, pairs=15)
    assert np.allclose(reader.probabilities(0, 0), every.probabilities(0, 0), atol=1e-5)
    some = data.synthetic(500, batch_size=500, id_features=6, ids_per_feature=9, pairs=4)
    assert not np.allclose(reader.probabilities(0, 0), some.probabilities(0, 0), atol=1e-2)


def test_features_and_extra_features() -> None:
    reader = data.synthetic(5000, id_features=3, ids_per_feature=10, extra_id_features=2, dense_features=1, dim=4)
    assert [f.name for f in reader.schema.id_features] == ["id_0", "id_1", "id_2", "extra_0", "extra_1"]
    assert {f.dim for f in reader.schema.id_features} == {4}
    ids, labels, _ = gather(reader)
    assert len(ids) == 5000
    assert ids[:, :3].max() < 10
    extra = ids[:, 3:].astype(float) / 2**63
    assert len(np.unique(ids[:, 3:])) == 10_000
    assert extra.mean() == pytest.approx(0.5, abs=0.02)
    assert extra.max() < 1
    assert 0.2 < labels.mean() < 0.8
    assert not np.array_equal(ids[:, 0], ids[:, 1])


def test_every_feature_has_its_own_ids() -> None:
    sizes, exponents = (3, 500, 20), (0.0, 1.5, 0.7)
    reader = data.synthetic(60_000, id_features=3, ids_per_feature=list(sizes), zipf=list(exponents), batch_size=8192)
    ids, _, _ = gather(reader)
    for feature, (n, exponent) in enumerate(zip(sizes, exponents, strict=True)):
        weights = np.arange(1, n + 1) ** -exponent
        expected = 60_000 * weights / weights.sum()
        counts = np.bincount(ids[:, feature].astype(np.int64), minlength=n)
        assert len(counts) == n
        assert (((counts - expected) ** 2 / expected).sum() - (n - 1)) < 6 * (2 * (n - 1)) ** 0.5


def test_one_number_for_all_features_is_a_sequence_of_equal_ones() -> None:
    one = data.synthetic(2000, id_features=3, ids_per_feature=50, zipf=1.2)
    for sequences in ({"zipf": [1.2] * 3}, {"ids_per_feature": [50] * 3}):
        two = data.synthetic(2000, **{"id_features": 3, "ids_per_feature": 50, "zipf": 1.2} | sequences)
        assert np.array_equal(gather(one)[0], gather(two)[0])


def test_features_that_are_alike_are_sampled_at_once() -> None:
    """Figures of earlier versions are of these rows."""
    batch = data.synthetic(500, id_features=3, ids_per_feature=50, zipf=1.2, seed=4, batch_size=500)._batch(2, 0)[0]
    expected = Zipf(50, 1.2).sample(np.random.Generator(np.random.PCG64((4, 2, 0))), 3 * 500).reshape(3, 500)
    assert np.array_equal([batch.id_features[f"id_{i}"].values for i in range(3)], expected)


RATED: dict[str, Any] = {
    "rows": 60_000, "id_features": 3, "ids_per_feature": [4, 300, 5_000], "zipf": [0.5, 2.0, 1.1], "dense_features": 2,
    "days": 4, "drift": 0.5, "batch_size": 8192,
}  # fmt: skip


@functools.cache
def gathered_without_a_rate() -> tuple[Any, Any, Any]:
    return gather(data.synthetic(**RATED))


@pytest.mark.parametrize("rate", [0.05, 0.17, 0.6])
def test_positive_rate_moves_the_bias_alone(rate: float) -> None:
    reader = data.synthetic(positive_rate=rate, **RATED)
    (ids, _, p), (same, labels, q) = gathered_without_a_rate(), gather(reader)
    assert np.array_equal(ids, same)
    assert q.mean() == pytest.approx(rate, rel=0.02)  # Days differ, and both are samples.
    assert labels.mean() == pytest.approx(rate, rel=0.03)
    logits = [np.log(x / (1 - x)).astype(np.float64) for x in (p, q)]
    assert np.ptp(logits[1] - logits[0]) < 1e-3
    assert roc_auc_score(labels, q) == pytest.approx(reader.best_auc(60_000), abs=0.005)
    assert np.array_equal(reader.shard(1, 2).probabilities(1, 1), reader.probabilities(1, 1))


def test_extra_and_later_rows_leave_the_truth_alone() -> None:
    one = data.synthetic(3000, seed=3)
    two = data.synthetic(5000, seed=3, extra_id_features=5)
    assert np.array_equal(one.probabilities(0, 1), two.probabilities(0, 1))
    assert not np.array_equal(one.probabilities(0, 1), data.synthetic(3000, seed=4).probabilities(0, 1))
    assert not np.array_equal(one.probabilities(0, 1), one.probabilities(1, 1))


def test_days_are_in_order_and_even() -> None:
    day = np.concatenate([b.day for b in data.synthetic(1000, days=4, batch_size=300) if b.day is not None])
    assert np.array_equal(day, np.repeat(np.arange(4), 250))


def test_drift_turns_the_truth_day_by_day() -> None:
    options: dict[str, Any] = {"days": 10, "id_features": 4, "ids_per_feature": 50, "batch_size": 20_000}
    still, moving = data.synthetic(20_000, **options), data.synthetic(20_000, drift=0.2, **options)
    (one, p), (two, q) = still._batch(0, 0), moving._batch(0, 0)
    assert np.array_equal(one.id_features["id_0"].values, two.id_features["id_0"].values)
    assert one.day is not None
    correlations = [np.corrcoef(p[one.day == d], q[one.day == d])[0, 1] for d in range(10)]
    assert correlations[0] == pytest.approx(1)
    assert all(b < a for a, b in itertools.pairwise(correlations))
    assert correlations[1] > 0.9 > 0.5 > correlations[7]
    assert not np.array_equal(one.labels, two.labels)


@pytest.mark.parametrize("latent_dim", [1, 4, 9])
def test_latent_factors_are_standardised_and_independent(latent_dim: int) -> None:
    reader = data.synthetic(10, id_features=2, latent_dim=latent_dim)
    ids = np.tile(np.arange(50_000, dtype=np.uint64), (2, 1))
    factors = reader._factors(ids, np.zeros(50_000, np.int32), 0, latent_dim)
    flat = np.concatenate([*factors], axis=1).T
    assert flat.shape == (2 * latent_dim, 50_000)
    assert np.allclose(np.cov(flat), np.eye(len(flat)), atol=0.03)
    assert np.allclose(flat.mean(1), 0, atol=0.03)


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 1.5}, {"batch_size": "8"}, {"rows": True}, {"zipf": "1"},
        {"rows": 0}, {"batch_size": 0}, {"zipf": -1.0}, {"drift": -0.1}, {"days": 0}, {"shard": (2, 2)}, {"pairs": 67},
        {"ids_per_feature": [5] * 11}, {"ids_per_feature": [5] * 11 + [0]}, {"ids_per_feature": []},
        {"zipf": [1.0] * 13}, {"zipf": [1.0] * 11 + [-1.0]}, {"positive_rate": 0.0}, {"positive_rate": 1.0},
    ],
)  # fmt: skip
def test_bad_options(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        data.synthetic(**{"rows": 10, **options})
