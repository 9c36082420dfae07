"""Metrics against scikit-learn, and against themselves saved, merged and split."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from sklearn.metrics import log_loss, roc_auc_score

from persia.errors import ConfigError, DataError
from persia.metrics import AUC, BLOCK, Calibration, LogLoss, Metrics
from support.examples import examples


def clicks(rows, labels=1, seed=0):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(rows, labels)).astype(np.float32)
    return logits, (rng.random((rows, labels)) < 1 / (1 + np.exp(-logits))).astype(np.float32)


def same(a, b):
    """Equality to the last digit, nan included."""
    return repr(a) == repr(b)


def test_auc_of_fractional_labels_is_weighted():
    logits, labels = np.array([0.0, 1.0, 2.0], np.float32), np.array([0.25, 1.0, 0.5], np.float32)
    auc = AUC()
    auc.update(logits, labels)
    weights, targets = np.r_[1 - labels, labels], np.r_[np.zeros(3), np.ones(3)]
    assert auc.result() == pytest.approx(roc_auc_score(targets, np.r_[logits, logits], sample_weight=weights))


def test_metrics_without_rows_or_one_class_are_undefined():
    assert all(math.isnan(m().result()) for m in (AUC, LogLoss, Calibration))
    result = Metrics().result()
    assert result.rows == 0
    assert math.isnan(result.auc)
    assert math.isnan(result.auc_mean_of_days)
    auc = AUC()
    auc.update([0.1, 0.2], [1, 1])
    assert math.isnan(auc.result())
    assert math.isnan(auc.bound())


@settings(max_examples=examples(50))
@given(hnp.arrays(np.float32, st.integers(1, 200), elements=st.floats(-12, 12, width=32)), st.data())
def test_log_loss_and_calibration(logits, data):
    labels = np.array(data.draw(st.lists(st.integers(0, 1), min_size=len(logits), max_size=len(logits))), np.float32)
    loss, calibration = LogLoss(), Calibration()
    for half in (slice(None, len(logits) // 2), slice(len(logits) // 2, None)):
        loss.update(logits[half], labels[half])
        calibration.update(logits[half], labels[half])
    prediction = 1 / (1 + np.exp(-logits.astype(np.float64)))
    assert loss.result() == pytest.approx(log_loss(labels, prediction, labels=[0, 1]), abs=1e-9)
    if labels.any():
        assert calibration.result() == pytest.approx(prediction.mean() / labels.mean())
    else:
        assert math.isnan(calibration.result())


def test_log_loss_of_huge_logits_is_stable():
    loss = LogLoss()
    loss.update([1e30, -1e30, 1000, -1000], [1, 0, 0, 1])
    assert loss.result() == 500


def test_metrics_per_label_and_day():
    rows = 3 * BLOCK + 17
    logits, labels = clicks(rows, 2)
    day = np.sort(np.random.default_rng(1).integers(100, 104, rows))
    day[1000:1100] = 103  # days may interleave
    metrics = Metrics(["click", "buy"])
    for low in range(0, rows, 777):
        part = slice(low, low + 777)
        metrics.update(logits[part], labels[part], day[part])
        if low % 7770 == 0:
            metrics.result()
    result = metrics.result()
    assert result.rows == rows == metrics.rows
    assert list(result.per_day) == [100, 101, 102, 103]
    for k, name in enumerate(["click", "buy"]):
        assert result.labels[name].auc == pytest.approx(roc_auc_score(labels[:, k], logits[:, k]), abs=1e-6)
        for d, figures in result.per_day.items():
            x, y = logits[day == d, k], labels[day == d, k]
            assert figures[name].rows == len(x)
            assert figures[name].auc == pytest.approx(roc_auc_score(y, x), abs=1e-5)
            assert figures[name].log_loss == pytest.approx(log_loss(y, 1 / (1 + np.exp(-x.astype(np.float64)))))
    assert result.auc == pytest.approx((result.labels["click"].auc + result.labels["buy"].auc) / 2)
    assert result.auc_mean_of_days == pytest.approx(np.mean(list(result.auc_per_day.values())))


@settings(max_examples=examples(15), deadline=None)
@given(st.lists(st.integers(1, 2 * BLOCK), min_size=1, max_size=4), st.data())
def test_a_loaded_state_continues_to_the_last_digit(sizes, data):
    cut = data.draw(st.integers(0, len(sizes)))
    whole, first, second = Metrics(["a", "b"]), Metrics(["a", "b"]), Metrics(["a", "b"])
    for i, size in enumerate(sizes):
        logits, labels = clicks(size, 2, seed=i)
        day = None if i == 3 else i // 2
        whole.update(logits, labels, day)
        if i == cut:
            first.result()
            second.load_state_dict(first.state_dict())
        (first if i < cut else second).update(logits, labels, day)
    assert same((second if cut < len(sizes) else first).result(), whole.result())


def test_state_holds_arrays_numbers_and_names_only():
    metrics = Metrics()
    metrics.update(*clicks(BLOCK + 5), 3)
    state = metrics.state_dict()
    assert all(isinstance(v, (np.ndarray, int, float, list)) for v in state.values())
    assert sum(v.nbytes for v in state.values() if isinstance(v, np.ndarray)) < 1 << 20


def test_merge_equals_one_pass():
    a, b, whole = Metrics(), Metrics(), Metrics()
    for i, (target, size) in enumerate([(a, BLOCK + 3), (b, 2 * BLOCK + 9), (a, 500)]):
        logits, labels = clicks(size, seed=i)
        target.update(logits, labels, i % 2)
        whole.update(logits, labels, i % 2)
    a.merge(b)
    mine, reference = a.result(), whole.result()
    assert mine.rows == reference.rows
    assert mine.auc == reference.auc
    assert mine.auc_per_day == reference.auc_per_day
    assert mine.log_loss == pytest.approx(reference.log_loss, rel=1e-12)
    assert mine.calibration == pytest.approx(reference.calibration, rel=1e-12)
    with pytest.raises(ConfigError, match="Cannot merge metrics of labels"):
        a.merge(Metrics(["other"]))


@pytest.mark.parametrize(
    ("logits", "labels", "day", "match"),
    [
        ([[0.0], [np.nan]], [[0], [1]], None, "1 of 2 logits are not finite"),
        ([[0.0], [np.inf]], [[0], [1]], None, "not finite"),
        ([[0.0], [0.0]], [[0], [2]], None, "outside"),
        ([[0.0], [0.0]], [[0], [np.nan]], None, "outside"),
        ([[0.0], [0.0]], [[0]], None, "must agree"),
        ([[0.0, 1.0]], [[0, 1]], None, "a column for each"),
        ([[0.0], [0.0]], [[0], [1]], [1], "day has"),
        ([[0.0], [0.0]], [[0], [1]], [1.5, 2.5], "day has"),
    ],
)
def test_bad_input_is_refused_and_changes_nothing(logits, labels, day, match):
    metrics = Metrics()
    with pytest.raises(DataError, match=match):
        metrics.update(logits, labels, day)
    assert metrics.rows == 0


def test_bad_arguments_are_refused():
    with pytest.raises(ConfigError, match="labels"):
        Metrics([])
    with pytest.raises(ConfigError, match="labels"):
        Metrics("label")
    with pytest.raises(ConfigError, match="bins"):
        AUC(1)
    with pytest.raises(ConfigError, match="state has the labels"):
        Metrics(["a"]).load_state_dict(Metrics(["b"]).state_dict())
    with pytest.raises(DataError, match="shape"):
        AUC().update([[0.0]], [[1.0]])
    metrics = Metrics(max_days=3)
    metrics.update(np.zeros(4), np.zeros(4), np.arange(4))
    with pytest.raises(DataError, match="timestamps"):
        metrics.result()
    with pytest.raises(DataError, match="timestamps"):
        metrics.update(np.zeros(BLOCK), np.zeros(BLOCK), 0)
