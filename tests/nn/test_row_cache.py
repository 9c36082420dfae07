"""Copies of rows on the device: each row that the model gets is a state of the row as new as the mode demands."""

from __future__ import annotations

import logging
import tracemalloc
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import persia
from persia.errors import ConfigError, DataError, StaleBatchError, StoreError
from persia.modes import Async, Bsp, Gba, HopBs, Hybrid, Sync
from persia.nn.gate import LookupTime
from persia.nn.options import CollectionOptions
from persia.nn.pooling import PooledAhead
from persia.nn.row_cache import SLOT_BYTES, RowCache, RowCopies, leaves_time_for_copies
from persia.nn.staging import CpuStaging
from persia.nn.transfer import unpacked
from persia.schema import AdmitMinFrequency, Table
from persia.services import Connection
from persia.types import Packed
from persia.worker import Worker, WorkerOptions
from support.examples import examples
from support.several_ps import several_servers

# --- the cache against a slow twin -----------------------------------------------------------------------------------


class Copy(NamedTuple):
    id: int
    applied: int
    row: float


class ReferenceCache:
    """The same in dicts: by table and slot the last row that was fetched."""

    def __init__(self, tables):
        self.tables = {name: table for name, table in tables.items() if table.cache_rows}
        self.slots = {}

    def slot(self, table, id_):
        return (id_ * 0x9E3779B97F4A7C15 % (1 << 64) >> 32) % self.tables[table].cache_rows

    def rows(self, ids, at, fetch):
        """Rows of a batch by table, and the ids that were fetched."""
        found, fetched, put = {}, {}, {}
        for table, mine in ids.items():
            found[table], fetched[table] = [], []
            for id_ in mine:
                copy = self.slots.get((table, self.slot(table, id_))) if table in self.tables else None
                if copy is not None and copy.id == id_ and at.step - copy.applied <= at.limit:
                    found[table].append(copy.row)
                else:
                    fetched[table].append(id_)
                    found[table].append(fetch(table, id_))
                    if table in self.tables:
                        put[table, self.slot(table, id_)] = Copy(id_, at.applied, found[table][-1])
        self.slots.update(put)
        return found, fetched


def batches_of(tables):
    ids = st.fixed_dictionaries({t: st.lists(st.integers(0, 12), max_size=8, unique=True) for t in tables})
    return st.lists(st.tuples(ids, st.integers(0, 4)), min_size=1, max_size=12)


@settings(max_examples=examples(150))
@given(batches_of(["a", "b", "c", "plain"]), st.integers(1, 20), st.integers(1, 5), st.integers(0, 5))
def test_it_does_as_its_twin_and_no_row_is_too_old(batches, capacity, other, limit):
    tables = {
        "a": Table("a", 2, cache_rows=capacity),
        "plain": Table("plain", 1),
        "b": Table("b", 3, cache_rows=other),
        "c": Table("c", 2, cache_rows=other),
    }
    cache, twin = RowCache(tables), ReferenceCache(tables)
    assert cache.open(Hybrid(4, warmup=0), lambda: 1 << 20)
    hits = misses = 0
    for step, (ids, in_flight) in enumerate(batches):
        # Every row changes with every step; its value is the number of steps in it. More may be in it than is known.
        at = LookupTime(step, max(0, step - min(in_flight, limit)), limit)

        def fetch(table, id_, at=at):
            return at.applied + id_ % 2 * (at.step - at.applied)

        expected, fetched = twin.rows(ids, at, fetch)
        packed = Packed.of({t: np.array(mine, np.uint64) for t, mine in ids.items()}, np.uint64)
        plan = cache.plan(packed, at)
        assert {t: packed[t][plan.wanted[t]].tolist() for t in ids} == fetched
        rows = {t: torch.tensor([[float(fetch(t, i))] * tables[t].dim for i in mine]) for t, mine in fetched.items()}
        rows = {t: r.reshape(-1, tables[t].dim) for t, r in rows.items()}
        if step % 2:  # As they arrive: one behind the other in one buffer.
            buffer = torch.cat([r.reshape(-1) for r in rows.values()])
            parts = buffer.split([r.numel() for r in rows.values()])
            rows = {t: part.view(-1, tables[t].dim) for t, part in zip(rows, parts, strict=True)}
        for dim, slots in ((2, capacity + other), (3, other)):  # On a GPU, of several writes to one slot any may win.
            taken = plan.places[f"{dim}/taken"]
            assert len(set(taken[taken < slots])) == (taken < slots).sum()
        places = unpacked(torch.from_numpy(plan.places.buffer).long(), plan.places)
        whole = plan.assemble(rows, places)
        oldest = 0
        for table, values in whole.items():
            assert values.shape == (len(ids[table]), tables[table].dim)
            assert values[:, 0].tolist() == expected[table]
            assert all(at.step - value <= at.limit for value in expected[table])
            if table != "plain":
                hits, misses = hits + len(values) - len(fetched[table]), misses + len(fetched[table])
                old = [v for i, v in zip(ids[table], expected[table], strict=True) if i not in fetched[table]]
                oldest = max([oldest, *(at.step - v for v in old)])
        assert plan.oldest >= oldest
        assert cache.counts == (hits, misses)


