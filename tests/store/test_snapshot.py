"""A snapshot gives the rows of its moment, whatever happens while it is read; changes and evictions add up."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persia.errors import StoreError
from persia.ps.row_chunks import set_rows
from persia.store import NativeStore, Spill, TableConfig
from persia.types import BUCKETS, RowState
from support.examples import examples
from support.stores import STORES, contents, lookup, update
from support.twins.batching import bucket as bucket_of
from support.twins.random_rows import shard_of
from support.twins.store import ReferenceStore


def train(stores, random, universe, step):
    ids = random.choice(universe, random.integers(1, 60))
    gradients = random.normal(size=(len(ids), 3)).astype(np.float32)
    keys = np.unique(random.choice(universe, random.integers(0, 20)))
    values = random.normal(size=(len(keys), 3)).astype(np.float32)
    counts = np.full(len(keys), step, np.uint32)
    state = RowState(random.random((len(keys), 6), np.float32), counts, counts) if random.integers(2) else None
    for store in stores:
        lookup(store, ids)
        update(store, ids, gradients, step=step)
        set_rows(store, 0, keys, values, state)
        store.advance_clock(0, 1)


def by_id(parts):
    """Returns all columns but the id; the last one is the stamp."""
    return {
        id_: tuple(column[i].tobytes() for column in rows[1:])
        for rows in parts
        for i, id_ in enumerate(rows.ids.tolist())
    }


def left_before(store, shard):
    return store.export_state(0, shard)["ages"][2]


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_any_history(data):
    """The reference copies its rows when a snapshot begins; the native store is read while both go on."""
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    universe = random.integers(0, 2**64, 100, dtype=np.uint64)
    shards = data.draw(st.sampled_from([1, 2]))
    buffer = data.draw(st.sampled_from([1, 500, 1 << 20]))
    limit = data.draw(st.sampled_from([1 << 18, 1 << 18, 40]))
    ttl = data.draw(st.sampled_from([0, 2, 5]))
    share = data.draw(st.sampled_from([None, 0.1, 0.5]))  # Of the buckets that snapshots take.
    buckets = None if share is None else random.random(BUCKETS) < share
    config = TableConfig("t", 3, capacity=data.draw(st.integers(5, 80)), shards=shards, optimizer="adam", ttl=ttl)
    store, reference = both = NativeStore(), ReferenceStore()
    for s in both:
        s.create_table(config)
    model = {}
    step = 0
    for round_ in range(4):
        if round_ == data.draw(st.integers(0, 4)):
            for s in both:
                s.keep_last_steps(0)
        for _ in range(random.integers(1, 5)):
            step += 1
            train(both, random, universe, step)
        known = store.changes_since(0)
        assert reference.changes_since(0) == known
        since = known if random.integers(4) else 0
        live = not random.integers(3)
        spill = Spill("/tmp", buffer, limit, live)
        epoch = store.begin_snapshot(0, since, spill, buckets)
        assert reference.begin_snapshot(0, since, spill, buckets) == epoch
        now, left = by_id(contents(reference).values()), [left_before(reference, shard) for shard in range(shards)]
        if not since:
            model = {}
        for shard in range(shards):
            removed, expected = (s.snapshot_evicted(0, shard, epoch) for s in both)
            np.testing.assert_array_equal(removed, expected)
            # An increment says nothing of rows that have left; the state of the shard does.
            kept = {} if not since else model[shard]
            for id_ in removed.tolist():
                kept.pop(id_, None)
            parts, more = [], True
            while more:
                step += 1
                train(both, random, universe, step)
                rows, more = store.export_snapshot(0, shard, epoch, 10**6 if live else 1)
                parts.append(rows)
            expected, more = reference.export_snapshot(0, shard, epoch, 10**6)
            assert not more
            for mine, theirs in zip(map(np.concatenate, zip(*parts, strict=True)), expected, strict=True):
                np.testing.assert_array_equal(mine, theirs)
            model[shard] = kept | by_id(parts)
        for s in both:
            s.end_snapshot(0)
        present = {
            id_: row
            for shard, rows in model.items()
            for id_, row in rows.items()
            if np.frombuffer(row[-1], np.uint32)[0] >= left[shard]
        }
        if buckets is not None:
            now = {id_: row for id_, row in now.items() if buckets[bucket_of("t", id_)]}
        assert live or present == now
        assert store.changes_since(0) in (epoch, 0 if limit < 1000 else epoch)
    assert by_id(contents(store).values()) == by_id(contents(reference).values())


@pytest.fixture(params=STORES)
def store(request):
    store = STORES[request.param]()
    store.create_table(TableConfig("t", 3, shards=1))
    lookup(store, np.arange(5, dtype=np.uint64))
    return store


def test_a_snapshot_that_is_read_holds_back_what_would_mix_it(store):
    state = store.export_state(0, 0)
    assert store.changes_since(0) == 0
    with pytest.raises(StoreError, match="is not known"):
        store.begin_snapshot(0, 1, Spill("/tmp"))
    snapshot = store.begin_snapshot(0, 0, Spill("/tmp"))
    for call in (
        lambda: store.import_state(0, 0, state),
        lambda: store.begin_snapshot(0, 0, Spill("/tmp")),
    ):
        with pytest.raises(StoreError, match="checkpoint is being read"):
            call()
    assert len(store.export_snapshot(0, 0, snapshot)[0].ids) == 5
    store.end_snapshot(0)
    store.end_snapshot(0)
    with pytest.raises(StoreError, match="no such"):
        store.export_snapshot(0, 0, snapshot)
    assert store.changes_since(0) == snapshot
    store.import_state(0, 0, state)
    assert store.changes_since(0) == 0


def test_imported_rows_are_in_the_next_increment_alone(store):
    before, ids = contents(store)[0], np.array([2, 9], np.uint64)
    snapshot = store.begin_snapshot(0, 0, Spill("/tmp"))
    values = np.full((2, 3), 7.0, np.float32)
    set_rows(store, 0, ids, values, None)
    rows, _ = store.export_snapshot(0, 0, snapshot)
    for mine, theirs in zip(rows, before, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    store.end_snapshot(0)
    assert store.changes_since(0) == snapshot
    increment = store.begin_snapshot(0, snapshot, Spill("/tmp"))
    rows, _ = store.export_snapshot(0, 0, increment)
    np.testing.assert_array_equal(rows.ids, ids)
    np.testing.assert_array_equal(rows.embeddings, values)


def test_a_reader_of_an_ended_snapshot_takes_nothing_of_the_next(store):
    before = store.begin_snapshot(0, 0, Spill("/tmp"))
    store.end_snapshot(0)
    after = store.begin_snapshot(0, 0, Spill("/tmp"))
    with pytest.raises(StoreError, match="no such"):
        store.export_snapshot(0, 0, before)
    with pytest.raises(StoreError, match="no such"):
        store.snapshot_evicted(0, 0, before)
    assert len(store.export_snapshot(0, 0, after)[0].ids) == 5


@pytest.mark.parametrize("kind", STORES)
def test_a_snapshot_that_one_shard_refuses_is_begun_in_none(kind):
    store = STORES[kind]()
    store.create_table(TableConfig("t", 3, capacity=20, shards=2))
    ids = np.array([id_ for id_ in range(100) if shard_of(id_, 2) == 1], np.uint64)
    lookup(store, ids[:10])
    since = store.begin_snapshot(0, 0, Spill("/tmp", evicted_limit=5))
    store.end_snapshot(0)
    lookup(store, ids[10:20])  # evicts more ids than the second shard remembers
    assert store.changes_since(0) == 0
    with pytest.raises(StoreError, match="is not known"):
        store.begin_snapshot(0, since, Spill("/tmp"))
    store.import_rows(0, contents(store)[1])  # no snapshot is being read
    whole = store.begin_snapshot(0, 0, Spill("/tmp"))
    assert len(store.export_snapshot(0, 1, whole)[0].ids) == 10


def test_a_native_snapshot_holds_back_clear():
    store = NativeStore()
    store.create_table(TableConfig("t", 3, shards=1))
    store.begin_snapshot(0, 0, Spill("/tmp"))
    with pytest.raises(StoreError, match="checkpoint is being read"):
        store.clear(0)


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
