"""Moves that are given up: what arrives late changes nothing that is trained."""

import threading

import numpy as np
import pytest

from persia.errors import DeadlineError, StaleMapError, StoreError
from persia.retry import Backoff
from persia.schema import AdmitMinFrequency, Table
from persia.services import MoveStatus, Round
from persia.types import BucketMap, Packed
from support.moving_ps import SECONDS, PSs, until

TABLES = {
    "item": Table("item", 3),
    "rare": Table("rare", 2, capacity=3000, admission=AdmitMinFrequency(2)),
}


STILL_SENDS = "PS 0 still sends rows for bucket map 1 to PS 1, which has not answered 0 s after"


def in_time(call):
    """Returns whether a call does not raise DeadlineError."""
    try:
        call()
    except DeadlineError:
        return False
    return True


class GivenUp(PSs):
    """Three PSs, of which PS 0 gives its buckets to the others."""

    def __init__(self, **options):
        super().__init__(3, BucketMap.even(3), TABLES, capacities={"rare": 1000}, **options)
        for _ in range(3):
            for table in TABLES:
                self.train(range(200), table)
        self.after = self.buckets.emptied([0])
        self.round = Round(1, 1)

    def finish_in_thread(self):
        """Finishes the move at its donor, which does not answer before the round is given up."""

        def call():
            with pytest.raises(DeadlineError):
                self.all[0].finish_move(self.round, self.after)

        thread = threading.Thread(target=call)
        thread.start()
        until(lambda: self.all[0]._moves._own.sealed)
        return thread

    def give_up(self):
        for ps in self.all:
            ps.adopt(self.round, self.first)


def test_counts_that_arrive_late_do_not_overwrite_the_records_of_pushes(monkeypatch):
    monkeypatch.setattr("persia.ps.row_move.BACKOFF", Backoff(SECONDS, SECONDS))  # No other copy begins.
    cluster = GivenUp()
    receiver, late, came, pushed = cluster.all[1], [], threading.Event(), []
    receive, export = receiver.receive, receiver._store.export_state

    def lost(part):
        if part.state:
            late.append(part)
            came.set()
            raise DeadlineError("PS 1 did not answer within 1 s.")
        receive(part)

    receiver.receive = lost
    cluster.begin(cluster.after)
    finishing = cluster.finish_in_thread()
    assert came.wait(SECONDS)
    cluster.give_up()
    finishing.join(SECONDS)

    def push():
        if not pushed:
            cluster.train(range(200), "rare")
            pushed.append(True)

    def exported(*arguments):
        state = export(*arguments)
        push()
        return state

    receiver._store.export_state = exported
    receive(late[0])  # It was on its way.
    receiver._store.export_state = export
    push()
    before = cluster.rows()
    cluster.sequence -= 1
    cluster.train(range(200), "rare")  # A repetition of the same push.
    assert cluster.rows() == before


def test_a_round_that_gives_up_a_move_ends_the_copies_that_were_being_finished():
    cluster = GivenUp()
    donor, receiver = cluster.all[:2]
    parts, receive = [], receiver.receive

    def noted(part):
        receive(part)
        parts.append(part)

    receiver.receive = noted
    cluster.begin(cluster.after)
    cluster.await_pass()
    cluster.give_up()  # A round without a move, such as a change of mode.
    assert donor.moving().passes
    cluster.round = Round(1, 2)
    assert donor.finish_move(cluster.round, cluster.after).complete
    assert len({part.copy for part in parts}) == 1
    before = cluster.rows()
    cluster.give_up()
    with pytest.raises(StoreError, match="PS 1 does not receive this copy of the rows of PS 0"):
        receive(parts[-1]._replace(number=parts[-1].number + 1))
    assert cluster.rows() == before
    cluster.check_places()
    cluster.begin(cluster.after)
    cluster.end(cluster.after)
    assert cluster.rows() == before
    cluster.check_places()