def test_another_number_of_rows_than_was_asked_for_is_an_error():
    cache = RowCache({"a": Table("a", 1, cache_rows=8), "b": Table("b", 1, cache_rows=8)})
    cache.open(Hybrid(4, warmup=0), lambda: 1 << 20)
    plan = cache.plan(Packed.of({t: np.arange(3, dtype=np.uint64) for t in "ab"}, np.uint64), LookupTime(0, 0, 5))
    places = unpacked(torch.from_numpy(plan.places.buffer).long(), plan.places)
    with pytest.raises(DataError, match=r"found 4 rows of table 'a'; expected 3"):
        plan.assemble({"a": torch.zeros(4, 1), "b": torch.zeros(2, 1)}, places)


def test_more_copies_than_places_are_refused():
    most = (1 << 31) - 2
    cache = RowCache({"a": Table("a", 1, cache_rows=most - 7), "b": Table("b", 1, cache_rows=8)})
    with pytest.raises(ConfigError, match=r"Table\('b'\).cache_rows = 8 makes 2,147,483,647 copies .*dim 1"):
        cache.open(Hybrid(4, warmup=0), lambda: 1 << 40)


def test_clearing_forgets_all_copies():
    cache = RowCache({"a": Table("a", 1, cache_rows=8)})
    cache.open(Hybrid(4, warmup=0), lambda: 1 << 20)
    ids = Packed.of({"a": np.arange(3, dtype=np.uint64)}, np.uint64)
    assert cache.plan(ids, LookupTime(0, 0, 5)).wanted.buffer.all()
    assert not cache.plan(ids, LookupTime(1, 0, 5)).wanted.buffer.all()
    cache.clear()
    assert cache.plan(ids, LookupTime(1, 1, 5)).wanted.buffer.all()


def test_only_the_copies_of_given_rows_are_forgotten():
    cache = RowCopies({"a": (1, 64), "b": (1, 64)})
    cache.allocate()
    ids = Packed.of({t: np.arange(3, dtype=np.uint64) for t in "ab"}, np.uint64)
    cache.plan(ids, LookupTime(0, 0, 0))
    assert not cache.plan(ids, LookupTime(0, 0, 0)).wanted.buffer.any()
    slots = ReferenceCache({"a": Table("a", 1, cache_rows=64)})
    other = next(i for i in range(3, 1000) if slots.slot("a", i) == slots.slot("a", 1))
    cache.forget("a", np.array([0, other, 2**63], np.uint64))
    cache.forget("without copies", np.array([0], np.uint64))
    assert cache.plan(ids, LookupTime(0, 0, 0)).wanted.buffer.tolist() == [True, *[False] * 5]


def test_only_a_pass_that_uses_it_takes_memory():
    slots = 10_000_000
    tracemalloc.start()
    try:
        cache = RowCache({"a": Table("a", 1, cache_rows=slots)}, warns=False)
        assert not cache.open(Sync(), lambda: 0)
        cache.clear()
        assert tracemalloc.get_traced_memory()[1] < slots
        assert cache.open(Hybrid(4, warmup=0), lambda: 4 * slots)
        assert SLOT_BYTES * slots <= tracemalloc.get_traced_memory()[0] < SLOT_BYTES * slots * 1.01
        assert not cache.open(Hybrid(4, warmup=0), lambda: 0, recording=True)
        assert tracemalloc.get_traced_memory()[0] < slots
    finally:
        tracemalloc.stop()


def test_copies_that_do_not_fit_into_the_device_are_refused():
    tables = {"a": Table("a", 2, cache_rows=100), "b": Table("b", 4, cache_rows=100), "c": Table("c", 8)}
    needed = 4 * 2 * 100 + 4 * 4 * 100
    with pytest.raises(
        ConfigError, match=r"Table\('b'\).cache_rows = 100 needs 1,600 bytes .* has 1,599 left"
    ) as raised:
        RowCache(tables).open(Hybrid(4, warmup=0), lambda: needed - 1)
    assert raised.value.fields["field"] == "Table('b').cache_rows"
    cache = RowCache(tables)
    assert cache.open(Hybrid(4, warmup=0), lambda: needed)
    assert cache.open(Hybrid(4, warmup=0), lambda: 0)  # It has its memory.


