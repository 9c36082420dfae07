"""Eviction by midpoint insertion: rows of ids that come once leave before those of ids that have come again."""

import tempfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persia.errors import ConfigError, StoreError
from persia.schema import Days, Table
from persia.store import NativeStore, TableConfig
from support.examples import examples
from support.stores import contents, lookup, update
from support.twins.store import ReferenceStore

HOT = np.arange(500, dtype=np.uint64)


def clock_of(store):
    return int(store.export_state(0, 0)["clocks"][0])


def meet(store, ids, pushed):
    """Looks ids up, as training does, and pushes gradients for them if `pushed`."""
    lookup(store, ids)
    if pushed:
        assert update(store, ids, np.ones((len(ids), 4))).applied == len(ids)


def made(config, path=None, attach=False):
    store = NativeStore()
    store.create_table(config, path and str(path), attach)
    return store


def reload(store):
    """Empties a table and loads what it had, as from a checkpoint."""
    parts, state = [rows for _, rows in store.iterate_rows(0, max_rows=100)], store.export_state(0, 0)
    store.clear(0)
    for rows in parts:
        store.import_rows(0, rows)
    store.import_state(0, 0, state)


def after_a_scan(eviction, pushed, path=None, restore=False):
    """Returns how many of 500 rows that have come twice are left after 20,000 ids that come once, of 1,000 rows.

    With `path` another store attaches to the rows before these come; with `restore` they are loaded from a checkpoint.
    """
    store = made(config := TableConfig("t", 4, capacity=1000, shards=1, optimizer="sgd", eviction=eviction), path)
    for id_ in range(1000):
        meet(store, np.array([id_], np.uint64), pushed)
    meet(store, HOT, pushed)
    if path:
        del store
        store = made(config, path, attach=True)
    if restore:
        reload(store)
    for first in range(1000, 21_000, 100):
        meet(store, np.arange(first, first + 100, dtype=np.uint64), pushed)
    assert store.size(0) == 1000
    assert store.statistics(0)["evicted"] == 20_000
    return int(store.contains(0, HOT).sum())


@pytest.mark.parametrize("pushed", [False, True])
def test_ids_that_come_once_displace_few_others(pushed):
    assert after_a_scan("lru", pushed) == 0
    assert after_a_scan("midpoint", pushed) >= 480


def test_they_displace_few_after_a_restart_or_a_resume(tmp_path):
    """No process keeps the scan of another, from which the place of new rows comes."""
    assert after_a_scan("midpoint", True, tmp_path / "t") >= 480
    assert after_a_scan("midpoint", True, restore=True) >= 480


@settings(max_examples=examples(30), deadline=None)
@given(rows=st.integers(1, 300), requests=st.integers(1, 30), seed=st.integers(0, 2**32))
def test_with_room_values_are_those_of_exact_lru(rows, requests, seed):
    random = np.random.default_rng(seed)
    both = [made(TableConfig("t", 4, capacity=rows, shards=1, eviction=eviction)) for eviction in ("lru", "midpoint")]
    for step in range(requests):
        ids = random.choice(rows, random.integers(1, rows + 1), replace=False).astype(np.uint64)
        np.testing.assert_array_equal(*(lookup(store, ids) for store in both))
        mine, theirs = (update(store, ids, np.ones((len(ids), 4)), 0.1, step) for store in both)
        assert mine == theirs
    assert both[0].statistics(0) == both[1].statistics(0)
    assert both[1].statistics(0)["evicted"] == 0
    (mine,), (theirs,) = (contents(store).values() for store in both)
    for name in mine._fields:
        if name != "stamp":
            np.testing.assert_array_equal(getattr(mine, name), getattr(theirs, name), err_msg=name)


def test_what_needs_the_time_of_the_last_use_is_refused():
    for more in ({"ttl": 5}, {"memory_rows": 100}):
        with pytest.raises(ConfigError, match='eviction must be "lru" with ttl or memory_rows'):
            TableConfig("t", 4, capacity=1000, eviction="midpoint", **more)
    for more in ({"ttl": Days(1)}, {"spill": "/mnt"}):
        with pytest.raises(ConfigError, match="cannot be combined with ttl or spill"):
            Table("t", 4, eviction="midpoint", **more)
    with pytest.raises(ConfigError, match=r"Invalid Table\('t'\).eviction = 'fifo'; expected one of: lru, midpoint"):
        Table("t", 4, eviction="fifo")
    with pytest.raises(StoreError, match="use NativeStore"):
        ReferenceStore().create_table(TableConfig("t", 4, eviction="midpoint"))


class ExactRows:
    """Ids, stamps and counts of updates of a shard that searches all its rows for each victim.

    Only the stamp of a new row is not computed here: it is estimated from a sample inside of the shard.
    """

    def __init__(self, capacity):
        self.capacity = capacity
        self.ids, self.stamps, self.updates = ([] for _ in range(3))

    def look_up(self, id_, clock):
        """Returns the place of a new row and the stamp of the row that left it, 0 if none did; None if there is one."""
        if id_ in self.ids:
            self.stamps[self.ids.index(id_)] = clock
            return None
        if len(self.ids) < self.capacity:
            for column, value in ((self.ids, id_), (self.stamps, 0), (self.updates, 0)):
                column.append(value)
            return len(self.ids) - 1, 0
        place = min(range(self.capacity), key=self.stamps.__getitem__)
        before = self.stamps[place]
        self.ids[place], self.stamps[place], self.updates[place] = id_, 0, 0
        return place, before

    def push(self, id_, clock):
        """Returns whether there was a row. Its first gradient is that of the lookup which inserted it."""
        if id_ not in self.ids:
            return False
        place = self.ids.index(id_)
        self.updates[place] += 1
        if self.updates[place] > 1:
            self.stamps[place] = clock
        return True


@settings(max_examples=examples(60), deadline=None)
@given(
    capacity=st.sampled_from([1, 2, 7, 20, 60, 600]),
    ids_per_row=st.sampled_from([1, 2, 5]),
    pushed=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 2**32),
)
def test_any_history(capacity, ids_per_row, pushed, seed):
    """The row that leaves is the least recent one; a new row enters above it, and is no more recent than the last.

    Now and then another store attaches to the rows, or loads them from a checkpoint.
    """
    random = np.random.default_rng(seed)

    def draw():
        return int(random.geometric(1 / (capacity * ids_per_row)))

    config = TableConfig("t", 1, capacity=capacity, shards=1, optimizer="sgd", initializer="zeros", eviction="midpoint")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        path = f"{directory}/t"
        store, exact = made(config, path), ExactRows(capacity)
        for sequence in range(1, 3 * capacity + 60):
            if random.random() < 0.02:
                del store
                store = made(config, path, attach=True)
            elif random.random() < 0.02:
                reload(store)
            id_ = draw()
            lookup(store, np.array([id_], np.uint64))
            new = exact.look_up(id_, clock_of(store))
            (rows,) = contents(store).values()
            if new is not None:
                place, before = new
                assert before < rows.stamp[place] <= clock_of(store)
                exact.stamps[place] = int(rows.stamp[place])
            if random.random() < pushed:
                id_ = id_ if random.random() < 0.8 else draw()
                counts = update(store, np.array([id_], np.uint64), np.ones((1, 1)), 1.0, sequence, 9, sequence)
                assert counts.applied == exact.push(id_, clock_of(store))
                (rows,) = contents(store).values()
            assert rows.ids.tolist() == exact.ids
            assert rows.stamp.tolist() == exact.stamps
            assert rows.embeddings[:, 0].tolist() == [-float(count) for count in exact.updates]
