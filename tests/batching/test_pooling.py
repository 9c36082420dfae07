import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia import batching
from persia.batching import FeaturePlan
from persia.errors import DataError
from support.twins import batching as reference

POOLS = {threads: batching.ThreadPool(threads) for threads in (1, 3)}
threads = pytest.mark.parametrize("threads", POOLS)


@st.composite
def calls(draw):
    """Rows and plans of a call, of any shape."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    dims = draw(st.lists(st.sampled_from([1, 2, 3, 4, 8, 16, 32, 64, 65]), min_size=1, max_size=3))
    rows = [rng.standard_normal((draw(st.integers(1, 9)), dim), np.float32) for dim in dims]
    batch = draw(st.integers(0, 12))
    plans = []
    for _ in range(draw(st.integers(0, 5))):
        table = draw(st.integers(0, len(rows) - 1))
        lengths = rng.integers(0, draw(st.integers(1, 7)), batch)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64) if draw(st.booleans()) else None
        n = batch if offsets is None else int(offsets[-1])
        inverse = rng.integers(0, len(rows[table]), n).astype(draw(st.sampled_from([np.uint16, np.uint32])))
        pooling = draw(st.sampled_from(["sum", "mean", "sqrtn", None]))
        max_length = draw(st.integers(1, 6) if pooling is None else st.none() | st.integers(1, 6))
        weights = None
        if pooling is not None and draw(st.booleans()):
            weights = rng.integers(-4 if pooling == "sum" else 0, 5, n).astype(np.float32) / np.float32(3)
        plans.append(FeaturePlan(table, inverse, offsets, pooling, max_length, weights))
    return rows, plans


def gradients_of(rows, plans, seed=0, missing=()):
    rng = np.random.default_rng(seed)
    values = reference.pool_forward(rows, plans).values
    return [None if f in missing else rng.standard_normal(v.shape, np.float32) for f, v in enumerate(values)]


def assert_equal_arrays(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        if b is None:
            assert a is None
        else:
            assert a.dtype == b.dtype
            assert a.shape == b.shape
            np.testing.assert_array_equal(a, b)


@threads
@given(call=calls())
def test_forward_is_the_reference(threads, call):
    pooled = batching.pool_forward(*call, POOLS[threads])
    expected = reference.pool_forward(*call)
    assert_equal_arrays(pooled.values, expected.values)
    assert_equal_arrays(pooled.masks, expected.masks)


@given(call=calls())
def test_weights_of_one_change_no_bit(call):
    rows, plans = call
    plain = [dataclasses.replace(plan, weights=None) for plan in plans]
    ones = [
        plan if plan.pooling is None else dataclasses.replace(plan, weights=np.ones(len(plan.inverse), np.float32))
        for plan in plain
    ]
    gradients, shapes = gradients_of(rows, plain), [r.shape for r in rows]
    for found, expected in (
        (batching.pool_forward(rows, ones, POOLS[1]).values, batching.pool_forward(rows, plain, POOLS[1]).values),
        (
            batching.pool_backward(shapes, ones, gradients, POOLS[1]),
            batching.pool_backward(shapes, plain, gradients, POOLS[1]),
        ),
    ):
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_array_equal(ours.view(np.uint32), theirs.view(np.uint32))


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_squares_of_weights_neither_underflow_nor_overflow(scale):
    weighted = plan(weights=np.full(3, scale, np.float32), pooling="sqrtn", offsets=offsets(0, 2, 3))
    (found,) = batching.pool_forward([np.array([[1.0], [3.0]], np.float32)], [weighted], POOLS[1]).values
    np.testing.assert_allclose(found, [[4 / 2**0.5], [3.0]], rtol=1e-6)


@threads
@given(call=calls())
def test_forward_into_slices_of_one_buffer(threads, call):
    rows, plans = call
    expected = reference.pool_forward(rows, plans).values
    flat = [f for f, plan in enumerate(plans) if plan.pooling is not None]
    widths = np.cumsum([0] + [expected[f].shape[1] for f in flat])
    batch = max((plan.batch for plan in plans), default=0)
    buffer = np.full((batch, int(widths[-1]) + 1), 7, np.float32)
    out = [None] * len(plans)
    for i, f in enumerate(flat):
        out[f] = buffer[:, widths[i] : widths[i + 1]]
    pooled = batching.pool_forward(rows, plans, POOLS[threads], out)
    assert_equal_arrays(pooled.values, expected)
    for i, f in enumerate(flat):
        np.testing.assert_array_equal(buffer[:, widths[i] : widths[i + 1]], expected[f])
    assert (buffer[:, -1] == 7).all()


@threads
@given(call=calls(), missing=st.sets(st.integers(0, 4)), data=st.data())
def test_backward_is_the_reference(threads, call, missing, data):
    rows, plans = call
    gradients = gradients_of(rows, plans, missing=missing)
    if data.draw(st.booleans()):  # strided: slices of a wider buffer
        gradients = [g if g is None else np.concatenate([g, g], axis=-1)[..., : g.shape[-1]] for g in gradients]
    shapes = [r.shape for r in rows]
    found = batching.pool_backward(shapes, plans, gradients, POOLS[threads])
    assert_equal_arrays(found, reference.pool_backward(shapes, plans, gradients))


@pytest.mark.parametrize("dim", [1, 16, 33, 64])
@pytest.mark.parametrize("pooling", ["sum", "mean", None])
def test_backward_of_one_large_table_does_not_depend_on_threads(dim, pooling):
    rng = np.random.default_rng(dim)
    batch = 20_000
    plans = []
    rows = 5_000
    for _ in range(2):
        offsets = np.concatenate([[0], np.cumsum(rng.integers(0, 5, batch))]).astype(np.int64)
        inverse = (rows * rng.random(offsets[-1]) ** 3).astype(np.uint16)
        plans.append(FeaturePlan(0, inverse, offsets, pooling, 3))
    shape = (batch, dim) if pooling else (batch, 3, dim)
    gradients = [rng.standard_normal(shape, np.float32) for _ in plans]
    one, many = (batching.pool_backward([(rows, dim)], plans, gradients, pool) for pool in POOLS.values())
    np.testing.assert_array_equal(one[0].view(np.uint32), many[0].view(np.uint32))
    expected = np.zeros((rows, dim))
    for plan, gradient in zip(plans, gradients, strict=True):
        lengths = np.minimum(np.diff(plan.offsets), 3)
        sample = np.repeat(np.arange(batch), lengths)
        position = np.arange(len(sample)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        values = gradient[sample] if pooling else gradient[sample, position]
        if pooling == "mean":
            values = values / lengths[sample][:, None]
        np.add.at(expected, plan.inverse[plan.offsets[sample] + position], values)
    np.testing.assert_allclose(one[0], expected, rtol=1e-3, atol=1e-3)


def test_gradient_of_a_sum_is_broadcast():
    plan = FeaturePlan(0, np.array([0, 1, 0], np.uint16))
    gradient = np.broadcast_to(np.float32(2), (3, 4))
    (found,) = batching.pool_backward([(2, 4)], [plan], [gradient], POOLS[1])
    assert found.tolist() == [[4] * 4, [2] * 4]


def plan(**changes):
    fields = {"table": 0, "inverse": np.array([0, 1, 1], np.uint16), "offsets": None, "pooling": "sum"}
    return FeaturePlan(**{**fields, **changes})


def offsets(*values):
    return np.array(values, np.int64)


HOSTILE = {
    "inverse past the rows": plan(inverse=np.array([0, 1, 2], np.uint16)),
    "huge inverse": plan(inverse=np.array([0, 1, 2**32 - 1], np.uint32)),
    "inverse dtype": plan(inverse=np.array([0, 1, 1], np.int64)),
    "inverse shape": plan(inverse=np.zeros((3, 1), np.uint16)),
    "inverse stride": plan(inverse=np.zeros(6, np.uint16)[::2]),
    "offsets start": plan(offsets=offsets(1, 2, 3)),
    "offsets end early": plan(offsets=offsets(0, 1, 2)),
    "offsets end late": plan(offsets=offsets(0, 1, 4)),
    "offsets decrease": plan(offsets=offsets(0, 2, 1, 3)),
    "offsets negative": plan(offsets=offsets(0, -(2**62), 3)),
    "offsets huge": plan(offsets=offsets(0, 2**62, 3)),
    "offsets empty": plan(offsets=offsets()),
    "offsets dtype": plan(offsets=np.array([0, 1, 3], np.int32)),
    "table": plan(table=1),
    "negative table": plan(table=-1),
    "pooling": plan(pooling="max"),
    "max_length": plan(max_length=0),
    "negative max_length": plan(max_length=-1),
    "sequence without max_length": plan(pooling=None),
    "weights dtype": plan(weights=np.ones(3)),
    "weights length": plan(weights=np.ones(2, np.float32)),
    "weights stride": plan(weights=np.ones(6, np.float32)[::2]),
    "weighted sequence": plan(pooling=None, max_length=2, weights=np.ones(3, np.float32)),
    "hostile sequence": plan(pooling=None, max_length=2, inverse=np.array([0, 1, 2], np.uint16)),
}


@threads
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_plans_are_refused(threads, name):
    hostile = HOSTILE[name]
    rows = [np.ones((2, 4), np.float32)]
    with pytest.raises(DataError):
        batching.pool_forward(rows, [plan(), hostile], POOLS[threads])
    try:
        batch = hostile.batch
    except TypeError:
        batch = 3
    shape = (max(batch, 0), 4) if hostile.pooling else (max(batch, 0), hostile.max_length or 1, 4)
    with pytest.raises(DataError):
        batching.pool_backward(
            [(2, 4)], [plan(), hostile], [np.ones((3, 4), np.float32), np.ones(shape, np.float32)], POOLS[threads]
        )


def test_hostile_contents_of_a_split_table_are_refused():
    for bad in ("inverse", "offsets"):
        inverse = np.zeros(100_000, np.uint16)
        ends = np.arange(100_001, dtype=np.int64)
        if bad == "inverse":
            inverse[77_777] = 9
        else:
            ends[77_777] = 2**40
        with pytest.raises(DataError, match="feature 0"):
            batching.pool_backward(
                [(9, 32)], [plan(inverse=inverse, offsets=ends)], [np.ones((100_000, 32), "f4")], POOLS[3]
            )


@pytest.mark.parametrize(
    "out",
    [
        np.ones((3, 5), np.float32),
        np.ones((2, 4), np.float32),
        np.ones((3, 4), np.float64),
        np.ones((3, 8), np.float32)[:, ::2],
        np.ones(12, np.float32),
        np.broadcast_to(np.float32(1), (3, 4)),
        "text",
    ],
)
def test_outputs_that_do_not_fit_are_refused(out):
    with pytest.raises(DataError, match="feature 0"):
        batching.pool_forward([np.ones((2, 4), np.float32)], [plan()], POOLS[1], [out])


@pytest.mark.parametrize("gradient", [np.ones((3, 5), "f4"), np.ones((2, 4), "f4"), np.ones((3, 4)), np.ones(12, "f4")])
def test_gradients_that_do_not_fit_are_refused(gradient):
    with pytest.raises(DataError, match="feature 0"):
        batching.pool_backward([(2, 4)], [plan()], [gradient], POOLS[1])


def test_numbers_of_arguments_are_checked():
    rows = [np.ones((2, 4), np.float32)]
    with pytest.raises(DataError):
        batching.pool_forward(rows, [plan()], POOLS[1], [])
    with pytest.raises(DataError):
        batching.pool_backward([(2, 4)], [plan()], [], POOLS[1])
    with pytest.raises(DataError):
        batching.pool_forward([np.ones((2, 4))], [plan()], POOLS[1])


def test_a_message_names_the_first_bad_feature():
    bad = HOSTILE["inverse past the rows"]
    with pytest.raises(DataError, match="feature 1: inverse"):
        batching.pool_forward([np.ones((2, 4), np.float32)], [plan(), bad, bad], POOLS[3])
