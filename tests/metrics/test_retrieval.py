"""Metrics of retrieval from ranks, against a slow reference that tries every order of equal scores."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia.errors import ConfigError, DataError
from persia.metrics import GroupedMetrics, RetrievalMetrics

AT = (1, 3, 10)


def reference(above, equal, weights):
    """HR, NDCG and MRR as means over all places that a sample's item can have among those with its score."""
    figures = {f"{name}@{k}": 0.0 for name in ("hr", "ndcg") for k in AT} | {"mrr": 0.0}
    for a, e, weight in zip(above, equal, weights, strict=True):
        ranks = range(a + 1, a + e + 2) if a >= 0 else []
        for rank in ranks:
            share = weight / len(ranks) / sum(weights)
            figures["mrr"] += share / rank
            for k in AT:
                figures[f"hr@{k}"] += share * (rank <= k)
                figures[f"ndcg@{k}"] += share * (rank <= k) / math.log2(1 + rank)
    return figures


RANKS = st.lists(st.tuples(st.integers(-1, 3000), st.integers(0, 2500), st.integers(1, 4)), min_size=1, max_size=6)


@given(RANKS)
def test_metrics_are_means_over_all_orders_of_equal_scores(samples):
    above, equal, weights = zip(*samples, strict=True)
    metrics = RetrievalMetrics(6000, AT)
    metrics.update(above, equal, np.full((len(above), 10), -1), weights)
    result = metrics.result()
    for name, value in reference(above, equal, weights).items():
        # A mean over ranks is a difference of sums of 1 / rank, which are up to 9.3: it lacks their last bits, 2.2e-15.
        assert result.value(name) == pytest.approx(value, rel=1e-12, abs=4e-15), name
    assert result.missing == above.count(-1)
    assert result.rows == len(above)


def test_they_agree_with_metrics_by_group():
    """Over a catalogue of few items, with many equal scores."""
    rng = np.random.default_rng(0)
    scores = rng.integers(0, 4, (30, 12))
    chosen = rng.integers(0, 12, 30)
    grouped = GroupedMetrics(AT)
    grouped.update(np.repeat(np.arange(30), 12), scores.ravel(), (np.arange(12) == chosen[:, None]).ravel())
    of_chosen = scores[np.arange(30), chosen][:, None]
    metrics = RetrievalMetrics(12, AT)
    metrics.update((scores > of_chosen).sum(1), (scores == of_chosen).sum(1) - 1, np.full((30, 10), -1))
    for k in AT:
        assert metrics.result().hit_rate[k] == pytest.approx(grouped.result().recall[k])
        assert metrics.result().ndcg[k] == pytest.approx(grouped.result().ndcg[k])


def test_coverage_counts_items_once():
    metrics = RetrievalMetrics(5, (1, 2))
    assert math.isnan(metrics.result().coverage[1])
    metrics.update([0, 0], [0, 0], [[4, 1], [4, -1]])
    assert metrics.result().coverage == {1: 1 / 5, 2: 2 / 5}
    metrics.update([-1], [0], [[0, 3]])
    assert metrics.result().coverage == {1: 2 / 5, 2: 4 / 5}


def test_parts_of_several_nn_workers_add_up():
    rng = np.random.default_rng(1)
    whole, parts = RetrievalMetrics(50, AT), [RetrievalMetrics(50, AT) for _ in range(3)]
    for part in parts:
        update = rng.integers(-1, 20, 7), rng.integers(0, 3, 7), rng.integers(-1, 50, (7, 10)), rng.random(7)
        whole.update(*update)
        part.update(*update)
    payloads = []
    for part in parts:
        part.merged(lambda payload: [payloads.append(payload)])
    first, second = (part.merged(lambda _: payloads).result() for part in parts[:2])
    assert first == second
    for name in (*reference([0], [0], [1]), "coverage@3"):
        assert first.value(name) == pytest.approx(whole.result().value(name))
    assert (first.rows, first.missing) == (whole.result().rows, whole.result().missing)


@pytest.mark.parametrize("at", [(), (0,), 10, "10", (2.5,)])
def test_bad_cutoffs_are_refused(at):
    with pytest.raises(ConfigError, match=r"RetrievalMetrics\.at"):
        RetrievalMetrics(5, at)


def test_bad_ranks_are_refused():
    metrics = RetrievalMetrics(5)
    with pytest.raises(DataError, match="Ranks have shapes"):
        metrics.update([1], [1, 2], [[1]])
    with pytest.raises(ConfigError, match="no metric 'recall@10'; there are mrr, hr@10, ndcg@10, coverage@10"):
        metrics.result().value("recall@10")
