"""What the native store promises beyond agreement with the reference: memory, threads, processes, bad input."""

from __future__ import annotations

import multiprocessing
import os
import threading

import numpy as np
import pytest

from persia.errors import ConfigError, StoreError
from persia.store import NativeStore, Rows, Spill, TableConfig


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def ids(*values):
    return np.array(values, np.uint64)


def make(dim=4, threads=1, **settings):
    store = NativeStore(threads)
    store.create_table(TableConfig("item", dim, **settings))
    return store


def test_capacity_costs_no_memory():
    before = resident_bytes()
    store = make(16, capacity=10**9)
    store.lookup([0], [np.arange(10, dtype=np.uint64)], True)
    assert store.size(0) == 10
    assert resident_bytes() - before < 4 << 20


def test_bytes_per_row():
    store = make(16, shards=1)
    store.lookup([0], [np.arange(250_000, dtype=np.uint64)], True)
    assert store.memory_bytes(0) / store.size(0) - 16 * 4 * 2 <= 32


def test_clear_gives_memory_back():
    store = make(64)
    store.lookup([0], [np.arange(200_000, dtype=np.uint64)], True)
    full = resident_bytes()
    store.clear(0)
    assert store.size(0) == 0
    assert full - resident_bytes() > 80 << 20
    assert not store.contains(0, ids(1)).any()


