"""Moves that are given up: what arrives late changes nothing that is trained."""

import threading

import pytest

from persia.errors import DeadlineError, StoreError
from persia.retry import Backoff
from persia.schema import AdmitMinFrequency, Table
from persia.services import Round
from persia.types import BucketMap
from support.moving_ps import SECONDS, PSs

TABLES = {
    "item": Table("item", 3),
    "rare": Table("rare", 2, capacity=3000, admission=AdmitMinFrequency(2)),
}


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
