"""Rows move between PSs while they are trained: each is at its owner with its values, and nowhere else."""

import logging
import math
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persia import rpc
from persia.errors import DeadlineError, StaleMapError, StoreError
from persia.modes import Sync
from persia.optim import Adagrad
from persia.ps import EmbeddingServer, ServerOptions
from persia.rpc.interface import describe
from persia.schema import AdmitMinFrequency, Steps, Table
from persia.services import EmbeddingPS, MovableRows, MovedCounts, MovedRows, MoveStatus, Round
from persia.types import BucketMap, Packed
from support.examples import examples
from support.moving_ps import SECONDS, TABLES, PSs, until
from support.twins.batching import owner


@st.composite
def moves(draw):
    """A map, and the next one."""
    before = BucketMap.even(draw(st.integers(1, 3)))
    kind = draw(st.sampled_from(["more", "fewer", "empty", "one"]))
    if kind == "more":
        return before, before.moved(before.servers + draw(st.integers(1, 2)))
    if kind == "fewer" and before.servers > 1:
        return before, before.moved(before.servers - 1)
    if kind == "empty" and before.servers > 1:
        return before, before.emptied([draw(st.integers(0, before.servers - 1))])
    return before, before.moved(before.servers + 1).reassigned(draw(st.integers(0, 4095)), before.servers)


@settings(max_examples=examples(25), deadline=None)
@given(st.data())
def test_rows_are_those_of_one_ps_that_never_moved(data):
    before, after = data.draw(moves())
    if after.version != before.version + 1:  # `reassigned` changed the map of a move.
        after = BucketMap(before.version + 1, after.servers, after.runs)
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    universe = random.integers(0, 2**64, 80, dtype=np.uint64)
    cluster = PSs(max(before.servers, after.servers), before)
    alone = PSs(1, BucketMap.even(1))

    def train():
        for _ in range(data.draw(st.integers(0, 3))):
            ids, table = random.choice(universe, random.integers(0, 40)), data.draw(st.sampled_from(list(TABLES)))
            for pss in (cluster, alone):
                pss.train(ids, table)

    train()
    cluster.begin(after)
    train()
    if data.draw(st.booleans()):
        cluster.await_pass(data.draw(st.integers(1, 2)))
        train()
    cluster.end(after)
    assert cluster.rows() == alone.rows()
    train()
    assert cluster.rows() == alone.rows()
    assert cluster.buckets == after
    cluster.check_places()


def test_several_moves_there_and_back():
    cluster, alone = PSs(4, BucketMap.even(2)), PSs(1, BucketMap.even(1))
    for change in (
        lambda m: m.moved(4), lambda m: m.emptied([0, 2]), lambda m: m.moved(4), lambda m: m.reassigned(7, 3),
        lambda m: m.moved(2), lambda m: m.moved(3),
    ):  # fmt: skip
        for pss in (cluster, alone):
            pss.train(range(pss.sequence, pss.sequence + 60))
        after = change(cluster.buckets)
        cluster.begin(after)
        cluster.end(after)
        assert cluster.rows() == alone.rows()
        cluster.check_places()


def test_only_rows_that_move_are_sent_and_later_passes_send_what_has_changed():
    cluster = PSs(5, BucketMap.even(4))
    cluster.train(range(4000))
    after = cluster.buckets.moved(5)
    read = []
    for ps in cluster.all:
        export = ps._store.export_snapshot

        def noted(*arguments, export=export):
            rows, more = export(*arguments)
            read.extend(rows.ids.tolist())
            return rows, more

        ps._store.export_snapshot = noted
    cluster.begin(after)
    cluster.await_pass()
    moving = [id_ for id_ in range(4000) if owner("item", id_, after) == 4]
    assert sum(ps.moving().rows for ps in cluster.all) == len(moving)
    assert len(moving) < 0.23 * 4000
    assert set(read) == set(moving)  # Rows that stay are not copied out of the store.
    cluster.train(moving[:10])
    cluster.finish(after)
    # A pass in between may have sent them once more.
    assert len(moving) + 10 <= sum(ps.moving().rows for ps in cluster.all[:4]) <= len(moving) + 20
    for ps in cluster.all:
        ps.adopt(cluster.round, after)
    cluster.check_places()


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("spill", [False, True])
def test_evicted_rows_do_not_come_back(tmp_path, spill, checkpoint):
    table = Table("item", 3, capacity=60, **({"spill": str(tmp_path / "disk")} if spill else {}))
    options = {"memory_rows": {"item": 20}} if spill else {}
    cluster = PSs(3, BucketMap.even(2), {"item": table}, capacities={"item": 60}, **options)
    after = cluster.buckets.moved(3)
    cluster.train(range(50))
    cluster.begin(after)
    cluster.await_pass()
    for first in range(50, 400, 30):
        cluster.train(range(first, first + 30))
    if checkpoint:  # Then the changes since the last round are not known.
        for ps in cluster.all:
            ps.begin_snapshot("checkpoint", {}, str(tmp_path))
            ps.end_snapshot("checkpoint")
    before = cluster.rows()
    assert not any(("item", id_) in before for id_ in range(20))
    cluster.end(after)
    assert cluster.rows() == before
    cluster.check_places()


