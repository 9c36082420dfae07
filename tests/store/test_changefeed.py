"""What a publisher takes of a store, applied to a dictionary, gives the live rows, whatever else goes on."""

from __future__ import annotations

import tempfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persia.errors import StoreError
from persia.ps.row_chunks import set_rows
from persia.store import Spill, TableConfig
from support.examples import examples
from support.stores import STORES, contents, lookup, update


def rows_of(store):
    return {
        int(id_): row.tobytes()
        for rows in contents(store).values()
        for id_, row in zip(rows.ids, rows.embeddings, strict=True)
    }


def take(store, shard, copy, most, taken):
    """Applies the next piece of a shard to a copy; returns whether there may be more."""
    changes, more = store.take_changes(0, shard, most)
    for id_ in changes.removed.tolist():
        copy.pop(id_, None)
    for id_, row in zip(changes.ids.tolist(), changes.embeddings, strict=True):
        assert id_ not in taken
        taken.add(id_)
        copy[id_] = row.tobytes()
    return more


def publish(store, copy, limit=1 << 17, between=lambda: None, most=1):
    """Takes a pass; `between` any two pieces something else happens."""
    if not store.begin_changes(0, False, limit):
        copy.clear()
        assert store.begin_changes(0, True, limit)
    taken = set()
    for shard in range(store.config(0).resolved_shards):
        while take(store, shard, copy, most, taken):
            between()
    return taken


@pytest.mark.parametrize("kind", STORES)
@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_any_history(kind, data):
    memory_rows = data.draw(st.sampled_from([0, 0, 3, 8]))
    capacity, shards = data.draw(st.integers(10, 80)), data.draw(st.sampled_from([1, 2]))
    dtype = data.draw(st.sampled_from(["float32", "bfloat16"]))
    ttl = data.draw(st.sampled_from([0, 2, 5]))
    config = TableConfig("t", 3, capacity=capacity, shards=shards, memory_rows=memory_rows, ttl=ttl, dtype=dtype)
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    universe = random.integers(0, 2**64, 100, dtype=np.uint64)
    limit = data.draw(st.sampled_from([4, 1 << 17]))
    copy: dict[int, bytes] = {}
    store = STORES[kind]()

    def train():
        ids = random.choice(universe, random.integers(0, 40))
        lookup(store, ids)
        updated = ids[: len(ids) // 2]
        update(store, updated, random.normal(size=(len(updated), 3)))
        store.advance_clock(0, 1)

    with tempfile.TemporaryDirectory() as directory:
        store.create_table(config, spill=f"{directory}/t" if memory_rows else None)
        snapshot = False
        for _ in range(data.draw(st.integers(1, 6))):
            for action in data.draw(st.lists(st.sampled_from(["train", "train", "snapshot", "set", "state"]))):
                if action == "train":
                    train()
                elif action == "snapshot":
                    if snapshot:
                        store.end_snapshot(0)
                    else:
                        store.begin_snapshot(0, 0, Spill(directory))
                    snapshot = not snapshot
                elif not snapshot and action == "set":
                    ids = np.unique(random.choice(universe, 5))
                    set_rows(store, 0, ids, random.normal(size=(len(ids), 3)).astype(np.float32), None)
                elif not snapshot and action == "state":
                    store.import_state(0, 0, store.export_state(0, 0))
            publish(store, copy, limit, train)
            publish(store, copy, limit)
            assert copy == rows_of(store)


@pytest.fixture(params=STORES)
def store(request):
    store = STORES[request.param]()
    store.create_table(TableConfig("t", 3, shards=2, capacity=1000))
    lookup(store, np.arange(50, dtype=np.uint64))
    return store


def test_a_pass_begins_with_all_rows_and_goes_on_with_changes(store):
    copy: dict[int, bytes] = {}
    with pytest.raises(StoreError, match="begin with all rows"):
        store.take_changes(0, 0)
    assert not store.begin_changes(0, False)
    assert publish(store, copy) == set(range(50))
    update(store, np.array([3, 60], np.uint64), np.ones((2, 3)))
    lookup(store, np.array([70], np.uint64))
    assert publish(store, copy) == {3, 70}
    assert copy == rows_of(store)
    store.end_changes(0)
    assert not store.begin_changes(0, False)


def test_what_is_not_known_is_said(store):
    copy: dict[int, bytes] = {}
    publish(store, copy)
    assert store.begin_changes(0, False)
    assert not store.begin_changes(0, False)  # The pass before was not read to its end.
    publish(store, copy)
    store.import_state(0, 1, store.export_state(0, 1))
    assert not store.begin_changes(0, False)
    publish(store, copy)
    lookup(store, np.arange(100, 1100, dtype=np.uint64))
    publish(store, copy, limit=3)
    lookup(store, np.arange(2000, 2050, dtype=np.uint64))
    assert not store.begin_changes(0, False, 3)
    publish(store, copy)
    assert copy == rows_of(store)