@pytest.mark.parametrize(
    ("mode", "leaves"),
    [
        (Sync(), False),
        (Hybrid(1, warmup=0), False),
        (Hybrid(2, warmup=0), True),
        (Hybrid(8, combine=False, warmup=0), True),
        (Hybrid("auto", warmup=0), False),
        (Hybrid(None), False),
        (Async(), False),
        (Gba(100), False),
        (Bsp(2), False),
        (HopBs(2), False),
    ],
)
def test_only_some_modes_leave_time_for_copies(mode, leaves):
    assert leaves_time_for_copies(mode) == leaves


def test_a_table_that_counts_ids_has_no_copies():
    with pytest.raises(ConfigError, match=r"cache_rows = 5 needs admission = AdmitAll"):
        Table("item", 4, cache_rows=5, admission=AdmitMinFrequency(2))
    with pytest.raises(ConfigError, match="cache_rows"):
        Table("item", 4, cache_rows=-1)


# --- in training ------------------------------------------------------------------------------------------------------


def schema(cache_rows):
    return persia.Schema(
        [
            persia.IdFeature("item"),
            persia.IdFeature("history", table="item", pooling="mean"),
            persia.IdFeature("user", dim=3),
        ],
        labels=["click"],
        tables=[Table("item", 4, cache_rows=cache_rows)],
    )


def make_batches(count, ids=20, size=8, seed=0):
    rng = np.random.default_rng(seed)
    offsets = np.arange(0, 2 * size + 1, 2, dtype=np.int64)

    def some(n):
        return (ids * rng.random(n) ** 2).astype(np.uint64)

    return [
        persia.Batch(
            {
                "item": persia.IdColumn(some(size)),
                "history": persia.IdColumn(some(2 * size), offsets),
                "user": persia.IdColumn(some(size)),
            },
            np.zeros((size, 0), np.float32),
            np.zeros((size, 1), np.float32),
        )
        for _ in range(count)
    ]


class Watching:
    """Roles in this process. Keeps the states of all rows of `item`, after each step that is applied."""

    def __init__(self, servers=1, compression="none", ids=20):
        self.count, self.compression, self.ids = servers, compression, ids
        self.states = []
        self.asked = 0

    def connect(self, schema, optimizer, mode, seed):
        tables = schema.resolved_tables()
        self.servers = several_servers(self.count, tables, optimizer, mode, seed)
        self.worker = Worker(schema, self.servers, options=WorkerOptions(self.compression))
        push, lookup = self.worker.push, self.worker.lookup_part

        def watched_push(header, contributions):
            counts = push(header, contributions)
            self.states.append(self.rows())
            return counts

        def watched_lookup(batch_id, wanted):
            found = lookup(batch_id, wanted)
            self.asked += len(found.rows["item"])
            return found

        self.worker.push, self.worker.lookup_part = watched_push, watched_lookup
        return Connection(self.worker, self.servers)

    def rows(self):
        column = np.arange(self.ids, dtype=np.uint64)
        found = np.zeros((self.ids, 4), np.float32)
        for server in self.servers:
            rows = server.read_rows("item", column, False)
            found[rows.found] = rows.values[rows.found]
        return found


def train(cluster, mode, cache_rows, batches, on_host=True, accumulation=1, device="cpu"):
    """Trains; returns the collection, and for each batch the rows that the model got, with their ids."""
    embeddings = persia.nn.EmbeddingCollection(
        schema(cache_rows),
        optimizer=persia.optim.SGD(lr=0.05),
        mode=mode,
        cluster=cluster,
        options=CollectionOptions(device=device, accumulation_steps=accumulation),
    )
    embeddings._expander.on_host = embeddings._transfer._on_host = on_host
    seen = []
    for number, batch in enumerate(embeddings.prefetch(batches)):
        assert isinstance(batch.pooled, PooledAhead) == on_host
        entry = cluster.worker.distinct_ids(batch.batch_id)
        seen.append((entry["item"].copy(), batch.rows["item"].detach().clone().cpu().numpy()))
        loss = sum((values.square() + values).mean() * (1 + number % 3) for values in embeddings(batch).values())
        loss.backward()
    return embeddings, seen