def test_a_row_that_moves_counts_as_met():
    cluster = PSs(3, BucketMap.even(2), {"item": Table("item", 3, ttl=Steps(3))})
    after = cluster.buckets.moved(3)
    cluster.train(range(50))
    cluster.begin(after)
    cluster.await_pass()
    cluster.train(range(100, 110))
    cluster.end(after)
    assert len(cluster.rows()) == 60
    for _ in range(5):
        cluster.train(range(100, 110))
    assert cluster.rows().keys() == {("item", id_) for id_ in range(100, 110)}


@pytest.mark.parametrize("restart", [False, True])
def test_counts_of_ids_without_a_row_follow(tmp_path, restart):
    tables = {"item": Table("item", 3, admission=AdmitMinFrequency(3))}
    cluster = PSs(2, BucketMap.even(1), tables, tmp_path if restart else None)
    for _ in range(2):
        cluster.train(range(200))
    assert not cluster.rows()
    after = cluster.buckets.moved(2)
    cluster.begin(after)
    cluster.finish(after)
    if restart:  # The receiver is complete: it keeps them.
        cluster.restart(1)
    for ps in cluster.all:
        ps.adopt(cluster.round, after)
    cluster.train(range(200))
    assert len(cluster.rows()) == 200


@pytest.mark.parametrize("used", [0, 10])
def test_counts_of_tables_without_ids_are_not_sent(used):
    sent = {}
    for untouched in (0, 3):
        names = ["item", *"abc"[:untouched]]
        tables = {name: Table(name, 3, capacity=10_000, admission=AdmitMinFrequency(3)) for name in names}
        cluster = PSs(2, BucketMap.even(1), tables, capacities=dict.fromkeys(names, 10_000))
        cluster.train(range(used))
        receive, state = cluster.all[1].receive, []

        def noted(part, receive=receive, state=state):
            state.extend(part.state)
            receive(part)

        cluster.all[1].receive = noted
        after = cluster.buckets.moved(2)
        cluster.begin(after)
        cluster.end(after)
        sent[untouched] = sum(counts.blocks.nbytes + counts.counts.nbytes for counts in state)
        assert {counts.table for counts in state} <= {"item"}
    assert sent[0] == sent[3] <= used * 4 * (64 * 2 + 4)


def test_counts_of_another_form_are_refused():
    cluster = PSs(2, BucketMap.even(1), {"item": Table("item", 3, admission=AdmitMinFrequency(3))})
    after, receiver = cluster.buckets.moved(2), cluster.all[1]
    receiver.begin_receiving(after, 0, "copy")
    good = MovedCounts("item", 0, 8, 256, np.array([3], np.uint32), np.ones((1, 64), np.uint16))
    for bad in (
        good._replace(table="none"),
        good._replace(shard=-1),
        good._replace(shard=8),
        good._replace(counters=255),
        good._replace(blocks=np.array([4], np.uint32)),
        good._replace(blocks=np.array([3, 3], np.uint32)),
        good._replace(blocks=np.array([3])),
        good._replace(counts=np.ones((1, 64), np.int16)),
        good._replace(counts=np.ones(1, np.uint16)),
        good._replace(blocks=np.empty(0, np.uint32), counts=np.empty((0, 64), np.uint16)),
    ):
        with pytest.raises(StoreError):
            receiver.receive(MovedRows(1, 0, "copy", 1, [], [], [bad]))
    receiver.receive(MovedRows(1, 0, "copy", 1, [], [], [good]))


