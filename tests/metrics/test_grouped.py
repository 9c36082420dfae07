"""GAUC, recall@k and NDCG@k against scikit-learn and slow loops, and calibration by bucket."""

import math

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.calibration import calibration_curve
from sklearn.metrics import log_loss, ndcg_score, roc_auc_score

from persia.errors import ConfigError, DataError
from persia.metrics import AUC, GroupedMetrics, Metrics, calibration_buckets, merged_grouped
from support.examples import examples

ROWS = st.lists(
    st.tuples(st.integers(0, 4), st.integers(-3, 3), st.sampled_from([0, 0.25, 1])), min_size=1, max_size=60
)


def arrays(rows):
    groups, logits, labels = zip(*rows, strict=True)
    return np.array(groups, np.uint64), np.array(logits, np.float32), np.array(labels, np.float32)


def by_group(groups, *others):
    return [[other[groups == g] for other in others] for g in np.unique(groups)]


def gauc(groups, logits, labels):
    """The definition; a label of 0.25 is a quarter of a positive beside three quarters of a negative."""
    total = weight = 0.0
    for x, y in by_group(groups, logits, labels):
        if y.sum() and (1 - y).sum():
            weights, targets = np.r_[1 - y, y], np.r_[np.zeros(len(y)), np.ones(len(y))]
            total += len(x) * roc_auc_score(targets, np.r_[x, x], sample_weight=weights)
            weight += len(x)
    return total / weight if weight else math.nan


def recall(groups, logits, labels, k):
    """Over all positions: the probability of a row to be among the first k, if equal logits are in random order."""
    found = []
    for x, y in by_group(groups, logits, labels):
        if y.sum():
            higher = np.array([(x > each).sum() for each in x])
            equal = np.array([(x == each).sum() for each in x])
            found.append((y * np.clip((k - higher) / equal, 0, 1)).sum() / y.sum())
    return np.mean(found) if found else math.nan


def ndcg(groups, logits, labels, k):
    """Of scikit-learn, which needs two rows."""
    found = []
    for x, y in by_group(groups, logits, labels):
        if y.sum():
            found.append(ndcg_score([y], [x], k=k) if len(y) > 1 else 1.0)
    return np.mean(found) if found else math.nan


@settings(max_examples=examples(200), deadline=None)
@given(ROWS, st.integers(1, 8), st.integers(0, 60))
def test_ranking_within_groups_is_that_of_the_definitions(rows, k, cut):
    groups, logits, labels = arrays(rows)
    metrics = GroupedMetrics([k])
    metrics.update(groups[:cut], logits[:cut], labels[:cut])
    metrics.update(groups[cut:], logits[cut:], labels[cut:])
    result = metrics.result()
    assert (result.groups, result.rows) == (len(set(groups.tolist())), len(rows))
    assert result.auc == pytest.approx(gauc(groups, logits, labels), nan_ok=True)
    assert result.recall[k] == pytest.approx(recall(groups, logits, labels, k), nan_ok=True)
    assert result.ndcg[k] == pytest.approx(ndcg(groups, logits, labels, k), nan_ok=True)


def test_gauc_is_weighted_by_rows_without_one_class_groups():
    metrics = GroupedMetrics()
    metrics.update([1, 1], [2.0, 1.0], [1, 0])  # 1
    metrics.update([2] * 4, [1.0, 2.0, 3.0, 4.0], [1, 0, 0, 0])  # 0
    metrics.update([3] * 50, np.arange(50), np.ones(50))
    assert metrics.result().auc == pytest.approx(2 / 6)


def test_no_rows_have_no_metrics():
    result = GroupedMetrics([1, 5]).result()
    assert (result.groups, result.rows) == (0, 0)
    assert all(map(math.isnan, (result.auc, *result.recall.values(), *result.ndcg.values())))
    assert list(result.recall) == [1, 5]


def test_ids_of_64_bits_are_groups():
    metrics = GroupedMetrics()
    ids = np.array([2**63 + 1, 2**63 + 1, 2**63 + 2, 2**63 + 2], np.uint64)
    metrics.update(ids, [2.0, 1.0, 1.0, 2.0], [1, 0, 0, 1])
    assert metrics.result().groups == 2
    assert metrics.result().auc == 1


