"""Metrics by kind of label, weighted and masked, against scikit-learn, and of parts against the whole."""

import math

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import (
    accuracy_score,
    log_loss,
    mean_absolute_error,
    mean_squared_error,
    ndcg_score,
    roc_auc_score,
    top_k_accuracy_score,
)

from persia.errors import ConfigError, DataError
from persia.metrics import AUC, BLOCK, Answers, GroupedMetrics, Metrics, merged_metrics
from persia.schema import Label
from persia.schema.losses import BPR, JRC, EntireSpace
from support.examples import examples

LABELS = (
    Label("click", missing="mask"),
    Label("buy", missing="mask", loss=EntireSpace("click")),
    Label("watch", "regression", missing="mask"),
    Label("visits", "count", missing="mask"),
    Label("genre", "multiclass", classes=7, missing="mask"),
    Label("stars", "ordinal", classes=4, missing="mask"),
    Label("like", missing="mask", loss=JRC()),
)
WIDTH = 1 + 1 + 1 + 1 + 7 + 3 + 2


def data(rows, seed=0, missing=0.2):
    """Logits, labels of each kind of which some are missing, and weights of which some are 0."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(rows, WIDTH)).astype(np.float32)
    labels = np.column_stack(
        [
            rng.integers(0, 2, rows),
            rng.integers(0, 2, rows),
            rng.normal(3, 2, rows),
            rng.poisson(2, rows),
            rng.integers(0, 7, rows),
            rng.integers(0, 4, rows),
            rng.integers(0, 2, rows),
        ]
    ).astype(np.float32)
    labels[rng.random(labels.shape) < missing] = np.nan
    return logits, labels, rng.choice([0, 0.5, 1, 3.25], rows).astype(np.float32)


def expected(logits, labels, weights):
    """The metrics of scikit-learn by label."""
    answers = Answers(LABELS)
    by_label = answers.by_label(answers.answers(logits).astype(np.float64))
    found = {}
    for k, label in enumerate(LABELS):
        known = ~np.isnan(labels[:, k])
        y, p, w = labels[known, k].astype(np.float64), by_label[label.name][known], weights[known]
        if label.kind == "binary":
            base = np.average(y, weights=w)
            loss = log_loss(y, p, sample_weight=w, labels=[0, 1])
            found[label.name] = [
                roc_auc_score(y, p, sample_weight=w),
                loss,
                np.average(p, weights=w) / base,
                loss / -(base * math.log(base) + (1 - base) * math.log1p(-base)),
            ]
        elif label.class_names:
            every = range(len(label.class_names))
            top = top_k_accuracy_score(y, p, k=5, labels=every, sample_weight=w) if len(every) > 5 else math.nan
            accuracy = accuracy_score(y, p.argmax(axis=1), sample_weight=w)
            normed = p / p.sum(axis=1, keepdims=True)
            found[label.name] = [accuracy, top, log_loss(y, normed, sample_weight=w, labels=every)]
        else:
            found[label.name] = [
                math.sqrt(mean_squared_error(y, p, sample_weight=w)),
                mean_absolute_error(y, p, sample_weight=w),
                (p * w).sum() / (y * w).sum(),
            ]
    return found


def numbers(figures):
    return [getattr(figures, name) for name in figures.__slots__ if name != "rows"]


@pytest.mark.parametrize("rows", [400, 2 * BLOCK + 77])
def test_metrics_of_each_kind_are_those_of_scikit_learn(rows):
    logits, labels, weights = data(rows)
    day = np.arange(rows) * 3 // rows
    metrics = Metrics(LABELS)
    for low in range(0, rows, 333):
        part = slice(low, low + 333)
        metrics.update(logits[part], labels[part], day[part], weights[part])
    result = metrics.result()
    for days, figures in [(day >= 0, result.labels), *((day == d, result.per_day[d]) for d in range(3))]:
        for name, values in expected(logits[days], labels[days], weights[days]).items():
            assert numbers(figures[name]) == pytest.approx(values, rel=1e-5, abs=1e-5, nan_ok=True), name
    assert result.labels["watch"].rows == np.count_nonzero(~np.isnan(labels[:, 2]))
    assert result.rows == metrics.rows == rows
    assert list(result.buckets) == ["click", "buy", "like"]


@pytest.mark.parametrize("rows", [1, 700, BLOCK + 9])
def test_weights_of_1_are_no_weights_to_the_bit(rows):
    logits, labels, _ = data(rows, missing=0)
    some = np.where(np.arange(rows) < 3, 1.5, 1).astype(np.float32)  # So that weights are not seen to be all 1.
    plain, weighted, mixed = Metrics(LABELS), Metrics(LABELS), Metrics(LABELS)
    plain.update(logits, labels, 3)
    weighted.update(logits, labels, 3, np.ones(rows))
    assert repr(weighted.result()) == repr(plain.result())
    mixed.update(logits[:0], labels[:0], 3, some[:0])
    mixed._weights = np.ones(BLOCK, np.float32)
    mixed.update(logits, labels, 3, np.ones(rows))
    assert repr(mixed.result()) == repr(plain.result())


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(1, 60), st.integers(0, 99), st.data())
def test_integer_weights_are_repeated_rows(rows, seed, draw):
    logits, labels, _ = data(rows, seed)
    weights = np.array(draw.draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows)))
    weighted, repeated = Metrics(LABELS), Metrics(LABELS)
    weighted.update(logits, labels, None, weights)
    repeated.update(np.repeat(logits, weights, axis=0), np.repeat(labels, weights, axis=0))
    found, reference = weighted.result(), repeated.result()
    for name, figures in reference.labels.items():
        assert numbers(found.labels[name]) == pytest.approx(numbers(figures), rel=1e-9, abs=1e-12, nan_ok=True), name


@settings(max_examples=examples(30), deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=5), st.booleans(), st.data())
def test_parts_merge_to_the_whole(sizes, weighted, draw):
    whole, parts = Metrics(LABELS), []
    for seed, size in enumerate(sizes):
        logits, labels, weights = data(size, seed)
        given_weights = weights if weighted and draw.draw(st.booleans()) else None
        part = Metrics(LABELS)
        for metrics in (part, whole):
            metrics.update(logits, labels, seed % 2, given_weights)
        parts.append(part)
    payloads: list[bytes] = []
    for part in parts:
        merged_metrics(part, lambda own: payloads.append(own) or [own])
    merged = merged_metrics(parts[0], lambda _: payloads).result() if len(parts) > 1 else parts[0].result()
    reference = whole.result()
    assert merged.rows == reference.rows
    for found, wanted in [
        (merged.labels, reference.labels),
        *((merged.per_day.get(day, {}), figures) for day, figures in reference.per_day.items()),
    ]:
        for name, figures in wanted.items():
            assert found[name].rows == figures.rows
            assert numbers(found[name]) == pytest.approx(numbers(figures), rel=1e-9, nan_ok=True), name


@pytest.mark.parametrize("cut", [5, BLOCK + 3])
def test_a_loaded_state_of_all_kinds_continues(cut):
    logits, labels, weights = data(BLOCK + 50)
    whole, first, second = Metrics(LABELS), Metrics(LABELS), Metrics(LABELS)
    for low, high in ((0, cut), (cut, len(logits))):
        part = slice(low, high)
        whole.update(logits[part], labels[part], 1, weights[part])
        (first if low == 0 else second).update(logits[part], labels[part], 1, weights[part])
        if low == 0:
            state = {name: np.asarray(value) for name, value in first.state_dict().items() if name != "labels"}
            loaded = safetensors.numpy.load(safetensors.numpy.save(state))
            second.load_state_dict({**loaded, "labels": list(first.labels)})
    assert repr(second.result()) == repr(whole.result())


def test_auc_counts_weights_alone_like_metrics():
    logits, labels, weights = data(1000, missing=0)
    auc, half = AUC(), AUC()
    auc.update(logits[:500, 0], labels[:500, 0])  # Weights may come later.
    half.update(logits[500:, 0], labels[500:, 0], weights[500:])
    auc.merge(half)
    weights[:500] = 1
    assert auc.result() == pytest.approx(roc_auc_score(labels[:, 0], logits[:, 0], sample_weight=weights))


def test_a_loss_that_only_ranks_has_no_probabilities():
    metrics = Metrics([Label("click", loss=BPR())])
    metrics.update([[9.0], [7.0], [8.0]], [[1], [0], [0]])
    result = metrics.result()
    assert result.auc == 1
    assert math.isnan(result.log_loss)
    assert result.buckets == {}
    metrics = Metrics([Label("watch", "regression", loss=BPR())])
    metrics.update([[9.0]], [[1]])
    assert all(map(math.isnan, numbers(metrics.result().labels["watch"])))


def test_equal_probabilities_of_classes_are_in_order():
    metrics = Metrics([Label("genre", "multiclass", classes=7)])
    metrics.update(np.zeros((7, 7)), np.arange(7)[:, None])
    figures = metrics.result().labels["genre"]
    assert (figures.accuracy, figures.top_5_accuracy) == (pytest.approx(1 / 7), pytest.approx(5 / 7))
    assert figures.log_loss == pytest.approx(math.log(7))


def test_an_impossible_class_costs_36_nats():
    metrics = Metrics([Label("genre", "multiclass", classes=2)])
    metrics.update([[0.0, 1e6]], [[0]])
    assert metrics.result().log_loss == pytest.approx(36.04, abs=0.01)


@pytest.mark.parametrize(
    ("label", "value", "match"),
    [
        (Label("y", missing="mask"), 2, "'y' is 2.0 at row 1, which is not valid for its kind 'binary'"),
        (Label("y", "regression"), math.nan, "'y' is nan at row 1; leave the row out"),
        (Label("y", "regression"), math.inf, "'y' is inf at row 1"),
        (Label("y", "count"), -1, "'y' is -1.0 at row 1"),
        (Label("y", "multiclass", classes=3), 3, "'y' is 3.0 at row 1"),
        (Label("y", "ordinal", classes=3), 0.5, "'y' is 0.5 at row 1"),
    ],
)
def test_labels_are_checked_by_kind(label, value, match):
    metrics = Metrics([label])
    with pytest.raises(DataError, match=match):
        metrics.update(np.zeros((2, label.outputs)), [[0], [value]])
    assert metrics.rows == 0


@pytest.mark.parametrize("weights", [[-1, 1], [math.nan, 1], [math.inf, 1], [1]])
def test_weights_are_checked(weights):
    for metrics in (Metrics(), AUC(), GroupedMetrics()):
        rows = ([1, 2],) if isinstance(metrics, GroupedMetrics) else ()
        with pytest.raises(DataError, match="weight"):
            metrics.update(*rows, [0.0, 1.0], [0, 1], weights=weights)


def test_a_metric_is_found_by_name():
    logits, labels, weights = data(200)
    metrics = Metrics(LABELS)
    metrics.update(logits, labels, None, weights)
    result = metrics.result()
    assert result.value("rmse") == pytest.approx((result.labels["watch"].rmse + result.labels["visits"].rmse) / 2)
    assert result.value("visits:rmse") == result.labels["visits"].rmse
    assert result.value("auc") == result.auc
    with pytest.raises(ConfigError, match=r"no metric 'stars:rmse'; there are .*watch:rmse"):
        result.value("stars:rmse")


# --- groups -----------------------------------------------------------------------------------------------------------

ROWS = st.lists(
    st.tuples(st.integers(0, 4), st.integers(-3, 3), st.sampled_from([0, 1]), st.sampled_from([0, 1, 2, 5])),
    min_size=1,
    max_size=40,
)


@settings(max_examples=examples(100), deadline=None)
@given(ROWS, st.integers(0, 40))
def test_gauc_with_integer_weights_is_of_repeated_rows(rows, cut):
    groups, logits, labels, weights = (np.array(column) for column in zip(*rows, strict=True))
    weighted, repeated = GroupedMetrics(), GroupedMetrics()
    for part in (slice(cut), slice(cut, None)):
        weighted.update(groups[part], logits[part], labels[part], weights[part])
    repeated.update(*(np.repeat(column, weights) for column in (groups, logits, labels)))
    assert weighted.result().auc == pytest.approx(repeated.result().auc, nan_ok=True)


def test_groups_of_weights_1_are_groups_without():
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 9, 200), rng.normal(size=200), rng.integers(0, 2, 200)
    plain, weighted, mixed = GroupedMetrics(), GroupedMetrics(), GroupedMetrics()
    plain.update(*rows)
    weighted.update(*rows, np.ones(200))
    mixed.update(*rows)
    mixed._weights = [np.ones(200, np.float32)]
    assert weighted.result() == plain.result() == mixed.result()


def test_ndcg_of_gains_is_that_of_scikit_learn():
    rng = np.random.default_rng(0)
    logits, gains = rng.normal(size=(30, 8)).astype(np.float32), rng.poisson(2, (30, 8)).astype(np.float32)
    weights = rng.choice([0, 1, 2.5], 30)
    metrics = GroupedMetrics([3], binary=False)
    groups = np.repeat(np.arange(30), 8)
    metrics.update(groups, logits.ravel(), gains.ravel(), np.repeat(weights, 8))
    result = metrics.result()
    assert result.ndcg[3] == pytest.approx(ndcg_score(gains, logits, k=3, sample_weight=weights))
    assert math.isnan(result.auc)
    assert math.isnan(result.recall[3])
    metrics.update([1, 1], [0.0, 1.0], [-1.0, 1.0])
    assert math.isnan(metrics.result().ndcg[3])
    with pytest.raises(DataError, match="outside"):
        metrics.update([1], [0.0], [math.nan])