@pytest.mark.parametrize("capacity", [8_192, 4_000, 50_000], ids=["smaller sketches", "fewer shards", "more shards"])
def test_counts_of_a_table_with_another_capacity_are_left_out(caplog, capacity):
    caplog.set_level(logging.WARNING, "persia.ps")
    tables = {"item": Table("item", 3, capacity=10_000, admission=AdmitMinFrequency(3))}
    cluster = PSs(2, BucketMap.even(1), tables, capacities={"item": 10_000})
    cluster.options["capacities"] = {"item": capacity}
    cluster.all[1] = cluster.make(1)
    for _ in range(2):
        cluster.train(range(200))
    after = cluster.buckets.moved(2)
    cluster.begin(after)
    cluster.end(after)
    assert "table 'item' has another capacity at PSs that give rows to PS 1" in caplog.text
    cluster.train(range(200))
    assert 0 < len(cluster.rows()) < 200


def test_a_donor_that_restarts_begins_again(tmp_path):
    cluster, alone = PSs(3, BucketMap.even(2), regions=tmp_path), PSs(1, BucketMap.even(1))
    after = cluster.buckets.moved(3)
    for pss in (cluster, alone):
        pss.train(range(100))
    cluster.begin(after)
    cluster.await_pass()
    cluster.restart(0)
    assert cluster.all[0].moving() == MoveStatus()
    with pytest.raises(StoreError, match="PS 0 does not move rows for bucket map 1: it has restarted"):
        cluster.all[0].finish_move(Round(1, 1), after)
    for pss in (cluster, alone):
        pss.train(range(50, 150))
    cluster.begin(after)
    cluster.end(after)
    assert cluster.rows() == alone.rows()
    cluster.check_places()


def test_a_ps_that_receives_and_restarts_gets_all_rows_again(tmp_path):
    cluster, alone = PSs(3, BucketMap.even(2), regions=tmp_path), PSs(1, BucketMap.even(1))
    after = cluster.buckets.moved(3)
    for pss in (cluster, alone):
        pss.train(range(100))
    cluster.begin(after)
    cluster.await_pass()
    cluster.restart(2)
    for pss in (cluster, alone):
        pss.train(range(50, 150))
    cluster.end(after)
    assert cluster.rows() == alone.rows()
    cluster.check_places()


def test_restarts_between_the_last_difference_and_the_last_adoption(tmp_path):
    cluster = PSs(3, BucketMap.even(2), regions=tmp_path)
    after = cluster.buckets.moved(3)
    cluster.train(range(100))
    before = cluster.rows()
    cluster.begin(after)
    cluster.finish(after)
    for rank in range(3):
        cluster.restart(rank)
    cluster.all[0].adopt(cluster.round, after)
    # Others adopt it later, and all die before: the rows are where they were.
    for rank in range(3):
        cluster.restart(rank)
    assert [ps.buckets().version for ps in cluster.all] == [1, 0, 0]
    for ps in cluster.all:
        ps.adopt(cluster.round, after)
        ps.adopt(cluster.round, after)
    assert cluster.rows() == before
    cluster.check_places()
    with pytest.raises(StaleMapError):
        cluster.all[0].lookup(Packed(["item"], [1], np.ones(1, np.uint64)), True, 0)


@pytest.mark.parametrize("restart", [False, True])
def test_a_sealed_ps_serves_nothing_until_it_adopts_a_map(tmp_path, restart):
    cluster = PSs(3, BucketMap.even(2), regions=tmp_path)
    after = cluster.buckets.moved(3)
    cluster.train(range(100))
    before = cluster.rows()
    cluster.begin(after)
    cluster.finish(after)
    for rank in range(3) if restart else ():
        cluster.restart(rank)
    for rank in range(2):
        with pytest.raises(StaleMapError, match=f"PS {rank} has sent its rows to other PSs"):
            cluster.all[rank].lookup(Packed(["item"], [1], np.ones(1, np.uint64)), True, 0)
    # The move is given up: each has the map before.
    for ps in cluster.all:
        ps.adopt(cluster.round, cluster.first)
    assert cluster.rows() == before
    cluster.check_places()
    cluster.train(range(50))
    cluster.begin(after)
    cluster.end(after)
    assert cluster.rows().keys() == before.keys()
    cluster.check_places()