def rows_are_new_enough(staleness, cache_rows, servers, on_host, accumulation, device="cpu", *, warmup=0, batches=40):
    cluster, mode = Watching(servers), Hybrid(staleness, warmup=warmup)
    embeddings, seen = train(cluster, mode, cache_rows, make_batches(batches), on_host, accumulation, device)
    assert embeddings.cached.hits > 0
    assert cluster.asked == embeddings.cached.misses
    assert embeddings.cached.hits + embeddings.cached.misses == sum(len(ids) for ids, _ in seen)
    assert embeddings.staleness.max == staleness  # Id 0 is in every batch, and its copy serves as long as it may.
    initial = Watching(1).connect(schema(0), persia.optim.SGD(lr=0.05), Sync(), 0)
    everything = Packed.of({"item": np.arange(20, dtype=np.uint64)}, np.uint64)
    first = initial.servers[0].lookup(everything, True)["item"]
    states = [first, *(np.where(state.any(1, keepdims=True), state, first) for state in cluster.states)]
    for number, (ids, rows) in enumerate(seen):
        step = number // accumulation
        oldest = max(0, step - mode.depth_at(staleness, step))
        allowed = np.stack([state[ids.astype(np.int64)] for state in states[oldest : step + 1]])
        assert allowed.shape[1:] == rows.shape
        assert (allowed == rows).all(2).any(0).all()


@pytest.mark.parametrize(
    ("staleness", "cache_rows", "servers", "on_host", "accumulation"),
    [(2, 64, 1, True, 1), (4, 64, 3, True, 1), (6, 7, 2, False, 1), (4, 64, 1, False, 2)],
)
def test_rows_lack_no_more_steps_than_allowed(staleness, cache_rows, servers, on_host, accumulation):
    rows_are_new_enough(staleness, cache_rows, servers, on_host, accumulation)


@pytest.mark.parametrize(("accumulation", "warmup"), [(1, Hybrid(4).warmup), (2, 100)])
def test_copies_lack_no_more_steps_than_the_warm_up_allows(accumulation, warmup):
    """With the default one, of 500 global steps, and a shorter one: at first none serves, as in Sync."""
    rows_are_new_enough(4, 64, 2, True, accumulation, warmup=warmup, batches=(warmup + 20) * accumulation)


def test_no_copy_serves_while_the_warm_up_allows_no_delay():
    """In the first 124 steps of Hybrid(4) a row lacks none."""
    embeddings, _ = train(Watching(), Hybrid(4), 64, make_batches(120))
    assert embeddings.cached.hits == 0
    assert embeddings.cached.misses > 0
    assert embeddings.staleness.max == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_copies_on_a_gpu_are_new_enough():
    rows_are_new_enough(4, 64, 2, False, 1, "cuda")


@pytest.mark.parametrize("on_host", [True, False])
def test_a_cache_changes_nothing_where_staleness_is_0(on_host, caplog):
    found = []
    for cache_rows in (0, 64):
        cluster = Watching(2)
        with caplog.at_level(logging.WARNING, "persia.nn"):
            embeddings, _ = train(cluster, Sync(), cache_rows, make_batches(20), on_host)
        found.append(cluster.rows())
        assert embeddings.cached == (0, 0)
    np.testing.assert_array_equal(*found)
    assert caplog.text.count("cache_rows has no effect in Sync") == 1


def test_a_pass_is_refused_if_copies_do_not_fit(monkeypatch):
    monkeypatch.setattr(CpuStaging, "free_bytes", lambda _: 1_000)
    with pytest.raises(ConfigError, match=r"Table\('item'\).cache_rows = 64 needs 1,024 bytes"):
        train(Watching(), Hybrid(4, warmup=0), 64, make_batches(1))
    train(Watching(), Sync(), 64, make_batches(1))  # It has no copies.


def test_a_cache_without_effect_warns_once_for_each_reason(caplog):
    table = {"a": Table("a", 1, cache_rows=8)}

    def free():
        return 1 << 20

    for cache in (RowCache(table), RowCache(table, warns=False)):
        for _ in range(3):
            assert not cache.open(Sync(), free)
            assert cache.open(Hybrid(4, warmup=0), free)
            assert not cache.open(Hybrid(4, warmup=0), free, recording=True)
            assert not cache.open(Hybrid(1, warmup=0), free)
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 3
    assert "no effect in Sync" in texts[0]
    assert "no effect while a schedule is recorded" in texts[1]
    assert "no effect in Hybrid(staleness=1" in texts[2]


