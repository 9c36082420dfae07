"""Tables of 16-bit values: rounding, its random numbers, and what becomes of values that do not fit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persia.errors import ConfigError, StoreError
from persia.store import ROW_OVERHEAD, NativeStore, TableConfig
from persia.types.half_floats import (
    DTYPES,
    LARGEST,
    from_halves,
    largest_finite,
    round_down,
    to_halves,
    words_of,
)
from support.examples import examples
from support.stores import contents, lookup, update, widen
from support.twins import values as reference_values
from support.twins.store import ReferenceStore

OF_16_BITS = ["bfloat16", "float16"]
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
BOUNDS = st.floats(1e-44, 1e300) | st.floats(1e-8, 1e-4) | st.floats(0.1, 1e5)


def plain(dtype, dim=8, **settings):
    """A table whose rows become minus the sum of their gradients, rounded after each."""
    settings = {"optimizer": "sgd", "initializer": "zeros", "shards": 1, "dtype": dtype} | settings
    return TableConfig("t", dim, **settings)


def stored_after(config, ids, gradients, threads=1):
    store = NativeStore(threads)
    store.create_table(config)
    lookup(store, ids)
    for gradient in gradients:
        update(store, ids, gradient, lr=1.0)
    return lookup(store, ids, False)


@pytest.mark.parametrize("dtype", OF_16_BITS)
@given(value=FLOATS)
@settings(max_examples=examples(60), deadline=None)
def test_nearest_is_exact_where_the_dtype_has_the_value(dtype, value):
    values = np.array([value], np.float32)
    once = from_halves(to_halves(values, dtype))
    np.testing.assert_array_equal(from_halves(to_halves(once, dtype)), once)
    assert np.isfinite(once).all()
    assert round_down(abs(float(once[0])), dtype) == abs(float(once[0]))


@pytest.mark.parametrize("dtype", OF_16_BITS)
@pytest.mark.filterwarnings("error")
@given(value=BOUNDS)
@settings(max_examples=examples(200), deadline=None)
def test_round_down(dtype, value):
    down = round_down(value, dtype)
    assert 0 <= down <= value
    bits = to_halves(np.array([down], np.float32), dtype).view(np.uint16)
    assert float(from_halves(bits.view(np.float16) if dtype == "float16" else bits)[0]) == down
    above = bits + np.uint16(1)
    following = float(from_halves(above.view(np.float16) if dtype == "float16" else above)[0])
    assert down == LARGEST[dtype] or following > value


@pytest.mark.parametrize("dtype", OF_16_BITS)
def test_conversions_agree_with_the_reference(dtype):
    random = np.random.default_rng(0)
    values = random.integers(0, 2**32, 50_001, dtype=np.uint32).view(np.float32)
    values[:40_000] = random.normal(size=40_000) * 10.0 ** random.integers(-9, 6, 40_000)
    values[:6] = [0, -0.0, np.inf, -np.inf, np.nan, LARGEST[dtype]]
    for shape in ((50_001,), (7, 7143), (0, 3), (50_000, 1)):
        part = values[: np.prod(shape)].reshape(shape)
        found, expected = to_halves(part, dtype), reference_values.to_halves(part, dtype)
        assert found.shape == shape
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(from_halves(found), reference_values.from_halves(expected))
        assert largest_finite(part) == np.abs(part[np.isfinite(part)]).max(initial=0)
    half = values.reshape(3, -1)[:, ::2]  # Not contiguous.
    np.testing.assert_array_equal(to_halves(half, dtype), to_halves(half.copy(), dtype))
    bits = np.arange(2**16, dtype=np.uint16)
    halves = bits.view(np.float16) if dtype == "float16" else bits
    np.testing.assert_array_equal(
        from_halves(halves).view(np.uint32)[~np.isnan(from_halves(halves))],
        reference_values.from_halves(halves).view(np.uint32)[~np.isnan(from_halves(halves))],
    )


@pytest.mark.parametrize("dtype", OF_16_BITS)
@given(value=FLOATS)
@settings(max_examples=examples(60), deadline=None)
def test_an_update_keeps_values_that_the_dtype_has(dtype, value):
    value = from_halves(to_halves(np.array([value], np.float32), dtype))[0]
    ids = np.arange(20, dtype=np.uint64)
    rows = stored_after(plain(dtype, 3), ids, [np.full((20, 3), -value, np.float32)])
    np.testing.assert_array_equal(rows, np.full_like(rows, value))


@pytest.mark.parametrize("dtype", OF_16_BITS)
@given(value=st.floats(1e-6, 6e4), sign=st.sampled_from([-1, 1]))
@settings(max_examples=examples(25), deadline=None)
def test_rounding_is_right_on_average(dtype, value, sign):
    """Over rows, elements and updates."""
    value = np.float32(value * sign)
    ids = np.arange(2000, dtype=np.uint64)
    rows = stored_after(plain(dtype, 8), ids, [np.full((2000, 8), -value, np.float32)])
    found = np.unique(rows)
    assert len(found) <= 2  # its neighbours
    step = np.float64(found.max()) - found.min()
    assert abs(rows.astype(np.float64).mean() - value) <= 5 * step / np.sqrt(rows.size)


def test_small_updates_add_up():
    """A thousandth of a value's last digit, a thousand times: to the nearest, nothing would ever change."""
    ids = np.arange(500, dtype=np.uint64)
    first = np.full((500, 4), -1, np.float32)
    rest = np.full((500, 4), -(2.0**-17), np.float32)
    rows = stored_after(plain("bfloat16", 4), ids, [first] + [rest] * 1024)
    assert abs(rows.astype(np.float64).mean() - (1 + 1024 * 2.0**-17)) < 1e-3


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam"])
@pytest.mark.parametrize("dtype", OF_16_BITS)
def test_results_do_not_depend_on_shards_threads_or_other_ids(dtype, optimizer):
    """The same rows, updated the same number of times; so two PSs get what one would."""
    random = np.random.default_rng(4)
    ids = random.integers(0, 2**64, 3000, dtype=np.uint64)
    gradients = random.normal(size=(5, 3000, 7)).astype(np.float32)
    whole = stored_after(plain(dtype, 7, optimizer=optimizer, shards=1, initializer="uniform"), ids, gradients)
    for mine, threads, shards in ((slice(None, None, -1), 2, 8), (slice(1000, 2000), 2, 4)):
        config = plain(dtype, 7, optimizer=optimizer, shards=shards, initializer="uniform")
        part = stored_after(config, ids[mine].copy(), [g[mine].copy() for g in gradients], threads)
        np.testing.assert_array_equal(part, whole[mine])
    # Of zeros, as other initial values would differ by themselves.
    one, other = (stored_after(plain(dtype, 7, optimizer=optimizer, seed=seed), ids, gradients) for seed in (0, 1))
    assert (one != other).any()