def test_many_threads():
    """Distinct ids from several threads: no update is lost, whatever the interleaving."""
    store = make(8, threads=2, shards=4, optimizer="sgd", initializer="zeros")

    def work(offset):
        mine = np.arange(offset, offset + 3000, dtype=np.uint64)
        for _ in range(20):
            store.lookup([0], [mine], True)
            store.update([0], [mine], [np.ones((3000, 8), np.float32)], [1.0], 1)

    threads = [threading.Thread(target=work, args=(1500 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found, rows = store.peek(0, np.arange(1500, 6000, dtype=np.uint64))
    assert found.all()
    assert set(rows.update_count[: 4500 - 1500]) == {40}
    np.testing.assert_array_equal(rows.embeddings[:, 0], -rows.update_count.astype(np.float32))


def test_pushes_are_applied_once():
    store = make(2, optimizer="sgd", initializer="zeros")
    store.lookup([0], [ids(1)], True)
    gradient = np.ones((1, 2), np.float32)
    for sequence in (1, 2, 2, 1, 5, 4, 3, 3, 100, 36, 35):
        store.update([0], [ids(1)], [gradient], [1.0], 1, 7, sequence)
    # 1 2 5 4 3 100 36 count; 35 lies too far behind to tell.
    assert store.peek(0, ids(1))[1].update_count[0] == 7
    assert store.statistics(0)["duplicates"] == 4


def test_incremental_export():
    store = make(2, shards=1)
    store.lookup([0], [np.arange(10, dtype=np.uint64)], True)
    first = store.begin_snapshot(0, 0, Spill("/tmp"))
    store.end_snapshot(0)
    store.update([0], [ids(3)], [np.ones((1, 2), np.float32)], [0.1], 1)
    store.lookup([0], [ids(4, 77)], True)
    second = store.begin_snapshot(0, first, Spill("/tmp"))
    changed = store.export_snapshot(0, 0, second)[0]
    assert list(changed.ids) == [3, 4, 77]  # being used is a change: of recency
    assert sum(len(rows.ids) for _, rows in store.iterate_rows(0, max_rows=3)) == 11


def test_import_into_smaller_table_keeps_the_recent():
    store, small = make(2, shards=1), make(2, shards=1, capacity=10)
    for id_ in range(100):
        store.lookup([0], [ids(id_)], True)
    for _, rows in store.iterate_rows(0):
        small.import_rows(0, rows)
    assert set(small.export_rows(0, 0)[0].ids.tolist()) == set(range(90, 100))


def test_evaluation_changes_nothing():
    store = make(2, capacity=4, shards=1)
    store.lookup([0], [ids(1, 2)], True)
    before = store.statistics(0), store.export_state(0, 0)["clocks"].tolist()
    values = store.lookup([0], [ids(1, 9)], False)[0]
    assert (values[1] == 0).all()
    assert (store.statistics(0), store.export_state(0, 0)["clocks"].tolist()) == before
    assert not store.contains(0, ids(9))[0]


def _use(store, queue):
    try:
        store.lookup([0], [ids(1)], False)
    except StoreError as error:
        queue.put(str(error))


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_is_refused():
    store = make(4, threads=3)
    store.lookup([0], [ids(1)], True)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_use, args=(store, queue))
    child.start()
    assert "forked child" in queue.get(timeout=60)
    child.join(60)
    assert child.exitcode == 0
    assert store.contains(0, ids(1)).all()


G = np.ones((1, 4), np.float32)


def imported(**columns):
    words = np.ones(1, np.uint32)
    return Rows(ids(7), G, np.ones((1, 4), np.float32), words, words, words)._replace(**columns)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.lookup([0], [np.array([1])], True), "'item': ids must be .* uint64"),
        (lambda s: s.lookup([0], [np.zeros((2, 2), np.uint64)], True), "'item': ids"),
        (lambda s: s.lookup([0], [np.arange(10, dtype=np.uint64)[::2]], True), "contiguous"),
        (lambda s: s.lookup([0], [[1, 2]], True), "'item': ids"),
        (lambda s: s.lookup([3], [ids(1)], True), "no table 3"),
        (lambda s: s.lookup([-1], [ids(1)], True), "no table -1"),
        (lambda s: s.lookup([0, 0], [ids(1), ids(2)], True), "twice"),
        (lambda s: s.lookup([0], [], True), "one entry per table"),
        (lambda s: s.lookup([0], [ids(1)], True, out=[np.empty((2, 4), np.float32)]), r"shape \[1, 4\]"),
        (lambda s: s.lookup([0], [ids(1)], True, out=[np.empty((1, 4))]), "out must be"),
        (lambda s: s.update([0], [ids(1)], [G.astype(np.float64)], [0.1], 1), "gradients must be .* float32"),
        (lambda s: s.update([0], [ids(1, 2)], [G], [0.1], 1), r"shape \[2, 4\]"),
        (lambda s: s.update([0], [ids(1)], [G[:, :2].copy()], [0.1], 1), r"not \[1, 2\]"),
        (lambda s: s.update([0], [ids(1)], [G], [np.nan], 1), "lr"),
        (lambda s: s.update([0], [ids(1)], [G], [-1.0], 1), "lr"),
        (lambda s: s.update([0], [ids(1)], [G], [0.1], -1), "incompatible"),
        (lambda s: s.keep_last_steps(3), "no table 3"),
        (lambda s: s.last_steps(0, np.array([1])), "'item': ids"),
        (lambda s: s.peek(0, ids(1, 2, 3, 4)[::2]), "contiguous"),
        (lambda s: s.import_rows(0, imported(last_step=ids(1))), "last_steps must be uint32"),
        (lambda s: s.import_rows(0, imported(last_step=np.zeros(2, np.uint32))), "differ in length"),
        (lambda s: s.import_rows(0, imported(embeddings=G[:, :2].copy())), r"shape \[1, 4\]"),
        (lambda s: s.export_rows(0, 99), "no shard 99"),
        (lambda s: s.import_state(0, 0, s.export_state(0, 0) | {"clocks": ids(2**32, 1, 0)}), "below 2"),
        (lambda s: s.import_state(0, 0, s.export_state(0, 0) | {"clocks": ids(1, 2**32, 0)}), "below 2"),
        (lambda s: s.import_state(0, 0, {}), "lacks"),
        (lambda s: s.end_import(3), "no table 3"),
        (lambda s: s.create_table(TableConfig("huge", 4096, capacity=2**39, shards=256)), "address space"),
    ],
)
def test_bad_calls_leave_the_store_unchanged(call, message):
    store = make()
    store.lookup([0], [ids(1)], True)
    before = store.statistics(0)
    with pytest.raises(StoreError, match=message):
        call(store)
    assert store.statistics(0) == before
    assert store.size(0) == 1


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"dim": 0}, "dim"),
        ({"capacity": 0}, "capacity"),
        ({"shards": 3}, "shards"),
        ({"capacity": 2, "shards": 4}, "capacity"),
        ({"capacity": 2**41 + 1}, "capacity"),
        ({"capacity": 2**33, "shards": 2}, "capacity exceeds 8589934588 rows in 2 shards"),
        ({"optimizer": "adamw"}, "optimizer"),
        ({"optimizer_params": {"momentum": 0.9}}, "momentum"),
        ({"optimizer": "adam", "optimizer_params": {"beta1": 1.0}}, "beta1"),
        ({"initializer": "ones"}, "initializer"),
        ({"admission": "probability", "admission_value": 2.0}, "admission_value"),
        ({"admission": "min_frequency", "admission_value": 0.5}, "admission_value"),
        ({"value_bound": -1.0}, "value_bound"),
        ({"name": ""}, "name"),
    ],
)
def test_bad_tables_name_the_field(settings, field):
    with pytest.raises(ConfigError, match=field):
        TableConfig(**{"name": "item", "dim": 4, **settings})


