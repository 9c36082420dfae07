"""Tables of 16-bit values: rounding, its random numbers, and what becomes of values that do not fit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persia.errors import ConfigError, StoreError
from persia.store import NativeStore, ReferenceStore, TableConfig
from persia.types.values import DTYPES, LARGEST, from_halves, round_down, to_halves, widen, words_of
from support.stores import contents, lookup, update

NARROW = ["bfloat16", "float16"]
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


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


@pytest.mark.parametrize("dtype", NARROW)
@given(value=FLOATS)
@settings(max_examples=60, deadline=None)
def test_nearest_is_exact_where_the_dtype_has_the_value(dtype, value):
    values = np.array([value], np.float32)
    once = from_halves(to_halves(values, dtype))
    np.testing.assert_array_equal(from_halves(to_halves(once, dtype)), once)
    assert np.isfinite(once).all()
    assert round_down(abs(float(once[0])), dtype) == abs(float(once[0]))


@pytest.mark.parametrize("dtype", NARROW)
@given(value=FLOATS)
@settings(max_examples=60, deadline=None)
def test_an_update_keeps_values_that_the_dtype_has(dtype, value):
    value = from_halves(to_halves(np.array([value], np.float32), dtype))[0]
    ids = np.arange(20, dtype=np.uint64)
    rows = stored_after(plain(dtype, 3), ids, [np.full((20, 3), -value, np.float32)])
    np.testing.assert_array_equal(rows, np.full_like(rows, value))


@pytest.mark.parametrize("dtype", NARROW)
@given(value=st.floats(1e-6, 6e4), sign=st.sampled_from([-1, 1]))
@settings(max_examples=25, deadline=None)
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
@pytest.mark.parametrize("dtype", NARROW)
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
    other = stored_after(plain(dtype, 7, optimizer=optimizer, seed=1), ids, gradients)
    assert (other != whole).any()


@pytest.mark.parametrize("make", [NativeStore, ReferenceStore])
@pytest.mark.parametrize("dtype", NARROW)
def test_finite_values_stay_finite(make, dtype):
    store = make()
    store.create_table(plain(dtype, 4))
    ids = np.array([1], np.uint64)
    lookup(store, ids)
    largest = np.finfo(np.float32).max
    update(store, ids, np.array([[largest, -largest, 1, -1]], np.float32), lr=1.0)
    np.testing.assert_array_equal(lookup(store, ids), [[-LARGEST[dtype], LARGEST[dtype], -1, 1]])


@pytest.mark.parametrize("make", [NativeStore, ReferenceStore])
@pytest.mark.parametrize("dtype", NARROW)
def test_values_stay_within_the_bound(make, dtype):
    """Also where the bound is no number of the dtype: rounding must not lead beyond it."""
    store = make()
    store.create_table(plain(dtype, 5, value_bound=0.7003))
    ids = np.arange(200, dtype=np.uint64)
    lookup(store, ids)
    update(store, ids, np.full((200, 5), -5, np.float32), lr=1.0)
    rows = lookup(store, ids)
    assert rows.max() <= 0.7003
    assert rows.min() == rows.max() == round_down(0.7003, dtype) > 0.69


@pytest.mark.parametrize("make", [NativeStore, ReferenceStore])
@pytest.mark.parametrize("dtype", NARROW)
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
            store.lookup([0], [np.arange(200_000, dtype=np.uint64)], True)
            assert store.memory_bytes(0) <= 200_000 * config.row_bytes
            assert store.memory_bytes(0) > 200_000 * (config.row_bytes - 24)
            sizes[dtype, optimizer] = config.row_bytes - 40
    assert [sizes["float32", o] for o in ("sgd", "adagrad", "rowwise_adagrad", "adam")] == [64, 128, 68, 192]
    assert [sizes["bfloat16", o] for o in ("sgd", "adagrad", "rowwise_adagrad", "adam")] == [32, 96, 36, 96]
    assert sizes["float16", "adam"] == 32 + 128  # Second moments would underflow.


def test_second_moments_of_float16_do_not_underflow():
    """Gradients of a mean over a batch are small: their squares are below the smallest float16."""
    ids = np.arange(50, dtype=np.uint64)
    gradients = [np.full((50, 4), 1e-5, np.float32)] * 10
    expected = stored_after(plain("float32", 4, optimizer="adam"), ids, gradients)
    for dtype in NARROW:
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