def test_orders_of_rounds_that_have_ended_are_refused(tmp_path):
    cluster = PSs(2, BucketMap.even(1), regions=tmp_path)
    cluster.train(range(50))
    after = cluster.buckets.moved(2)
    cluster.begin(after)
    cluster.end(after)
    back = after.moved(1)
    late = cluster.round
    orders = [
        lambda: cluster.all[0].adopt(late, cluster.first),
        lambda: cluster.all[1].finish_move(late, back),
        lambda: cluster.all[0].complete_move(late, back),
        lambda: cluster.all[0].adopt(Round(0, 99), back),
    ]
    for _ in range(2):
        for order in orders:
            with pytest.raises(StoreError, match=r"PS . is in round \(1, 1\) of moves, and refuses"):
                order()
        cluster.all[0].adopt(late, after)  # A repetition.
        assert cluster.all[0].buckets() == after
        for rank in range(2):
            cluster.restart(rank)


def test_nobody_adopts_a_map_without_its_rows(tmp_path):
    cluster = PSs(3, BucketMap.even(2), regions=tmp_path)
    cluster.train(range(100))
    after, receiver = cluster.buckets.moved(3), cluster.all[2]
    with pytest.raises(StoreError, match="PS 2 cannot adopt bucket map 1: it would own rows of PSs 0, 1"):
        receiver.adopt(Round(1, 1), after)
    cluster.begin(after)
    cluster.await_pass()
    with pytest.raises(StoreError, match="PS 2 does not have all rows of PS 0 for bucket map 1"):
        receiver.complete_move(Round(1, 1), after)
    cluster.all[0].finish_move(Round(1, 1), after)
    with pytest.raises(StoreError, match="PS 2 does not have all rows of PS 1 for bucket map 1"):
        receiver.complete_move(Round(1, 1), after)
    assert receiver.buckets().version == 0
    del receiver
    cluster.end(after)
    cluster.check_places()


def test_rows_that_were_not_removed_yet_are_removed_after_a_restart(tmp_path, monkeypatch):
    cluster = PSs(3, BucketMap.even(2), regions=tmp_path)
    after = cluster.buckets.moved(3)
    cluster.train(range(100))
    before = cluster.rows()
    cluster.begin(after)
    with monkeypatch.context() as patch:
        patch.setattr("persia.ps.row_moves.RowMoves._remove_foreign", lambda _: None)
        cluster.end(after)
    assert cluster.rows() == before
    assert max(map(len, cluster.places().values())) == 2
    for rank in range(3):
        cluster.restart(rank)
    cluster.check_places()
    assert cluster.rows() == before


def test_a_cancelled_move_leaves_all_rows_where_they_were():
    cluster = PSs(3, BucketMap.even(2))
    after = cluster.buckets.moved(3)
    cluster.train(range(100))
    before = cluster.rows()
    cluster.begin(after)
    cluster.await_pass()
    assert cluster.rows() == before  # What has come is not exported.
    for ps in cluster.all:
        ps.cancel_move(1)
        ps.cancel_move(1)
    assert cluster.rows() == before
    cluster.check_places()
    assert cluster.all[0].moving() == MoveStatus()
    cluster.begin(after)
    cluster.end(after)
    again = cluster.buckets.moved(2)
    cluster.begin(again)
    for ps in cluster.all:
        ps.cancel_move(1)  # Too late.
    cluster.end(again)
    assert cluster.rows() == before
    cluster.check_places()


