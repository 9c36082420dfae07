"""The AUC at any scale and shift of the logits: against its definition, and against scikit-learn."""

import math

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from sklearn.metrics import roc_auc_score

from persia.errors import ConfigError
from persia.metrics import AUC, BLOCK, Metrics, merged_metrics
from support.examples import examples
from support.twins.auc import exact_auc

FINITE = st.floats(allow_nan=False, allow_infinity=False, width=32)
LABELS = st.sampled_from([0.0, 1.0, 1.0, 0.0, 0.25])


@st.composite
def scored(draw, most=120):
    """Logits of any size, some of them equal, some very close to one another, and their labels."""
    rows = draw(st.integers(1, most))
    few = draw(st.lists(FINITE, min_size=1, max_size=8))
    center = np.float32(draw(FINITE))
    with np.errstate(all="ignore"):
        near = center + np.spacing(center) * np.arange(-4, 5, dtype=np.float32)
    values = [*few, *near[np.isfinite(near)].tolist()]
    element = draw(st.sampled_from([FINITE, st.sampled_from(values)]))
    logits = draw(hnp.arrays(np.float32, rows, elements=element))
    return logits, draw(hnp.arrays(np.float32, rows, elements=LABELS))


def added(auc, logits, labels, sizes=(7,)):
    start = number = 0
    while start < len(logits):
        stop = start + sizes[number % len(sizes)]
        auc.update(logits[start:stop], labels[start:stop])
        start, number = stop, number + 1
    return auc


def restored(auc):
    state = {name: np.asarray(value) for name, value in auc.state_dict().items()}
    other = AUC()
    other.load_state_dict(safetensors.numpy.load(safetensors.numpy.save(state)))
    return other


@settings(max_examples=examples(200), deadline=None)
@given(scored())
def test_it_is_exact_while_few_logits_differ(rows):
    logits, labels = rows
    auc = added(AUC(), logits, labels)
    assert auc.result() == pytest.approx(exact_auc(logits, labels), abs=1e-12, nan_ok=True)
    assert auc.bound() == pytest.approx(math.nan if math.isnan(auc.result()) else 0, nan_ok=True)


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(scored(), min_size=1, max_size=5), st.integers(2, 6), st.data())
def test_it_is_off_by_no_more_than_its_bound(parts, bins, data):
    """With few bins all of grouping, dividing, merging and restoring happens, in any order."""
    total, seen = AUC(bins), []
    for logits, labels in parts:
        seen.append((logits, labels))
        match data.draw(st.sampled_from(["update", "merge", "merge into it", "restore", "ask"])):
            case "update":
                added(total, logits, labels)
            case "merge":
                total.merge(added(AUC(bins), logits, labels))
            case "merge into it":
                other = added(AUC(bins), logits, labels)
                other.merge(total)
                total = other
            case "restore":
                total = restored(added(total, logits, labels))
            case "ask":
                added(total, logits, labels).result()
        expected = exact_auc(*(np.concatenate(column) for column in zip(*seen, strict=True)))
        assert math.isnan(total.result()) == math.isnan(expected)
        if not math.isnan(expected):
            assert abs(total.result() - expected) <= total.bound() + 1e-12
            assert total.bound() <= 0.5


SHAPES = {
    "scaled up and moved": lambda x: x * 20 + 10,
    "scaled down": lambda x: x * 1e-4,
    "far away": lambda x: x + 10_000,
    "tiny": lambda x: x * 1e-30,
    "huge": lambda x: x * 1e30,
    "narrow, far away": lambda x: x * 1e-3 + 100,
    "in narrow groups": lambda x: np.round(x * 8) + x * 1e-4,
    "with many equal ones": lambda x: np.where(x < 0.5, 0, x),
}