@pytest.mark.parametrize("make", [NativeStore, ReferenceStore])
@pytest.mark.parametrize(("days", "updates"), [(60, 1), (10, 20)])
def test_rows_loaded_without_state_do_not_reuse_random_numbers(make, days, updates):
    """A new run on yesterday's rows: update counts begin at 0, and with several updates a day the steps do, too."""
    config = plain("bfloat16", 4)
    ids = np.arange(40 if make is ReferenceStore else 1000, dtype=np.uint64)
    digit = 2.0**-7
    rows = np.ones((len(ids), 4), np.float32)
    for day in range(days):
        store = make()
        store.create_table(config)
        lookup(store, ids)
        zeros = np.zeros(len(ids), np.uint32)
        first = contents(store)[0]
        store.import_rows(0, first._replace(embeddings=rows[first.ids.astype(int)], update_count=zeros))
        for update_ in range(updates):
            step = update_ if updates > 1 else day
            update(store, ids, np.full((len(ids), 4), -0.1 * digit, np.float32), lr=1.0, step=step)
        rows = lookup(store, ids, False)
    moved = (rows.astype(np.float64) - 1) / digit
    expected = 0.1 * days * updates
    assert abs(moved.mean() - expected) <= 5 * np.sqrt(expected * 0.9 / moved.size)
    assert moved.std() <= 1.3 * np.sqrt(expected * 0.9)  # As of updates that are independent of each other.


@pytest.mark.parametrize("make", [NativeStore, ReferenceStore])
@pytest.mark.parametrize("dtype", OF_16_BITS)
def test_finite_values_stay_finite(make, dtype):
    store = make()
    store.create_table(plain(dtype, 4))
    ids = np.array([1], np.uint64)
    lookup(store, ids)
    largest = np.finfo(np.float32).max
    update(store, ids, np.array([[largest, -largest, 1, -1]], np.float32), lr=1.0)
    np.testing.assert_array_equal(lookup(store, ids), [[-LARGEST[dtype], LARGEST[dtype], -1, 1]])


@pytest.mark.parametrize("make", [NativeStore, ReferenceStore])
@pytest.mark.parametrize("dtype", OF_16_BITS)
@pytest.mark.parametrize("bound", [0.7003, 0.7005, 0.702, 0.9998])
def test_values_stay_within_the_bound(make, dtype, bound):
    """Also where the bound is no number of the dtype: rounding must not lead beyond it, in whatever way."""
    store = make()
    initial = {"initializer": "uniform", "initializer_a": bound, "initializer_b": bound}
    store.create_table(plain(dtype, 5, value_bound=bound, **initial))
    ids = np.arange(50, dtype=np.uint64)
    expected = round_down(bound, dtype)
    assert bound * 0.99 < expected <= bound
    np.testing.assert_array_equal(lookup(store, ids), np.full((50, 5), expected))
    update(store, ids, np.full((50, 5), -5, np.float32), lr=1.0)
    np.testing.assert_array_equal(lookup(store, ids), np.full((50, 5), expected))
    rows = contents(store)[0]
    values = np.array([bound, -bound, 3, -np.inf, np.nan], np.float32)
    store.import_rows(0, rows._replace(embeddings=np.tile(values, (50, 1))))
    np.testing.assert_array_equal(lookup(store, ids)[7], np.array([1, -1, 1, -1, np.nan]) * expected)