def test_checkpoints_and_moves_take_turns():
    cluster = PSs(3, BucketMap.even(2))
    after = cluster.buckets.moved(3)
    cluster.train(range(100))
    before = cluster.rows()
    for ps in cluster.all:
        ps.begin_snapshot("checkpoint", {}, "/tmp")
    cluster.begin(after)
    saved = [chunk for ps in cluster.all for chunk in ps.snapshot_rows("checkpoint")]
    assert sum(len(chunk.arrays["ids"]) for chunk in saved) == len(before)
    assert all(ps.moving().passes == 0 for ps in cluster.all[:2])
    for ps in cluster.all:
        ps.end_snapshot("checkpoint")
    cluster.await_pass()
    # And one that begins while rows move: those that have come are not part of it.
    names = {}
    for rank, ps in enumerate(cluster.all):
        names[rank] = ps.begin_snapshot("second", {}, "/tmp")
    saved = [chunk for ps in cluster.all for chunk in ps.snapshot_rows("second")]
    assert sum(len(chunk.arrays["ids"]) for chunk in saved) == len(before)
    for ps in cluster.all:
        ps.end_snapshot("second")
    cluster.end(after)
    assert cluster.rows() == before
    # The changes since are not known.
    assert cluster.all[0].begin_snapshot("third", names[0].numbers, "/tmp").whole


def test_a_pass_with_all_rows_after_a_checkpoint_is_not_short(monkeypatch):
    monkeypatch.setattr("persia.ps.row_move.PAUSE_SECONDS", SECONDS)
    cluster = PSs(2, BucketMap.even(1))
    after = cluster.buckets.moved(2)
    cluster.train(range(100))
    cluster.begin(after)
    cluster.await_pass()
    assert cluster.all[0].moving().seconds < SECONDS
    cluster.all[0].begin_snapshot("checkpoint", {}, "/tmp")
    cluster.all[0].end_snapshot("checkpoint")
    assert cluster.all[0].finish_move(Round(1, 1), after).seconds == math.inf


def test_a_checkpoint_delays_what_comes_and_what_is_removed():
    cluster = PSs(3, BucketMap.even(2))
    after = cluster.buckets.moved(3)
    cluster.train(range(100))
    before = cluster.rows()
    cluster.all[2].begin_snapshot("checkpoint", {}, "/tmp")
    cluster.begin(after)
    time.sleep(0.3)  # Nothing may happen in this time; if it could, it would most likely happen.
    assert cluster.all[0].moving() == MoveStatus(1)  # Neither a complete pass nor an error.
    cluster.all[2].end_snapshot("checkpoint")
    cluster.finish(after)
    cluster.all[0].begin_snapshot("another", {}, "/tmp")
    for ps in cluster.all:
        ps.adopt(cluster.round, after)
    assert cluster.rows() == before
    assert max(map(len, cluster.places().values())) == 2
    cluster.all[0].end_snapshot("another")
    cluster.check_places()


def test_rows_come_while_a_checkpoint_of_their_receiver_is_read(tmp_path):
    cluster = PSs(3, BucketMap.even(2))
    after = cluster.buckets.moved(3)
    cluster.train(range(100))
    cluster.begin(after)
    cluster.await_pass()
    receiver = cluster.all[2]
    receiver.begin_snapshot("checkpoint", {}, str(tmp_path))
    known = receiver.statistics()["item"]["rows"]
    cluster.train(range(100, 200))
    cluster.await_pass(2)
    until(lambda: receiver.statistics()["item"]["rows"] > known)
    assert not any(len(chunk.arrays["ids"]) for chunk in receiver.snapshot_rows("checkpoint"))  # It owns none yet.
    receiver.end_snapshot("checkpoint")
    before = cluster.rows()
    cluster.end(after)
    assert cluster.rows() == before
    cluster.check_places()


def test_rows_that_come_back_wait_until_their_earlier_copies_are_removed():
    cluster = PSs(2, BucketMap.even(1))
    cluster.train(range(100))
    before = cluster.rows()
    away = cluster.buckets.moved(2)
    cluster.begin(away)
    store, gate = cluster.all[0]._store, threading.Event()
    remove = store.remove_buckets

    def gated(*arguments):
        if threading.current_thread().name == "persia-removal":
            assert gate.wait(SECONDS)
        return remove(*arguments)

    store.remove_buckets = gated
    cluster.end(away)
    back = cluster.buckets.emptied([1])
    cluster.all[1].begin_move(back)
    time.sleep(0.3)  # Nothing may happen in this time; if it could, it would most likely happen.
    assert cluster.all[1].moving().passes == 0
    gate.set()
    cluster.end(back)
    assert cluster.rows() == before
    cluster.check_places()