def clicks(rows, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(-1, 1.5, rows)
    return x, (rng.random(rows) < 1 / (1 + np.exp(-x))).astype(np.float32)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("parts", [1, 3])
def test_any_scale_and_shift(shape, parts):
    """Many times as many rows as bins, of one part and of merged ones, one of them restored."""
    x, labels = clicks(150_000)
    logits = SHAPES[shape](x).astype(np.float32)
    aucs = [AUC(1 << 11) for _ in range(parts)]
    for part, auc in enumerate(aucs):
        added(auc, logits[part::parts], labels[part::parts], (1000, 7, BLOCK))
    total = restored(aucs[0])
    for auc in aucs[1:]:
        total.merge(auc)
    expected = roc_auc_score(labels, logits)
    assert total.result() == pytest.approx(expected, abs=1e-5)
    assert abs(total.result() - expected) <= total.bound() + 1e-12
    assert total.bound() < 1.6 / (1 << 11)
    assert sum(value.nbytes for value in total.state_dict().values() if isinstance(value, np.ndarray)) < 400_000


@pytest.mark.parametrize("shape", ["scaled up and moved", "scaled down"])
def test_the_default_is_right_to_five_digits(shape):
    x, labels = clicks(3_000_000)
    logits = SHAPES[shape](x).astype(np.float32)
    auc = AUC()
    for start in range(0, len(x), 100_000):
        auc.update(logits[start : start + 100_000], labels[start : start + 100_000])
    assert auc.result() == pytest.approx(roc_auc_score(labels, logits), abs=1e-5)
    assert auc.bound() <= 1e-5


def test_bins_follow_logits_that_move():
    """First wide, then narrow, then elsewhere, then only among the rows of one old bin."""
    x, labels = clicks(200_000)
    scale = np.repeat([1, 1e-5, 1, 1e-7], 50_000)
    logits = (x * scale + np.repeat([0, 0, 300, 0.25], 50_000)).astype(np.float32)
    auc = added(AUC(1 << 11), logits, labels, (BLOCK,))
    expected = roc_auc_score(labels, logits)
    assert auc.result() == pytest.approx(expected, abs=5e-5)
    assert abs(auc.result() - expected) <= auc.bound() < 4 / (1 << 11)


def test_labels_may_come_one_class_after_the_other():
    x, labels = clicks(100_000)
    order = np.argsort(labels, kind="stable")
    auc = added(AUC(1 << 10), x[order], labels[order], (BLOCK,))
    assert auc.result() == pytest.approx(roc_auc_score(labels, x.astype(np.float32)), abs=5e-5)
    assert auc.bound() < 2 / (1 << 10)


def test_few_positives_count_in_full():
    x, _ = clicks(100_000)
    labels = np.zeros(100_000, np.float32)
    labels[np.argsort(x)[-50:]] = 1
    auc = added(AUC(1 << 10), x, labels, (BLOCK,))
    assert auc.result() == pytest.approx(roc_auc_score(labels, x.astype(np.float32)), abs=1e-5)


def test_memory_is_bounded():
    """Also where each block is of another scale, and after many merges."""
    auc = AUC(64)
    for number in range(200):
        x, labels = clicks(BLOCK, number)
        part = AUC(64)
        (part if number % 2 else auc).update(x * 1.1**-number, labels)
        auc.merge(part)
    cells, loose = auc._counted.cells, auc._counted.loose
    assert len(cells.low) <= 2 * 64
    assert len(loose.low) <= 4 * 64
    assert auc._waiting < 16 * 64


def test_questions_change_nothing():
    x, labels = clicks(5 * BLOCK)
    asked, plain = AUC(512), AUC(512)
    for start in range(0, len(x), 999):
        for auc in (asked, plain):
            auc.update(x[start : start + 999], labels[start : start + 999])
        asked.result()
        asked.histogram()
        asked = restored(asked)
    assert asked.result() == plain.result()
    for name, value in plain.state_dict().items():
        np.testing.assert_array_equal(asked.state_dict()[name], value)


def test_metrics_of_nn_workers_are_merged_at_any_scale():
    x, labels = clicks(40_000)
    logits = (x * 20 + 10).astype(np.float32)
    parts = [Metrics() for _ in range(4)]
    for rank, part in enumerate(parts):
        part.update(logits[rank::4], labels[rank::4], rank % 2)
    payloads = []
    for part in parts:
        state = {name: np.asarray(value) for name, value in part.state_dict().items() if name != "labels"}
        payloads.append(safetensors.numpy.save(state))
    result = merged_metrics(parts[0], lambda _: payloads).result()
    assert result.auc == pytest.approx(roc_auc_score(labels, logits), abs=1e-9)
    for day in (0, 1):
        mine = np.arange(40_000) % 2 == day
        assert result.auc_per_day[day] == pytest.approx(roc_auc_score(labels[mine], logits[mine]), abs=1e-9)


def test_bins_must_agree():
    with pytest.raises(ConfigError, match="same number of bins"):
        AUC(4).merge(AUC(8))