@pytest.mark.parametrize("call", ["begin_receiving", "receive"])
def test_a_donor_stays_sealed_while_its_move_sends_a_part_and_then_sends_no_other(monkeypatch, call):
    monkeypatch.setattr("persia.ps.row_moves.STOP_SECONDS", 0.0)
    cluster = GivenUp()
    donor, gate, came, calls = cluster.all[0], threading.Event(), threading.Event(), []
    for rank in (1, 2):
        real = getattr(cluster.all[rank], call)

        def gated(*arguments, real=real):
            calls.append(arguments)
            if call == "begin_receiving" or arguments[0].state:
                came.set()
                assert gate.wait(SECONDS)
            real(*arguments)

        setattr(cluster.all[rank], call, gated)
    cluster.begin(cluster.after)
    finishing = cluster.finish_in_thread()
    assert came.wait(SECONDS)
    sent = len(calls)
    for _ in range(2):
        with pytest.raises(DeadlineError, match=STILL_SENDS):
            donor.adopt(cluster.round, cluster.first)
        with pytest.raises(StaleMapError, match="PS 0 has sent its rows to other PSs"):
            donor.lookup(Packed(["item"], [1], np.ones(1, np.uint64)), True, 0)
    gate.set()
    until(lambda: in_time(lambda: donor.adopt(cluster.round, cluster.first)))
    finishing.join(SECONDS)
    assert len(calls) == sent
    cluster.give_up()
    for ps in cluster.all:
        ps.cancel_move(1)
    cluster.train(range(200))
    cluster.check_places()


def test_a_move_does_not_begin_next_to_one_that_still_sends(monkeypatch):
    monkeypatch.setattr("persia.ps.row_moves.STOP_SECONDS", 0.0)
    cluster = GivenUp()
    receiver, gate, came = cluster.all[1], threading.Event(), threading.Event()
    receive = receiver.receive

    def gated(part):
        came.set()
        assert gate.wait(SECONDS)
        receive(part)

    receiver.receive = gated
    cluster.begin(cluster.after)
    assert came.wait(SECONDS)
    donor, other = cluster.all[0], cluster.buckets.reassigned(0, 1)
    for order in (
        lambda: donor.begin_move(other),
        lambda: donor.cancel_move(1),
        lambda: donor.begin_move(cluster.after),  # It has been told to stop.
    ):
        with pytest.raises(DeadlineError, match=STILL_SENDS):
            order()
    gate.set()
    until(lambda: in_time(lambda: donor.begin_move(cluster.after)))
    cluster.end(cluster.after)
    cluster.check_places()


def test_copies_for_the_map_that_is_wanted_survive_a_cancel():
    cluster = GivenUp()
    before = cluster.rows()
    cluster.begin(cluster.after)
    cluster.await_pass()
    move, places = cluster.all[0]._moves._move, cluster.places()
    copies = [dict(ps._moves._copies) for ps in cluster.all]
    assert max(map(len, places.values())) == 2
    for ps in cluster.all:
        ps.cancel_move(1, cluster.after)
    assert cluster.all[0]._moves._move is move
    assert not move.ended
    assert [ps._moves._copies for ps in cluster.all] == copies
    assert [ps._moves._removal for ps in cluster.all] == [None] * 3
    assert cluster.places() == places
    other = cluster.buckets.emptied([1])
    for ps in cluster.all:
        ps.cancel_move(1, other)
    assert cluster.all[0].moving() == MoveStatus()
    assert not any(ps._moves._copies for ps in cluster.all)
    cluster.check_places()
    cluster.begin(other)
    cluster.end(other)
    assert cluster.rows() == before
    cluster.check_places()


def test_a_cancel_ends_copies_for_another_map_next_to_those_that_are_wanted():
    cluster = GivenUp()
    before, receiver, other = cluster.rows(), cluster.all[2], cluster.buckets.emptied([1])
    parts, receive = [], receiver.receive

    def noted(part):
        receive(part)
        parts.append(part)

    receiver.receive = noted
    cluster.all[1].begin_move(other)
    until(lambda: cluster.all[1].moving().passes)
    cluster.all[1].cancel_move(1)  # PS 2 does not get it.
    late = parts[-1]
    cluster.all[0].begin_move(cluster.after)
    until(lambda: cluster.all[0].moving().passes)
    assert {donor: copy.after for donor, copy in receiver._moves._copies.items()} == {0: cluster.after, 1: other}
    kept, places = receiver._moves._copies[0], cluster.places()
    receiver.cancel_move(1, cluster.after)
    assert receiver._moves._copies == {0: kept}
    receiver._moves._await_removal()
    assert cluster.places() == places  # Rows of the map that is wanted are not removed with the others.
    with pytest.raises(StoreError, match="PS 2 does not receive this copy of the rows of PS 1"):
        receive(late._replace(number=late.number + 1))
    cluster.end(cluster.after)
    assert len({part.copy for part in parts if part.donor == 0}) == 1
    assert cluster.rows() == before
    cluster.check_places()