def test_a_removal_waits_for_the_one_before():
    """Which may still remove a row of a bucket that has come back meanwhile."""
    cluster = PSs(2, BucketMap.even(1))
    cluster.train(range(100))
    store, gate, active, most = cluster.all[0]._store, threading.Event(), [0], [0]
    remove, lock = store.remove_buckets, threading.Lock()

    def gated(*arguments):
        if threading.current_thread().name == "persia-removal":
            with lock:
                active[0] += 1
                most[0] = max(most[0], active[0])
            assert gate.wait(SECONDS)
            with lock:
                active[0] -= 1
        return remove(*arguments)

    store.remove_buckets = gated
    moves = cluster.all[0]._moves
    moves._remove_foreign()
    until(lambda: active[0])
    moves._remove_foreign()
    time.sleep(0.3)  # Nothing may happen in this time; if it could, it would most likely happen.
    gate.set()
    moves._await_removal()
    assert most == [1]


def test_a_cancelled_move_without_copies_reads_no_rows(monkeypatch):
    cluster = PSs(2, BucketMap.even(1))
    cluster.train(range(100))
    after = cluster.buckets.moved(2)
    cluster.begin(after)
    cluster.end(after)
    cluster.check_places()
    removals = [ps._moves._removal for ps in cluster.all]
    for ps in cluster.all:
        ps.cancel_move(after.version + 1)
    assert [ps._moves._removal for ps in cluster.all] == removals


def test_rows_of_a_pass_are_counted_before_its_end(monkeypatch):
    cluster, gate = PSs(2, BucketMap.even(1)), threading.Event()
    for table in TABLES:
        cluster.train(range(100), table)
    receive = cluster.all[1].receive

    def gated(part):
        if part.number > 1:
            assert gate.wait(SECONDS)
        receive(part)

    monkeypatch.setattr(cluster.all[1], "receive", gated)
    after = cluster.buckets.moved(2)
    cluster.begin(after)
    until(lambda: cluster.all[0].moving().rows)
    assert cluster.all[0].moving().passes == 0
    gate.set()
    cluster.end(after)
    cluster.check_places()


def part(cluster, number, ids, value, copy="copy"):
    rows = next(cluster.all[0].export_rows())
    count = len(ids)
    arrays = {name: np.repeat(array[:1], count, axis=0) for name, array in rows.arrays.items()}
    arrays["ids"], arrays["embeddings"] = np.array(ids, np.uint64), np.full((count, 3), value, np.float32)
    return MovedRows(1, 0, copy, number, [], [rows._replace(arrays=arrays)], [])


def test_a_part_is_applied_once_and_in_order():
    cluster = PSs(2, BucketMap.even(1))
    after = cluster.buckets.moved(2)
    cluster.train(range(100))
    receiver = cluster.all[1]
    id_ = next(id_ for id_ in range(100) if owner("item", id_, after) == 1)
    receiver.begin_receiving(after, 0, "copy")
    first, second = part(cluster, 1, [id_], 1.0), part(cluster, 2, [id_], 2.0)
    for each in (first, second, first):
        receiver.receive(each)
    receiver.begin_receiving(after, 0, "copy")
    stored = receiver.read_rows("item", np.array([id_], np.uint64), False)
    assert stored.values.tolist() == [[2.0] * 3]
    receiver.begin_receiving(after, 0, "again")
    assert not receiver.read_rows("item", np.array([id_], np.uint64), False).found.any()
    with pytest.raises(StoreError, match="does not receive this copy of the rows of PS 0"):
        receiver.receive(part(cluster, 3, [id_], 3.0))


@pytest.mark.parametrize("complete", [False, True])
def test_what_has_come_is_not_exported_after_a_restart_either(tmp_path, complete):
    cluster = PSs(3, BucketMap.even(2), regions=tmp_path)
    after = cluster.buckets.moved(3)
    cluster.train(range(100))
    before = cluster.rows()
    cluster.begin(after)
    cluster.await_pass()
    if complete:
        cluster.finish(after)
    cluster.all[0].cancel_move(1)
    cluster.all[1].cancel_move(1)
    cluster.restart(2)
    assert cluster.rows() == before
    cluster.all[2]._moves._await_removal()
    assert bool(list(cluster.all[2]._store.iterate_rows(0))) == complete
    cluster.round = Round(1, cluster.round.number + 1)
    for ps in cluster.all:
        ps.adopt(cluster.round, cluster.first)
    assert cluster.rows() == before
    cluster.check_places()


