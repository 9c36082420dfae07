"""Rows that a PS looks up ahead, and brings up to date, by the value of each row."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persia import rpc
from persia.errors import StoreError
from persia.modes import Hybrid, Sync
from persia.ps import EmbeddingServer, ServerOptions
from persia.schema import SGD, AdmitMinFrequency, Table, Uniform
from persia.services import EmbeddingPS
from persia.store import NativeStore
from persia.types import Gradients, Moment, Packed, PublishOptions, PublishOrder, PushHeader
from support.examples import examples
from support.stores import widen
from support.twins.store import ReferenceStore

DIMS = {"item": 4, "user": 3}
HOW = ["here", "reference", "rpc"]


def started(store=NativeStore, regions=None, mode=None, **changes):
    tables = {name: Table(name, dim, **changes) for name, dim in DIMS.items()}
    options = ServerOptions(store=store, regions=None if regions is None else str(regions))
    return EmbeddingServer(tables, SGD(lr=1.0), mode or Sync(), 3, 1, options)


@contextmanager
def served(how, **changes):
    server = started(ReferenceStore if how == "reference" else NativeStore, **changes)
    if how != "rpc":
        yield server
        return
    with rpc.serve(server, protocol=EmbeddingPS) as port:
        stub = rpc.connect(port.address, EmbeddingPS, peer="embedding PS 0", timeout=20.0)
        try:
            yield stub
        finally:
            rpc.close(stub)


def packed(item, user=()):
    return Packed.of({"item": np.array(item, np.uint64), "user": np.array(user, np.uint64)}, np.uint64)


class Pusher:
    """Pushes steps of one NN worker: the gradient of a row is -1 in each value, so that it counts its updates."""

    def __init__(self, ps):
        self.ps, self.step, self.generation = ps, 0, 1

    def __call__(self, item, user=()):
        ids = packed(item, user)
        minus = {name: np.full((len(own), DIMS[name]), -1.0, np.float32) for name, own in ids.items()}
        gradients = {name: Gradients(own, minus[name]) for name, own in ids.items()}
        self.step += 1
        return self.ps.push(PushHeader(self.generation, 0, self.step, self.step - 1, 1), gradients)


def values(rows, dtype="float32"):
    """The values of rows as they are looked up, by table."""
    return {name: widen(words, dtype, DIMS[name]) for name, words in rows.items()}


class Copy:
    """Rows that were looked up ahead, with their moment; `refresh` brings them up to date."""

    def __init__(self, ps, item, user=(), dtype="float32"):
        self.ps, self.ids, self.dtype = ps, packed(item, user), dtype
        rows, self.seen = ps.lookup_ahead(self.ids)
        self.rows = {name: own.copy() for name, own in values(rows, dtype).items()}

    def refresh(self):
        """Returns the ids of the rows that came, by table."""
        places, rows, (self.seen,), scales, _ = self.ps.refresh(self.ids, self.seen)
        assert scales is None
        assert list(places.names) == list(rows.names) == list(self.ids.names)
        came = {}
        for name, own in values(rows, self.dtype).items():
            assert (np.diff(places[name].astype(np.int64)) > 0).all()
            assert len(own) == len(places[name])
            self.rows[name][places[name]] = own
            came[name] = self.ids[name][places[name]].tolist()
        return came

    def check(self):
        """Compares each row with that of a lookup now."""
        for name, own in values(self.ps.lookup(self.ids, train=False), self.dtype).items():
            np.testing.assert_array_equal(self.rows[name], own)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("how", HOW)
def test_updated_rows_come_with_their_values(how, dtype):
    with served(how, dtype=dtype) as ps:
        push = Pusher(ps)
        copy = Copy(ps, [5, 1, 9, 3], [1, 2], dtype)
        first = {name: own.copy() for name, own in copy.rows.items()}
        assert copy.refresh() == {"item": [], "user": []}
        push([9, 5, 77], [2])
        assert copy.refresh() == {"item": [5, 9], "user": [2]}
        copy.check()
        np.testing.assert_array_equal(copy.rows["item"][[1, 3]], first["item"][[1, 3]])
        np.testing.assert_allclose(copy.rows["item"][[0, 2]], first["item"][[0, 2]] + 1, atol=0.01)
        np.testing.assert_allclose(copy.rows["user"], first["user"] + [[0], [1]], atol=0.01)
        assert copy.refresh() == {"item": [], "user": []}
        push([1], [])
        push([3], [1])
        assert copy.refresh() == {"item": [1, 3], "user": [1]}
        copy.check()


def test_a_lookup_ahead_is_one_for_training():
    """It admits and initializes rows, and counts."""
    one, two = started(), started()
    looked_up = one.lookup_ahead(packed([3, 1], [7])).rows
    expected = two.lookup(packed([3, 1], [7]), train=True)
    np.testing.assert_array_equal(looked_up.buffer, expected.buffer)
    assert one.statistics() == two.statistics()
    assert one.statistics()["item"]["rows"] == 2


def test_rows_in_one_table_only():
    ps = started()
    push = Pusher(ps)
    ids = Packed.of({"user": np.array([4, 2], np.uint64)}, np.uint64)
    rows, seen = ps.lookup_ahead(ids)
    push([4], [2])
    places, fresh, (seen,), _, _ = ps.refresh(ids, seen)
    assert list(places.names) == ["user"]
    assert places["user"].tolist() == [1]
    np.testing.assert_array_equal(fresh["user"], rows["user"][[1]] + 1)
    nothing = Packed.of({"user": np.empty(0, np.uint64)}, np.uint64)
    assert ps.refresh(nothing, Moment(1, 0)).places.counts == [0]
    with pytest.raises(StoreError, match="'other'"):
        ps.refresh(Packed.of({"other": np.array([4], np.uint64)}, np.uint64), seen)


def test_moments_may_be_old():
    """A refresh takes any moment, again and again: a call that is repeated does no harm."""
    ps = started()
    push = Pusher(ps)
    ids = packed([1, 2, 3])
    _, seen = ps.lookup_ahead(ids)
    for id_ in (1, 2):
        push([id_])
    first = ps.refresh(ids, seen)
    second = ps.refresh(ids, seen)
    np.testing.assert_array_equal(first.rows.buffer, second.rows.buffer)
    assert first.places["item"].tolist() == second.places["item"].tolist() == [0, 1]
    assert first.seen == second.seen == [Moment(seen.epoch, seen.version + 2)]


def once_after(monkeypatch, owner, method, then):
    """Calls `then` after the next call of a method."""
    original = getattr(owner, method)

    def call(*arguments, **keywords):
        monkeypatch.setattr(owner, method, original)
        result = original(*arguments, **keywords)
        result = result.copy() if isinstance(result, np.ndarray) else result
        then()
        return result

    monkeypatch.setattr(owner, method, call)


def test_an_update_during_a_call_comes_with_the_next_refresh(monkeypatch):
    """The moment of rows is one before they are read, so that none is missed that came between."""
    ps = started()
    push = Pusher(ps)
    once_after(monkeypatch, ps, "lookup", lambda: push([1]))
    copy = Copy(ps, [1, 2, 3])
    assert copy.refresh()["item"] == [1]
    copy.check()
    once_after(monkeypatch, ps._changes, "changed", lambda: push([2]))
    assert copy.refresh()["item"] == []
    assert copy.refresh()["item"] == [2]
    copy.check()
    push([1])
    once_after(monkeypatch, ps._store, "read_packed", lambda: push([1, 3]))
    assert copy.refresh()["item"] == [1]
    assert copy.refresh()["item"] == [1, 3]
    copy.check()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("how", ["here", "reference"])
def test_rows_on_disk_come_too(how, dtype, tmp_path):
    with served(how, spill=str(tmp_path), capacity=10_000, memory_rows=64, dtype=dtype) as ps:
        push = Pusher(ps)
        copy = Copy(ps, range(40), range(5), dtype)
        push(range(0, 40, 2), [3])
        for start in range(100, 600, 100):  # The rows of the copy go to disk.
            ps.lookup(packed(range(start, start + 100)), train=True)
        if how == "here":
            assert ps.statistics()["item"]["disk_rows"] > 400
        before = ps.statistics()
        came = copy.refresh()
        assert set(range(0, 40, 2)) <= set(came["item"]) < set(range(40))
        assert 3 in came["user"]
        after = ps.statistics()
        for name in ("rows", "spilled", "promoted", "evicted"):
            assert after["item"].get(name) == before["item"].get(name), name  # They stay on disk.
        copy.check()


@pytest.mark.parametrize("how", ["here", "reference"])
def test_evicted_rows_are_left_out(how):
    """The batch keeps the values that it has found: its lookup was before the eviction."""
    with served(how, capacity=64) as ps:
        push = Pusher(ps)
        copy = Copy(ps, range(40))
        push(range(0, 40, 2))
        before = copy.rows["item"].copy()
        ps.lookup(packed(range(100, 155)), train=True)
        has = ps.contains(copy.ids)["item"]
        assert 5 < has.sum() < 35
        came = set(copy.refresh()["item"])
        updated = np.arange(40) % 2 == 0
        assert came == set(np.flatnonzero(updated & has).tolist())
        np.testing.assert_array_equal(copy.rows["item"][~(updated & has)], before[~(updated & has)])
        np.testing.assert_array_equal(copy.rows["item"][updated & has], before[updated & has] + 1)


def test_ids_that_were_not_admitted_have_no_row_yet():
    """They are left out until they have one."""
    ps = started(admission=AdmitMinFrequency(3))
    push = Pusher(ps)
    copy = Copy(ps, [1, 2])
    push([1, 2])  # Skipped.
    assert copy.refresh() == {"item": [], "user": []}
    np.testing.assert_array_equal(copy.rows["item"], np.zeros((2, 4), np.float32))
    for _ in range(3):
        ps.lookup(packed([1]), train=True)
    push([1, 2])
    assert copy.refresh() == {"item": [1], "user": []}
    copy.check()
    assert copy.rows["item"][0].any()


@pytest.mark.parametrize("how", HOW)
def test_rows_that_were_set_or_imported_come(how):
    with served(how) as ps:
        copy = Copy(ps, [1, 2, 3])
        ps.set_rows(1, "item", np.array([2], np.uint64), np.full((1, 4), 7, np.float32), None)
        assert 2 in copy.refresh()["item"]
        copy.check()
        assert copy.rows["item"][1].tolist() == [7] * 4
        assert copy.refresh() == {"item": [], "user": []}
        other = started()
        other.set_rows(1, "item", np.array([1, 3], np.uint64), np.full((2, 4), 5, np.float32), None)
        for chunk in other.export_rows():
            ps.import_rows(chunk)
        assert {1, 3} <= set(copy.refresh()["item"])
        copy.check()
        assert copy.rows["item"][:, 0].tolist() == [5, 7, 5]


def test_rows_of_a_restarted_ps_come(tmp_path):
    ps = started(regions=tmp_path)
    push = Pusher(ps)
    copy = Copy(ps, [1, 2, 3], [4])
    push([2], [])
    copy.refresh()
    push([2, 3], [4])
    epoch, step = copy.seen.epoch, push.step
    del ps, push, copy.ps
    copy.ps = started(regions=tmp_path)
    assert copy.refresh() == {"item": [1, 2, 3], "user": [4]}  # All: it does not know which.
    assert copy.seen.epoch != epoch
    copy.check()
    push = Pusher(copy.ps)
    push.step = step
    push([3])
    assert copy.refresh() == {"item": [3], "user": []}
    copy.check()
    copy.ps.close()


def test_a_switch_loses_no_change():
    ps = started(mode=Hybrid(4, combine=False, warmup=0))
    push = Pusher(ps)
    copy = Copy(ps, [1, 2])
    push([1])
    ps.switch(Sync(), 2, 1)
    push.generation = 2
    push([2])
    assert copy.refresh()["item"] == [1, 2]
    copy.check()


@pytest.mark.parametrize("how", ["here", "reference"])
def test_a_refresh_counts_nothing_and_keeps_the_order_of_evictions(how):
    """With refreshes and without: the same counters, and the same rows are evicted."""
    kept = []
    for refreshes in (True, False):
        with served(how, capacity=64) as ps:
            push = Pusher(ps)
            copy = Copy(ps, range(30))
            ps.lookup(packed(range(30, 50)), train=True)
            push(range(30))
            before = ps.statistics()
            if refreshes:
                for _ in range(3):
                    copy.seen = Moment(1, 0)
                    assert len(copy.refresh()["item"]) == 30
            assert ps.statistics() == before
            ps.lookup(packed(range(100, 140)), train=True)
            kept.append((ps.contains(packed(range(140)))["item"].tolist(), ps.statistics()))
    assert kept[0] == kept[1]
    assert kept[0][1]["item"]["evicted"] > 0


@pytest.mark.parametrize("how", HOW)
def test_late_ids_are_looked_up_with_a_refresh(how):
    """As by a lookup for training: rows are made, and counted; those that were looked up ahead do not change."""
    with served(how) as ps:
        push = Pusher(ps)
        copy, late = Copy(ps, [1, 2], [1]), packed([7, 2], [9])
        push([2])
        before = ps.statistics()
        assert not ps.contains(late)["item"][0]
        assert ps.refresh(copy.ids, copy.seen).late is None
        places, rows, (seen,), _, found = ps.refresh(copy.ids, copy.seen, late)
        assert {name: own.tolist() for name, own in places.items()} == {"item": [1], "user": []}
        after = ps.statistics()
        assert {n: after["item"][n] - before["item"][n] for n in ("hits", "misses")} == {"hits": 1, "misses": 1}
        assert after["user"]["misses"] - before["user"]["misses"] == 1
        assert ps.contains(late)["item"].all()
        np.testing.assert_array_equal(found["item"][1], rows["item"][0])
        np.testing.assert_array_equal(found.buffer, ps.lookup(late, train=False).buffer)
        push([7])
        assert ps.refresh(late, seen).places["item"].tolist() == [0]


def test_an_update_after_the_lookup_of_late_rows_comes_with_the_next_refresh(monkeypatch):
    ps = started()
    push = Pusher(ps)
    copy, late = Copy(ps, [1]), packed([2])
    ps.lookup(late, train=True)
    once_after(monkeypatch, ps, "lookup", lambda: push([2]))
    (seen,) = ps.refresh(copy.ids, copy.seen, late).seen
    assert ps.refresh(late, seen).places["item"].tolist() == [0]


def test_rows_come_while_they_are_published(tmp_path):
    ps = started()
    push = Pusher(ps)
    copy = Copy(ps, [1, 2, 3], [1])
    ps.publish(PublishOrder(PublishOptions(str(tmp_path), seconds=0.02), 0, f"{0:032x}", 0, 0))
    push([2], [1])
    assert copy.refresh() == {"item": [2], "user": [1]}
    copy.check()
    ps.end_publishing(last=True)
    push([3])
    assert copy.refresh() == {"item": [3], "user": []}
    copy.check()


def test_rows_of_16_bits_have_their_width():
    """Those of an odd dimension take half a word more."""
    ps = started(dtype="bfloat16")
    ids = packed([1], [1])
    rows, seen = ps.lookup_ahead(ids)
    assert list(rows.widths) == [2, 2]
    Pusher(ps)([1], [1])
    assert list(ps.refresh(ids, seen).rows.widths) == [2, 2]


copies = st.lists(st.integers(0, 11), max_size=6, unique=True)
actions = st.lists(
    st.tuples(st.sampled_from(["lookup", "push", "refresh", "set"]), copies, copies), min_size=1, max_size=15
)


@settings(max_examples=examples(40))
@given(actions, st.sampled_from(["float32", "bfloat16"]))
def test_copies_are_current_after_a_refresh(steps, dtype):
    ps = started(dtype=dtype, initializer=Uniform(-0.5, 0.5))
    push = Pusher(ps)
    held, sets = [], 0
    for what, item, user in [*steps, ("refresh", [], [])]:
        if what == "lookup":
            held.append(Copy(ps, item, user, dtype))
        elif what == "push":
            push(item, user)
        elif what == "set":
            sets += 1
            ps.set_rows(sets, "item", np.array(item, np.uint64), np.full((len(item), 4), sets, np.float32), None)
        else:
            for copy in held:
                copy.refresh()
                copy.check()


def test_moments_of_no_update_are_answered_with_all_rows():
    server = started()
    ids = packed([1, 2], [3])
    seen = server.lookup_ahead(ids).seen
    for version in (seen.version + 1, 1 << 40, -1):
        assert list(server.refresh(ids, seen._replace(version=version)).places.counts) == [2, 1]


@pytest.mark.parametrize("how", ["here", "rpc"])
def test_ids_that_do_not_match_their_counts_are_refused(how):
    with served(how) as server:
        nothing = Packed(["item"], [1 << 33], np.empty(0, np.uint64), [0])
        with pytest.raises(StoreError, match="expected ids uint64"):
            server.refresh(nothing, Moment(0, 0))
        assert server.contains(packed([1])).buffer.tolist() == [False]
