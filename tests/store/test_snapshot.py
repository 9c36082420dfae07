"""A snapshot gives the rows of its moment, whatever happens while it is read; changes and evictions add up."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persia.errors import StoreError
from persia.store import NativeStore, ReferenceStore, Rows, Spill, TableConfig


def ids_of(random, universe):
    return random.choice(universe, random.integers(1, 60))


def train(stores, random, universe, step):
    ids = ids_of(random, universe)
    gradients = random.normal(size=(len(ids), 3)).astype(np.float32)
    for store in stores:
        store.lookup([0], [ids], True)
        store.update([0], [ids], [gradients], [0.1], step)


def table_of(store, config):
    """By id, all columns but the id."""
    found = {}
    for shard in range(config.resolved_shards):
        rows = store.export_rows(0, shard)
        rows = rows if isinstance(rows, Rows) else rows[0]
        for i, id_ in enumerate(rows.ids.tolist()):
            found[id_] = tuple(column[i].tobytes() for column in rows[1:])
    return found


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(5, 80), st.sampled_from([1, 2]), st.sampled_from([1, 500, 1 << 20]))
def test_any_history(seed, capacity, shards, buffer):
    """The reference is copied at the snapshot; the native store is read while both go on."""
    random = np.random.default_rng(seed)
    universe = random.integers(0, 2**64, 100, dtype=np.uint64)
    config = TableConfig("t", 3, capacity=capacity, shards=shards, optimizer="adam")
    store, reference = NativeStore(), ReferenceStore()
    for s in (store, reference):
        s.create_table(config)
    model = {}
    epoch = step = 0
    for _ in range(4):
        for _ in range(random.integers(1, 5)):
            step += 1
            train((store, reference), random, universe, step)
        since = epoch if random.integers(2) else 0
        epoch = store.begin_snapshot(0, since, Spill("/tmp", buffer))
        frozen = copy.deepcopy(reference)
        removed = [store.snapshot_evicted(0, shard, epoch) for shard in range(shards)]
        if since:
            for ids in removed:
                for id_ in ids.tolist():
                    model.pop(id_, None)
        else:
            model = {}
        for shard in range(shards):
            more = True
            while more:
                step += 1
                train((store, reference), random, universe, step)
                rows, more = store.export_snapshot(0, shard, epoch, 1)
                for i, id_ in enumerate(rows.ids.tolist()):
                    model[id_] = tuple(column[i].tobytes() for column in rows[1:])
                if not since:
                    for mine, theirs in zip(rows, frozen.export_rows(0, shard), strict=True):
                        np.testing.assert_array_equal(mine, theirs)
        store.end_snapshot(0)
        assert model == table_of(frozen, config)
        assert store.changes_since(0) == epoch
    assert table_of(store, config) == table_of(reference, config)


def test_a_snapshot_that_is_read_holds_back_what_would_mix_it():
    store = NativeStore()
    store.create_table(TableConfig("t", 3, shards=1))
    store.lookup([0], [np.arange(5, dtype=np.uint64)], True)
    rows, _ = store.export_rows(0, 0)
    state = store.export_state(0, 0)
    assert store.changes_since(0) == 0
    with pytest.raises(StoreError, match="is not known"):
        store.begin_snapshot(0, 1, Spill("/tmp"))
    snapshot = store.begin_snapshot(0, 0, Spill("/tmp"))
    for call in (
        lambda: store.import_rows(0, rows),
        lambda: store.import_state(0, 0, state),
        lambda: store.clear(0),
        lambda: store.begin_snapshot(0, 0, Spill("/tmp")),
    ):
        with pytest.raises(StoreError, match="checkpoint is being read"):
            call()
    assert len(store.export_snapshot(0, 0, snapshot)[0].ids) == 5
    store.end_snapshot(0)
    store.end_snapshot(0)
    with pytest.raises(StoreError, match="no such cut"):
        store.export_snapshot(0, 0, snapshot)
    assert store.changes_since(0) == snapshot
    store.import_rows(0, rows)
    assert store.changes_since(0) == 0  # Nobody has noted which rows these were.


def test_a_reader_of_a_snapshot_that_was_ended_takes_nothing_from_the_next():
    store = NativeStore()
    store.create_table(TableConfig("t", 3, shards=1))
    store.lookup([0], [np.arange(5, dtype=np.uint64)], True)
    before = store.begin_snapshot(0, 0, Spill("/tmp"))
    store.end_snapshot(0)
    after = store.begin_snapshot(0, 0, Spill("/tmp"))
    with pytest.raises(StoreError, match="no such cut"):
        store.export_snapshot(0, 0, before)
    with pytest.raises(StoreError, match="no such cut"):
        store.snapshot_evicted(0, 0, before)
    assert len(store.export_snapshot(0, 0, after)[0].ids) == 5


def test_renumbering_of_stamps_ends_a_snapshot():
    store = NativeStore()
    store.create_table(TableConfig("t", 3, shards=1))
    store.lookup([0], [np.arange(5, dtype=np.uint64)], True)
    state = store.export_state(0, 0)
    state["clocks"] = np.array([2**32 - 2, 1, 0], np.uint64)
    store.import_state(0, 0, state)
    snapshot = store.begin_snapshot(0, 0, Spill("/tmp"))
    for _ in range(3):
        store.lookup([0], [np.arange(5, dtype=np.uint64)], True)
    with pytest.raises(StoreError, match="save again"):
        store.export_snapshot(0, 0, snapshot)