def test_a_part_that_is_applied_while_the_next_copy_begins_ends_before_it():
    cluster = PSs(2, BucketMap.even(1))
    after = cluster.buckets.moved(2)
    cluster.train(range(100))
    receiver = cluster.all[1]
    id_ = next(id_ for id_ in range(100) if owner("item", id_, after) == 1)
    receiver.begin_receiving(after, 0, "copy")
    gate, began, store = threading.Event(), threading.Event(), receiver._store
    write = store.import_rows

    def gated(*arguments):
        began.set()
        assert gate.wait(SECONDS)
        return write(*arguments)

    store.import_rows = gated
    late = threading.Thread(target=lambda: receiver.receive(part(cluster, 1, [id_], 1.0)))
    late.start()
    assert began.wait(SECONDS)
    again = threading.Thread(target=lambda: receiver.begin_receiving(after, 0, "again"))
    again.start()
    gate.set()
    for thread in (late, again):
        thread.join(SECONDS)
    assert not receiver.read_rows("item", np.array([id_], np.uint64), False).found.any()


def test_rows_that_nobody_gives_are_refused():
    cluster = PSs(2, BucketMap.even(1))
    after = cluster.buckets.moved(2)
    cluster.train(range(100))
    before = cluster.rows()
    donor, receiver = cluster.all
    for ps, sender in ((receiver, 7), (receiver, 1), (donor, 1), (donor, 7)):
        with pytest.raises(StoreError, match=f"No rows of PS {sender} come to PS"):
            ps.begin_receiving(after, sender, "copy")
    receiver.begin_receiving(after, 0, "copy")
    own = next(id_ for id_ in range(100) if owner("item", id_, after) == 0)
    coming = next(id_ for id_ in range(100) if owner("item", id_, after) == 1)
    good = part(cluster, 1, [coming], 1.0)
    lacks = good.rows[0]._replace(arrays={"ids": good.rows[0].arrays["ids"]})
    for bad in (
        part(cluster, 1, [own], 1.0),
        good._replace(rows=[good.rows[0], good.rows[0]._replace(table="none")]),
        good._replace(rows=[good.rows[0], lacks]),
        good._replace(rows=[good.rows[0], lacks._replace(arrays={})]),
        good._replace(removed=[lacks._replace(arrays={"ids": np.array([own], np.uint64)})]),
        good._replace(removed=[lacks._replace(arrays={"ids": np.array([coming], np.int64)})]),
    ):
        with pytest.raises(StoreError):
            receiver.receive(bad)
        assert cluster.rows() == before
        assert not list(receiver._store.iterate_rows(0))
    receiver.receive(good)


def test_a_thread_that_meets_any_error_goes_on():
    cluster = PSs(2, BucketMap.even(1))
    cluster.train(range(10))
    before, receiver, after = cluster.rows(), cluster.all[1], cluster.buckets.moved(2)

    def broken(*_):
        raise OSError("too many open files")

    receiver.begin_receiving = broken
    cluster.begin(after)
    until(lambda: "too many open files" in cluster.all[0].moving().error)
    del receiver.begin_receiving
    cluster.end(after)
    assert cluster.rows() == before


def test_a_row_that_is_set_while_the_ps_is_sealed_is_not_acknowledged():
    cluster = PSs(2, BucketMap.even(1))
    cluster.train(range(10))
    donor, after = cluster.all[0], cluster.buckets.moved(2)
    cluster.begin(after)
    gate, began = threading.Event(), threading.Event()
    found = []
    setter = donor._setter.set

    def gated(*arguments):
        began.set()
        assert gate.wait(SECONDS)
        return setter(*arguments)

    donor._setter.set = gated

    def call():
        with pytest.raises(StaleMapError, match="has sent its rows to other PSs"):
            donor.set_rows(1, "item", np.arange(10, dtype=np.uint64), np.ones((10, 3), np.float32), None)
        found.append(True)

    thread = threading.Thread(target=call)
    thread.start()
    assert began.wait(SECONDS)
    cluster.finish(after)
    gate.set()
    thread.join(SECONDS)
    assert found == [True]


