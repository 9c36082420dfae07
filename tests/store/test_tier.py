"""Rows on disk: a table with a few rows of memory is what one with all rows in memory is."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from benchmarks.recovery_load import Load, kills
from hypothesis import given, settings
from hypothesis import strategies as st
from test_against_reference import INITIALIZERS, OPTIMIZERS

from persia.errors import ConfigError, StoreError
from persia.ps.row_chunks import set_rows
from persia.store import COLD_ROW_BYTES, NativeStore, Spill, TableConfig
from persia.types import BUCKETS
from persia.types.half_floats import DTYPES
from support.examples import examples
from support.stores import lookup, read, update
from support.twins.rocks import RocksStore
from support.twins.store import ReferenceStore

FIBONACCI = np.uint64(0x9E3779B97F4A7C15)
STORES = {"native": NativeStore, "reference": ReferenceStore, "rocksdb": RocksStore}


@pytest.fixture(params=STORES)
def store(request):
    if request.param == "rocksdb":
        pytest.importorskip("rocksdict")
    return STORES[request.param]()


@contextmanager
def directory():
    path = Path(tempfile.mkdtemp(prefix="persia-test-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def ids(*values):
    return np.array(values, np.uint64)


def by_id(store, table=0):
    """All rows by id, without their stamps, which are those of calls."""
    found = {}
    for _, rows in store.iterate_rows(table, max_rows=5):
        for id_, *columns in zip(*rows[:-1], strict=True):
            assert id_ not in found, f"id {id_} has two rows"
            found[int(id_)] = tuple(column.tobytes() for column in columns)
    return found


@st.composite
def configs(draw):
    """Tables that hold all ids of a history, three rows of them in the memory of each shard."""
    optimizer, params = draw(st.sampled_from(OPTIMIZERS))
    initializer, a, b = draw(st.sampled_from(INITIALIZERS))
    shards = draw(st.sampled_from([1, 2]))
    return TableConfig(
        name="t", dim=draw(st.integers(1, 9) | st.sampled_from([64, 257])), capacity=400, shards=shards,
        seed=draw(st.integers(0, 2**64 - 1)), optimizer=optimizer, optimizer_params=params, initializer=initializer,
        initializer_a=a, initializer_b=b, value_bound=draw(st.sampled_from([0.0, 0.4])),
        ttl=draw(st.sampled_from([0, 0, 3, 40])), dtype=draw(st.sampled_from(DTYPES)), memory_rows=3 * shards,
    )  # fmt: skip


def in_memory(config):
    return TableConfig(**{**vars(config), "memory_rows": 0})


ACTIONS = [
    "train",
    "train",
    "update",
    "update",
    "evaluate",
    "read",
    "set",
    "keep",
    "age",
    "snapshot",
    "restore",
    "remove",
    "remove_rows",
]


def any_history(make, data, path):
    """A store with rows on disk, made by `make`, agrees with one that has all of them in memory."""
    config = data.draw(configs())
    store, expected = make(), ReferenceStore()
    store.create_table(config, spill=str(path / "t"))
    expected.create_table(in_memory(config))
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    universe = random.integers(0, 2**64, data.draw(st.integers(1, 60)), dtype=np.uint64)
    since, kept = None, False
    for step in range(1, data.draw(st.integers(2, 14))):
        action = data.draw(st.sampled_from(ACTIONS))
        asked = random.choice(universe, random.integers(0, 30))
        both = (store, expected)
        if action in ("train", "evaluate"):
            np.testing.assert_array_equal(*(lookup(s, asked, action == "train") for s in both))
        elif action == "update":
            gradients = random.normal(size=(len(asked), config.dim)).astype(np.float32)
            push = data.draw(st.tuples(st.integers(0, 2), st.integers(0, 5)))
            mine, theirs = (update(s, asked, gradients, 0.1, step, *push) for s in both)
            assert mine == theirs
        elif action == "read":
            np.testing.assert_array_equal(*(s.last_steps(0, asked) for s in both))
            for ours, others in zip(*(read(s, asked) for s in both), strict=True):
                np.testing.assert_array_equal(ours, others)
            (mine, rows), (theirs, others) = (s.peek(0, asked) for s in both)
            np.testing.assert_array_equal(mine, theirs)
            for a, b in zip(rows[:-1], others[:-1], strict=True):
                np.testing.assert_array_equal(a, b)
        elif action == "set":
            keys = np.unique(asked)
            values = random.normal(size=(len(keys), config.dim)).astype(np.float32)
            assert set_rows(store, 0, keys, values, None) == set_rows(expected, 0, keys, values, None)
        elif action == "keep":
            kept = True
            for s in both:
                s.keep_last_steps(0)
        elif action == "age":
            by = data.draw(st.integers(0, 30))
            for s in both:
                s.advance_clock(0, by)
        elif action == "snapshot":
            # Rows move while it is read: it has those of its beginning, each once.
            whole = since is None or data.draw(st.booleans())
            share = data.draw(st.sampled_from([1.0, 0.5]))
            taken = random.random(BUCKETS) < share if share < 1 else None
            epochs = [s.begin_snapshot(0, 0 if whole else since, Spill(str(path)), taken) for s in both]
            since = epochs[0]
            found = [{}, {}]
            keys = np.unique(random.choice(universe, random.integers(0, 30)))
            for s in both:
                lookup(s, asked)
                update(s, asked, np.ones((len(asked), config.dim), np.float32), 0.1, step)
                set_rows(s, 0, keys, np.ones((len(keys), config.dim), np.float32), None)
            for s, rows, epoch in zip(both, found, epochs, strict=True):
                for shard in range(config.shards):
                    more = True
                    while more:
                        part, more = s.export_snapshot(0, shard, epoch, 7)
                        for id_, *columns in zip(*part[:-1], strict=True):
                            assert id_ not in rows
                            rows[int(id_)] = tuple(column.tobytes() for column in columns)
                s.end_snapshot(0)
            assert found[0] == found[1]
            assert epochs[0] == epochs[1]
        elif action == "remove_rows":
            mine, theirs = (s.remove_rows(0, asked) for s in both)
            assert mine == theirs or config.ttl
            since = None
        elif action == "remove":
            buckets = random.random(BUCKETS) < data.draw(st.sampled_from([0.0, 0.2, 0.8, 1.0]))
            mine, theirs = (sum(s.remove_buckets(0, shard, buckets) for shard in range(config.shards)) for s in both)
            assert mine == theirs or config.ttl
            since = None if mine else since
        else:
            moved = make()
            moved.create_table(config, spill=str(path / f"t{step}"))
            if kept:
                moved.keep_last_steps(0)
            for _, rows in store.iterate_rows(0, max_rows=7):
                moved.import_rows(0, rows)
            for shard in range(config.shards):
                moved.import_state(0, shard, store.export_state(0, shard))
            store, since = moved, None
        assert by_id(store) == by_id(expected)
        assert store.statistics(0)["evicted"] == 0
        counts = store.tier_counts(0)
        assert store.size(0) - counts["rows"] <= config.memory_rows
        if not config.ttl:
            assert store.size(0) == expected.size(0)
            assert store.statistics(0) == expected.statistics(0)


@pytest.mark.parametrize("make", [NativeStore, ReferenceStore])
@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_any_history_with_three_rows_of_memory(make, data):
    with directory() as path:
        any_history(make, data, path)


@settings(max_examples=examples(8), deadline=None)
@given(st.data())
def test_any_history_with_rows_in_rocksdb(data):
    pytest.importorskip("rocksdict")
    with directory() as path:
        any_history(RocksStore, data, path)


def test_rows_leave_memory_and_come_back(store, tmp_path):
    store.create_table(TableConfig("t", 4, capacity=1000, shards=1, memory_rows=100), spill=str(tmp_path / "t"))
    first = lookup(store, np.arange(500, dtype=np.uint64))
    assert update(store, np.arange(500, dtype=np.uint64), np.ones((500, 4))).absent == 0
    np.testing.assert_array_equal(np.sign(first - lookup(store, np.arange(500, dtype=np.uint64))), 1)
    counts = store.tier_counts(0)
    assert store.size(0) == 500
    assert counts["rows"] >= 400
    assert counts["spilled"] - counts["promoted"] == counts["rows"]
    assert counts["promoted"] >= 800
    assert counts["read"] >= counts["promoted"]
    before = store.tier_counts(0)
    assert lookup(store, np.arange(500, dtype=np.uint64), train=False).all()
    store.peek(0, np.arange(500, dtype=np.uint64))
    rows, found = read(store, np.arange(600, dtype=np.uint64))
    assert found.tolist() == [True] * 500 + [False] * 100
    np.testing.assert_array_equal(rows[:500], lookup(store, np.arange(500, dtype=np.uint64), train=False))
    assert not rows[500:].any()
    assert {**before, "read": 0} == {**store.tier_counts(0), "read": 0}  # Reading moves nothing.


def test_beyond_capacity_the_rows_longest_on_disk_are_evicted(store, tmp_path):
    # The store in C++ lets go of rows by blocks, which are small only beside many; the others go row by row.
    capacity, memory, step = (20_000, 500, 250) if isinstance(store, NativeStore) else (2_000, 100, 50)
    table = TableConfig("t", 4, capacity=capacity, shards=1, memory_rows=memory)
    store.create_table(table, spill=str(tmp_path / "t"))
    for start in range(0, 2 * capacity, step):
        lookup(store, np.arange(start, start + step, dtype=np.uint64))
    present = store.contains(0, np.arange(2 * capacity, dtype=np.uint64))
    kept = present.sum()
    assert kept == store.size(0) == 2 * capacity - store.statistics(0)["evicted"]
    assert 0.9 * capacity <= kept <= capacity
    assert present[-memory:].all()  # What is in memory.
    assert present[-int(0.9 * capacity) :].mean() > 0.9
    store.begin_snapshot(0, 0, Spill(str(tmp_path)))
    lookup(store, np.arange(3 * capacity, 3 * capacity + capacity // 10, dtype=np.uint64))
    evicted = store.statistics(0)["evicted"]
    store.end_snapshot(0)
    epoch = store.begin_snapshot(0, store.changes_since(0), Spill(str(tmp_path)))
    gone = store.snapshot_evicted(0, 0, epoch)
    assert len(gone) == evicted - (2 * capacity - kept) > 0
    assert not store.contains(0, gone).any()
    store.end_snapshot(0)


def test_a_cold_row_takes_no_more_memory_than_it_is_planned_with(tmp_path):
    """At each size, also where the index has just grown; but for small shards, whose index doubles."""
    store = NativeStore(1)
    config = TableConfig("item", 1, capacity=100_000, shards=1, optimizer="sgd", memory_rows=1024)
    store.create_table(config, spill=str(tmp_path / "rows"))
    out, most, grown, before = np.empty((256, 1), np.float32), 0.0, 0, 0.0
    for start in range(0, 60_000, 256):
        store.lookup([0], [np.arange(start, start + 256, dtype=np.uint64) * FIBONACCI], True, [out])
        cold = store.tier_counts(0)["rows"]
        hot = store.size(0) - cold
        # Without rows of memory and the least of their slots; the header and the undo slot of the shard.
        left = store.memory_bytes(0) - 20_480 - 1024 * (16 + 4) - hot * 10
        grown += left > before + 1000
        before = left
        if start > 8192:
            most = max(most, left / cold)
    assert grown > 15
    assert 11 < most <= COLD_ROW_BYTES


def test_increments_have_what_changed_on_either_side(store, tmp_path):
    store.create_table(TableConfig("t", 4, capacity=1000, shards=1, memory_rows=50), spill=str(tmp_path / "t"))
    lookup(store, np.arange(300, dtype=np.uint64))

    def snapshot(since):
        epoch = store.begin_snapshot(0, since, Spill(str(tmp_path)))
        rows, _ = store.export_snapshot(0, 0, epoch, 10**6)
        store.end_snapshot(0)
        return epoch, set(rows.ids.tolist())

    epoch, rows = snapshot(0)
    assert rows == set(range(300))
    update(store, ids(3, 5, 7), np.ones((3, 4)))
    lookup(store, np.arange(250, 300, dtype=np.uint64), train=False)
    lookup(store, np.arange(400, 600, dtype=np.uint64))  # Those that changed are on disk again.
    epoch, rows = snapshot(epoch)
    assert rows == {3, 5, 7, *range(400, 600)}
    set_rows(store, 0, ids(3, 450, 700), np.ones((3, 4), np.float32), None)
    epoch, rows = snapshot(epoch)
    assert rows == {3, 450, 700}
    assert snapshot(epoch)[1] == set()


def test_rows_on_disk_leave_after_their_time_to_live(store, tmp_path):
    config = TableConfig("t", 4, capacity=1000, shards=1, memory_rows=50, ttl=10)
    store.create_table(config, spill=str(tmp_path / "t"))
    store.advance_clock(0, 0)
    lookup(store, np.arange(300, dtype=np.uint64))
    for _ in range(6):
        store.advance_clock(0, 2)
        lookup(store, np.arange(100, dtype=np.uint64))
    np.testing.assert_array_equal(store.contains(0, np.arange(300, dtype=np.uint64)), np.arange(300) < 100)
    assert sum(len(rows.ids) for _, rows in store.iterate_rows(0)) == 100


@pytest.mark.parametrize(
    ("settings", "spill", "words"),
    [
        ({"memory_rows": 10}, None, "give both"),
        ({}, "t", "give both"),
        ({"memory_rows": 101}, "t", "memory_rows must be 0, or within 1 ... capacity"),
        ({"memory_rows": 3, "shards": 4}, "t", "memory_rows must be 0, or within 4 ... capacity"),
        ({"memory_rows": 2**31, "capacity": 2**32, "shards": 1}, "t", "capacity exceeds"),
        ({"memory_rows": 2**31, "capacity": 2**31, "shards": 1}, "t", "exceed the row numbers of the shards"),
    ],
)
def test_configurations_that_cannot_be(store, tmp_path, settings, spill, words):
    with pytest.raises(ConfigError, match=words):
        store.create_table(
            TableConfig("t", 4, **{"capacity": 100, **settings}), spill=str(tmp_path / spill) if spill else None
        )


def test_shards_have_numbers_for_what_is_on_disk():
    assert TableConfig("t", 4, capacity=10**6, memory_rows=100).resolved_shards == 1
    assert TableConfig("t", 4, capacity=2**33, memory_rows=2**20).resolved_shards == 8
    assert TableConfig("t", 4, capacity=2**34, memory_rows=2**20).resolved_shards == 16
    assert TableConfig("t", 4, capacity=2**34, memory_rows=2**34).resolved_shards == 16


def test_a_directory_that_is_not_there(tmp_path):
    with pytest.raises(StoreError, match="missing"):
        NativeStore().create_table(
            TableConfig("t", 4, capacity=100, memory_rows=10), spill=str(tmp_path / "missing" / "t")
        )


def killed(path, count, longest):
    """Kills a process whose rows move between memory and disk; returns the comparisons after each."""
    load = Load(count, ids=6000, capacity=12_000, memory_rows=600, spill=str(path / "ssd"))
    with tempfile.TemporaryDirectory(prefix="persia-test-", dir="/dev/shm") as regions:
        comparisons = kills(Path(regions) / "persia-x" / "ps-0", load, count, longest)
    assert comparisons[-1].tier["spilled"] > comparisons[-1].tier["promoted"] > 0
    return comparisons


@pytest.mark.processes
def test_kills_while_rows_move(tmp_path):
    """Every row is as before or after the request in flight, which is repeated exactly once."""
    assert [comparison.wrong for comparison in killed(tmp_path, 4, 0.03)] == [0] * 4


@pytest.mark.slow
def test_fifty_kills_while_rows_move(tmp_path):
    comparisons = killed(tmp_path, 50, 0.05)
    assert sum(comparison.wrong for comparison in comparisons) == 0
    assert sum(comparison.recovery["busy"] > 0 for comparison in comparisons) > 10