@pytest.mark.parametrize("make", [NativeStore, ReferenceStore])
@pytest.mark.parametrize("dtype", OF_16_BITS)
@pytest.mark.parametrize("dim", [1, 3, 5, 8])
def test_rows_as_stored(make, dtype, dim):
    store = make()
    config = plain(dtype, dim, initializer="uniform")
    store.create_table(config)
    ids = np.arange(10, dtype=np.uint64)
    words = np.empty((10, config.row_words), np.float32)
    store.lookup_packed([0], [10], ids, words.reshape(-1), True)
    assert config.row_words == (dim + 1) // 2
    halves = words.view(np.uint16)
    assert not halves[:, dim:].any()
    np.testing.assert_array_equal(widen(words, dtype, dim), store.peek(0, ids)[1].embeddings)
    np.testing.assert_array_equal(widen(words, dtype, dim), contents(store)[0].embeddings)
    with pytest.raises(StoreError):
        store.lookup_packed([0], [10], ids, np.empty(10 * config.row_words + 1, np.float32), True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_imports_round_to_the_nearest(dtype):
    config = plain(dtype, 3, optimizer="adam")
    both = NativeStore(), ReferenceStore()
    random = np.random.default_rng(0)
    for store in both:
        store.create_table(config)
        lookup(store, np.arange(50, dtype=np.uint64))
    rows = contents(both[0])[0]
    rows = rows._replace(
        embeddings=random.normal(size=rows.embeddings.shape).astype(np.float32),
        state=np.abs(random.normal(size=rows.state.shape)).astype(np.float32),
    )
    for store in both:
        store.import_rows(0, rows)
        found = contents(store)[0]
        np.testing.assert_array_equal(found.embeddings, from_halves(to_halves(rows.embeddings, dtype)))
        np.testing.assert_array_equal(found.state, from_halves(to_halves(rows.state, config.state_dtype)))


def test_memory_of_a_row():
    sizes = {}
    for dtype in DTYPES:
        for optimizer in ("sgd", "adagrad", "rowwise_adagrad", "adam"):
            config = TableConfig("t", 16, dtype=dtype, optimizer=optimizer, shards=4)
            store = NativeStore()
            store.create_table(config)
            store.lookup([0], [np.arange(60_000, dtype=np.uint64)], True)
            assert store.memory_bytes(0) <= 60_000 * config.row_bytes
            assert store.memory_bytes(0) > 60_000 * (config.row_bytes - 24)
            sizes[dtype, optimizer] = config.row_bytes - ROW_OVERHEAD
    assert [sizes["float32", o] for o in ("sgd", "adagrad", "rowwise_adagrad", "adam")] == [64, 128, 68, 192]
    assert [sizes["bfloat16", o] for o in ("sgd", "adagrad", "rowwise_adagrad", "adam")] == [32, 96, 36, 96]
    assert sizes["float16", "adam"] == 32 + 128  # Second moments would underflow.


def test_second_moments_of_float16_do_not_underflow():
    """Gradients of a mean over a batch are small: their squares are below the smallest float16."""
    ids = np.arange(50, dtype=np.uint64)
    gradients = [np.full((50, 4), 1e-5, np.float32)] * 10
    expected = stored_after(plain("float32", 4, optimizer="adam"), ids, gradients)
    for dtype in OF_16_BITS:
        found = stored_after(plain(dtype, 4, optimizer="adam"), ids, gradients)
        np.testing.assert_allclose(found.mean(), expected.mean(), rtol=0.02)


@pytest.mark.parametrize("capacity", [50, 10**6])
def test_regions_of_another_dtype_are_refused(tmp_path, capacity):
    """Files of very small tables have the same size."""
    path = str(tmp_path / "t")
    ids = np.arange(20, dtype=np.uint64)
    settings = {"initializer": "uniform", "capacity": capacity}
    store = NativeStore()
    store.create_table(plain("bfloat16", 5, **settings), path)
    rows = lookup(store, ids)
    del store
    for dtype in ("float16", "float32"):  # The path has the word, too.
        with pytest.raises(StoreError, match=r"(another|or) dtype|dtype, the"):
            NativeStore().create_table(plain(dtype, 5, **settings), path, attach=True)
    store = NativeStore()
    store.create_table(plain("bfloat16", 5, **settings), path, attach=True)
    np.testing.assert_array_equal(lookup(store, ids, False), rows)


@pytest.mark.parametrize(
    ("settings", "field"),
    [({"dtype": "bf16"}, "dtype"), ({"dtype": "float16", "value_bound": 1e-9}, "value_bound")],
)
def test_refused_settings(settings, field):
    with pytest.raises(ConfigError) as caught:
        TableConfig("t", 4, **settings)
    assert caught.value.fields["field"] == field


def test_words_of():
    assert [words_of("bfloat16", n) for n in (0, 1, 2, 3)] == [0, 1, 1, 2]
    assert words_of("float32", 3) == 3
