"""Lookups and updates of all tables in one buffer are those of a buffer for each table."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persia.errors import StoreError
from persia.store import NativeStore, TableConfig
from support.stores import STORES, lookup, read

DIMS = (3, 1, 4)
ids_of_a_table = st.lists(st.integers(0, 20), unique=True, max_size=12).map(lambda ids: np.array(ids, np.uint64))
batches = st.lists(
    st.tuples(st.permutations(range(len(DIMS))), st.tuples(*[ids_of_a_table] * len(DIMS)), st.integers(1, 3)),
    max_size=4,
)


def a_store(kind=NativeStore):
    store = kind(2)
    for number, dim in enumerate(DIMS):
        store.create_table(TableConfig(f"t{number}", dim, capacity=16, shards=2, seed=number))
    return store


@settings(deadline=None)
@given(batches)
def test_packed_calls_are_those_table_by_table(batches):
    packed, apart = a_store(), a_store()
    rng = np.random.default_rng(0)
    for step, (order, ids, count) in enumerate(batches):
        tables = list(order)[:count]
        mine = [ids[table] for table in tables]
        counts, flat = [len(i) for i in mine], np.concatenate(mine)
        rows = np.empty(sum(len(i) * DIMS[t] for t, i in zip(tables, mine, strict=True)), np.float32)
        packed.lookup_packed(tables, counts, flat, rows, True)
        expected = apart.lookup(tables, mine, True)
        np.testing.assert_array_equal(rows, np.concatenate([values.reshape(-1) for values in expected]))
        gradients = [rng.random(values.shape, np.float32) for values in expected]
        lrs = [0.1 * (table + 1) for table in tables]
        whole = np.concatenate([values.reshape(-1) for values in gradients])
        found = packed.update_packed(tables, counts, flat, whole, lrs, step, 1, step + 1)
        assert found == apart.update(tables, mine, gradients, lrs, step, 1, step + 1)
    every = [np.arange(21, dtype=np.uint64)] * len(DIMS)
    for ours, theirs in zip(
        packed.lookup(range(len(DIMS)), every, False), apart.lookup(range(len(DIMS)), every, False), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("kind", STORES)
def test_rows_are_read_with_whether_there_are_any(kind):
    """Of several tables in any order; nothing is admitted, counted or touched."""
    store = a_store(STORES[kind])
    for table, ids in ((0, [3, 1]), (2, [7])):
        lookup(store, np.array(ids, np.uint64), table=table)
    before = [store.statistics(table) for table in range(len(DIMS))]
    asked = np.array([7, 9, 1, 2, 3, 3, 5], np.uint64)
    rows = np.full(2 * 4 + 4 * 3 + 1, 99, np.float32)
    found = store.read_packed([2, 0, 1], [2, 4, 1], asked, rows)
    assert found.dtype == np.bool_
    assert found.tolist() == [True, False, True, False, True, True, False]
    parts = zip([2, 0, 1], [asked[:2], asked[2:6], asked[6:]], strict=True)
    expected = [lookup(store, part, train=False, table=table).reshape(-1) for table, part in parts]
    np.testing.assert_array_equal(rows, np.concatenate(expected))
    assert rows[:4].any()
    assert not rows[4:8].any()
    assert [store.statistics(table) for table in range(len(DIMS))] == before
    assert [store.size(table) for table in range(len(DIMS))] == [2, 0, 1]


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("tables", [[], [1], [0, 2]])
def test_no_ids_are_read(kind, tables):
    store = a_store(STORES[kind])
    found = store.read_packed(tables, [0] * len(tables), np.empty(0, np.uint64), np.empty(0, np.float32))
    assert found.dtype == np.bool_
    assert found.shape == (0,)


@pytest.mark.parametrize("kind", STORES)
def test_reading_keeps_the_order_of_evictions(kind):
    """A row that is only read leaves as if it were not."""
    store = STORES[kind](1)
    store.create_table(TableConfig("t", 2, capacity=8, shards=1))
    lookup(store, np.arange(8, dtype=np.uint64))
    for _ in range(3):
        assert read(store, np.zeros(1, np.uint64))[1].all()
    lookup(store, np.array([100], np.uint64))
    assert not read(store, np.zeros(1, np.uint64))[1].any()


IDS, ROWS = np.arange(3, dtype=np.uint64), np.zeros(3 * 3, np.float32)
WRONG = {
    "an unknown table": ([9], [3], IDS, ROWS),
    "a table twice": ([0, 0], [1, 2], IDS, ROWS),
    "fewer counts": ([0, 1], [3], IDS, ROWS),
    "counts beyond the ids": ([0], [4], IDS, ROWS),
    "counts short of the ids": ([0], [2], IDS, ROWS),
    "a negative count": ([0, 1], [4, -1], IDS, ROWS),
    "too few floats": ([0], [3], IDS, ROWS[:8]),
    "too many floats": ([0], [3], IDS[:], np.zeros(10, np.float32)),
    "other ids": ([0], [3], IDS.astype(np.int32), ROWS),
    "ids with gaps": ([0], [3], np.arange(6, dtype=np.uint64)[::2], ROWS),
    "other floats": ([0], [3], IDS, ROWS.astype(np.float64)),
    "floats of two dimensions": ([0], [3], IDS, ROWS.reshape(3, 3)),
}


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused_and_changes_nothing(name, kind):
    store = a_store(STORES[kind])
    tables, counts, ids, rows = WRONG[name]
    with pytest.raises(StoreError):
        store.lookup_packed(tables, counts, ids, rows, True)
    with pytest.raises(StoreError):
        store.update_packed(tables, counts, ids, rows, [0.1] * len(tables), 0)
    with pytest.raises(StoreError):
        store.read_packed(tables, counts, ids, rows)
    assert [store.size(table) for table in range(len(DIMS))] == [0, 0, 0]