def test_errors():
    cluster = PSs(2, BucketMap.even(1))
    ps = cluster.all[0]
    with pytest.raises(StaleMapError, match="Bucket map 2 does not follow bucket map 0 of PS 0"):
        ps.begin_move(cluster.buckets.moved(2).moved(3))
    with pytest.raises(StaleMapError):
        ps.adopt(Round(1, 1), cluster.buckets.moved(2).moved(3))
    with pytest.raises(StoreError, match="cancelled"):
        ps.finish_move(Round(1, 1), cluster.buckets.moved(2))
    with pytest.raises(StoreError, match=r"PS 0 would both lose and gain buckets by bucket map 1\. Make two moves"):
        PSs(2, BucketMap.even(2)).all[0].begin_move(BucketMap(1, 2, ((1, 1024), (0, 2048), (1, 1024))))
    for options, error in (
        (ServerOptions(), "without `ServerOptions.rank`"),
        (ServerOptions(rank=0), "no way to reach"),
    ):
        alone = EmbeddingServer(TABLES, Adagrad(0.1), Sync(), 3, 1, options)
        with pytest.raises(StoreError, match=error):
            alone.begin_move(cluster.buckets.moved(2))
    assert ps.buckets() == BucketMap.even(1)


def test_a_ps_that_cannot_be_reached_is_named():
    cluster = PSs(2, BucketMap.even(1), timeout=0.5)
    cluster.train(range(10))
    after, receiver = cluster.buckets.moved(2), cluster.all[1]

    def late(*_):
        raise DeadlineError("PS 1 did not answer within 1 s.")

    receiver.begin_receiving = late
    cluster.all[0].begin_move(after)
    with pytest.raises(DeadlineError, match=r"PS 0 could not send the rows .* PS 1 did not answer within 1 s"):
        cluster.all[0].finish_move(Round(1, 1), after)
    del receiver.begin_receiving
    cluster.all[0]._space._timeout = SECONDS
    assert cluster.all[0].finish_move(Round(1, 1), after).complete


def test_training_goes_on_meanwhile():
    """Rows that change while they are sent are sent again."""
    cluster, alone = PSs(3, BucketMap.even(2)), PSs(1, BucketMap.even(1))
    after = cluster.buckets.moved(3)
    cluster.train(range(2000))
    alone.train(range(2000))
    stop = threading.Event()
    steps = []

    def train():
        random = np.random.default_rng(0)
        while not stop.is_set():
            ids = random.integers(0, 3000, 200)
            cluster.train(ids)
            steps.append(ids)

    thread = threading.Thread(target=train)
    thread.start()
    cluster.begin(after)
    cluster.await_pass(3)
    stop.set()
    thread.join()
    cluster.end(after)
    for ids in steps:
        alone.train(ids)
    assert cluster.rows() == alone.rows()


def test_over_the_network():
    rare = Table("rare", 2, capacity=10_000, admission=AdmitMinFrequency(2))
    cluster = PSs(3, BucketMap.even(2), TABLES | {"rare": rare}, capacities={"rare": 10_000})
    protocol = type("Both", (EmbeddingPS, MovableRows), {})
    servers = [rpc.serve(ps, protocol=protocol) for ps in cluster.all]
    stubs = [rpc.connect(server.address, MovableRows, timeout=SECONDS) for server in servers]
    try:
        local, cluster.all = cluster.all, cluster.all
        cluster.train(range(500))
        cluster.train(range(200), "rare")
        before = cluster.rows()
        for ps in local:
            ps._moves._peer = stubs.__getitem__
        after = cluster.buckets.moved(3)
        for stub in stubs[:2]:
            assert stub.begin_move(after).version == 1
        for stub in stubs[:2]:
            assert stub.finish_move(Round(1, 1), after).complete
        for stub in stubs:
            stub.complete_move(Round(1, 1), after)
        for stub in stubs:
            stub.adopt(Round(1, 1), after)
        assert cluster.rows() == before
        cluster.check_places()
        cluster.train(range(200), "rare")  # Their counts have moved, too.
        assert len(cluster.rows()) == len(before) + 200
    finally:
        for stub in stubs:
            rpc.close(stub)
        for server in servers:
            server.close()


def test_the_service_has_the_methods():
    assert describe(MovableRows).keys() <= {name for name in dir(EmbeddingServer) if not name.startswith("_")}