@pytest.mark.parametrize("rank", [0, 1])
def test_one_nn_worker_warns_in_all_its_passes_once(rank, caplog):
    class Ranked(Watching):
        def connect(self, *arguments):
            return super().connect(*arguments)._replace(rank=rank)

    embeddings, _ = train(Ranked(), Sync(), 64, make_batches(1))
    for _ in embeddings.prefetch(make_batches(1)):
        pass
    assert caplog.text.count("cache_rows has no effect") == (rank == 0)


def test_a_cache_changes_nothing_where_no_id_comes_again_soon():
    batches = []
    for number in range(12):
        ids = np.arange(4, dtype=np.uint64) + 4 * (number % 5)
        columns = {name: persia.IdColumn(ids) for name in ("item", "user")}
        columns["history"] = persia.IdColumn(ids, np.arange(5, dtype=np.int64))
        batches.append(persia.Batch(columns, np.zeros((4, 0), np.float32), np.zeros((4, 1), np.float32)))
    found = []
    for cache_rows in (0, 64):
        cluster = Watching()
        embeddings, _ = train(cluster, Hybrid(4, warmup=0), cache_rows, batches)
        found.append(cluster.rows())
    assert embeddings.cached == (0, 48)
    np.testing.assert_array_equal(*found)


def test_compressed_rows_are_cached_too():
    cluster = Watching(compression="fp16")
    embeddings, seen = train(cluster, Hybrid(4, warmup=0), 64, make_batches(20), on_host=False)
    assert embeddings.cached.hits > 0
    assert all(np.isfinite(rows).all() for _, rows in seen)


def test_copies_do_not_outlive_a_pass():
    """Between passes rows may be set."""
    cluster = Watching()
    embeddings, _ = train(cluster, Hybrid(4, warmup=0), 64, make_batches(1))
    ids = np.arange(20, dtype=np.uint64)
    embeddings.set_rows("item", ids, np.full((20, 4), 7.0, np.float32))
    for batch in embeddings.prefetch(make_batches(1)):
        assert (batch.rows["item"] == 7).all()


def test_a_batch_that_is_lost_leaves_no_copy():
    """Slots were taken for rows that never came."""
    cluster = Watching()
    embeddings = persia.nn.EmbeddingCollection(
        schema(64), optimizer=persia.optim.SGD(lr=0.05), mode=Hybrid(4, warmup=0), cluster=cluster
    )
    lookup, calls = cluster.worker.lookup_part, []

    def losing(batch_id, wanted):
        calls.append(wanted["item"].copy())
        if len(calls) == 2:
            raise StaleBatchError("lost", batch_id=batch_id)
        return lookup(batch_id, wanted)

    cluster.worker.lookup_part = losing
    (batch,) = make_batches(1)
    for prepared in embeddings.prefetch([batch] * 4):
        assert np.isfinite(prepared.rows["item"].detach().numpy()).all()
        sum(values.sum() for values in embeddings(prepared).values()).backward()
    assert calls[2].all()
    assert embeddings.pushed.lost_batches == 1


def test_flags_that_do_not_fit_a_batch_are_refused():
    worker = Watching().connect(schema(0), persia.optim.SGD(lr=0.1), Sync(), 0).worker
    (batch,) = make_batches(1)
    batch_id = worker.register(batch.id_features)
    ids = worker.distinct_ids(batch_id)
    for wrong in ({"item": ids["item"] > 0}, {"item": np.ones(1, np.bool_), "user": ids["user"] > 0}):
        with pytest.raises(StoreError, match="give one flag for each of the distinct ids"):
            worker.lookup_part(batch_id, Packed.of(wrong, np.bool_))


@given(st.integers(1, 4), st.integers(0, 2**32))
@settings(max_examples=examples(30))
def test_some_rows_of_a_batch_are_those_of_the_whole(servers, seed):
    worker = Watching(servers).connect(schema(0), persia.optim.SGD(lr=0.1), Sync(), 0).worker
    (batch,) = make_batches(1, seed=seed)
    batch_id = worker.register(batch.id_features)
    whole, ids = worker.lookup(batch_id), worker.distinct_ids(batch_id)
    rng = np.random.default_rng(seed)
    wanted = {name: rng.random(len(mine)) < rng.random() for name, mine in ids.items()}
    part = worker.lookup_part(batch_id, Packed.of(wanted, np.bool_))
    for name, flags in wanted.items():
        np.testing.assert_array_equal(part.rows[name], whole.rows[name][flags])
        for feature, places in whole.inverse.items():
            np.testing.assert_array_equal(part.inverse[feature], places)