@pytest.mark.parametrize("workers", [1, 3])
def test_nn_workers_merge_their_rows(workers):
    rng = np.random.default_rng(0)
    parts, whole = [], GroupedMetrics([3])
    for _ in range(workers):
        part = GroupedMetrics([3])
        for _ in range(2):
            rows = rng.integers(0, 9, 40).astype(np.uint64), rng.normal(size=40), rng.integers(0, 2, 40)
            part.update(*rows)
            whole.update(*rows)
        parts.append(part)
    payloads = [safetensors.numpy.save(part.state_dict()) for part in parts]
    merged = merged_grouped(parts[0], lambda mine: payloads)
    found, expected = merged.result(), whole.result()
    assert (found.groups, found.rows) == (9, 80 * workers)
    assert (found.auc, found.recall[3], found.ndcg[3]) == pytest.approx(
        (expected.auc, expected.recall[3], expected.ndcg[3])
    )


@pytest.mark.parametrize(
    ("groups", "logits", "labels", "error"),
    [
        ([1.0], [0.0], [1], "float64"),
        ([1, 2], [0.0], [1], r"\(2,\)"),
        ([1], [np.nan], [1], "not finite"),
        ([1], [0.0], [2], "outside"),
    ],
)
def test_rows_are_checked_before_they_count(groups, logits, labels, error):
    metrics = GroupedMetrics()
    with pytest.raises(DataError, match=error):
        metrics.update(groups, logits, labels)
    assert metrics.result().rows == 0


@pytest.mark.parametrize("at", [[], 10, "10", [0], [1.5], [True]])
def test_k_is_checked(at):
    with pytest.raises(ConfigError, match="at"):
        GroupedMetrics(at)


# --- calibration by bucket and normalized entropy -----------------------------------------------------------------


def test_buckets_are_those_of_scikit_learn():
    rng = np.random.default_rng(1)
    logits = rng.normal(-1, 2, 50_000).astype(np.float32)
    labels = (rng.random(50_000) < 1 / (1 + np.exp(-0.7 * logits))).astype(np.float32)
    auc = AUC()
    auc.update(logits, labels)
    buckets = calibration_buckets(auc)
    assert [bucket.rows for bucket in buckets] == pytest.approx([5000] * 10, abs=10)
    observed, predicted = calibration_curve(labels, 1 / (1 + np.exp(-logits)), n_bins=10, strategy="quantile")
    assert [bucket.predicted for bucket in buckets] == pytest.approx(predicted, rel=1e-3)
    assert [bucket.observed for bucket in buckets] == pytest.approx(observed, rel=5e-3)
    assert buckets[0].predicted < buckets[0].observed  # The model is too sure.


def test_equal_predictions_are_one_bucket():
    auc = AUC()
    assert calibration_buckets(auc) == ()
    auc.update([0.0] * 30, [1] * 10 + [0] * 20)
    (bucket,) = calibration_buckets(auc)
    assert bucket.rows == 30
    assert bucket.predicted == pytest.approx(0.5, rel=1e-4)
    assert bucket.observed == pytest.approx(1 / 3)


def test_normalized_entropy():
    rng = np.random.default_rng(2)
    labels = rng.integers(0, 2, (2000, 2)).astype(np.float32)
    labels[:, 1] *= rng.random(2000) < 0.2
    metrics = Metrics(["click", "buy"])
    metrics.update(rng.normal(size=(2000, 2)), labels)
    result = metrics.result()
    for k, name in enumerate(("click", "buy")):
        base = log_loss(labels[:, k], np.full(2000, labels[:, k].mean()))
        assert result.labels[name].normalized_entropy == pytest.approx(result.labels[name].log_loss / base)
    both = [figures.normalized_entropy for figures in result.labels.values()]
    assert result.normalized_entropy == pytest.approx(np.mean(both))
    assert list(result.buckets) == ["click", "buy"]


@pytest.mark.parametrize("label", [0, 1])
def test_normalized_entropy_needs_both_classes(label):
    metrics = Metrics()
    metrics.update([0.5, 0.1], [label, label])
    assert math.isnan(metrics.result().normalized_entropy)