@pytest.mark.parametrize(
    ("capacity", "shards"),
    [(1, 1), (8_191, 1), (8_192, 2), (32_767, 4), (32_768, 8), (2**30, 8), (2**34, 8), (2**34 + 1, 16), (2**41, 1024)],
)
def test_shards_follow_from_capacity(capacity, shards):
    config = TableConfig("item", 4, capacity=capacity)
    assert config.resolved_shards == shards
    assert -(-capacity // shards) < 2**32 - 1
    assert TableConfig("item", 4, capacity=2**12, shards=64).resolved_shards == 64


@pytest.mark.parametrize("optimizer", ["adam", "rowwise_adagrad"])
def test_training_does_not_depend_on_shards(optimizer):
    random = np.random.default_rng(1)
    batches = [np.unique(random.integers(0, 3000, 500, dtype=np.uint64)) for _ in range(12)]
    gradients = [random.standard_normal((len(mine), 4), dtype=np.float32) for mine in batches]
    found = []
    for shards in (1, 8, 64):
        store = make(4, 2, shards=shards, optimizer=optimizer, admission="probability", admission_value=0.5)
        for step, (mine, gradient) in enumerate(zip(batches, gradients, strict=True)):
            store.lookup([0], [mine], True)
            store.update([0], [mine], [gradient], [0.1], step)
        found.append(store.peek(0, np.arange(3000, dtype=np.uint64)))
    for there, rows in found[1:]:
        np.testing.assert_array_equal(there, found[0][0])
        for name in ("embeddings", "state", "update_count", "last_step"):
            np.testing.assert_array_equal(getattr(rows, name)[there], getattr(found[0][1], name)[there])


def test_a_table_of_more_than_2_to_the_32_rows(tmp_path):
    """Its shards have fewer rows each, and a process that attaches to its regions chooses as many."""
    config = TableConfig("item", 1, capacity=2**34 + 5)
    assert config.resolved_shards == 16
    many = np.arange(0, 2**64, 2**44, dtype=np.uint64)
    store = NativeStore()
    store.create_table(config, files=str(tmp_path / "item"))
    found = store.lookup([0], [many], True)[0]
    assert store.size(0) == len(many)
    del store
    again = NativeStore()
    again.create_table(config, files=str(tmp_path / "item"), attach=True)
    assert again.recovery(0)["shards"] == 16
    np.testing.assert_array_equal(again.lookup([0], [many], False)[0], found)


def test_table_names_are_unique():
    store = make()
    with pytest.raises(ConfigError, match="already exists"):
        store.create_table(TableConfig("item", 4))
