"""Rounds in which rows move: whatever dies at whatever call, updates are applied once, and each row has one owner."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import persia
from persia.batching.id_column import IdColumn
from persia.coordinator import CoordinatorServer
from persia.errors import ClosedError, DeadlineError, StaleMapError, StoreError
from persia.membership import map_rounds
from persia.membership.directory import Directory
from persia.membership.embedding_workers import EmbeddingWorkers
from persia.membership.map_rounds import MapRounds
from persia.membership.reached_servers import ReachedServers
from persia.modes import Sync
from persia.types import BucketMap, Contribution, Packed, PushHeader
from persia.worker import Worker
from support.examples import examples
from support.moving_ps import SECONDS, TABLES, PSs, until

SCHEMA = persia.Schema(
    id_features=[persia.IdFeature("item", dim=3), persia.IdFeature("user", dim=2)],
    tables=[*TABLES.values()],
    labels=["click"],
)


class NNWorkerDies(BaseException):
    """NN worker 0 ends in the middle of a round."""


class Mortal:
    """A role that dies at a planned call, before it has done what was asked, or before it answers."""

    def __init__(self, cluster, role):
        self._cluster, self._role = cluster, role

    def __getattr__(self, name):
        def call(*arguments):
            self._cluster.event(self._role, name, "before")
            result = getattr(self._cluster.of(self._role), name)(*arguments)
            if self._cluster.event(self._role, name, "after"):  # A stub sends the call again.
                result = getattr(self._cluster.of(self._role), name)(*arguments)
            return result

        return call


class Moving(PSs):
    """A run in this process: PSs, coordinator, embedding worker, and NN worker 0 with its rounds."""

    def __init__(self, count, servers, tmp_path):
        self.plan = {}
        """What dies, by role, call, and "before" or "after"."""
        self.happened = []
        self.lock = threading.Lock()
        super().__init__(count, BucketMap.even(servers), regions=tmp_path)
        self.path = str(tmp_path / "members")
        self.coordinator = CoordinatorServer(path=self.path, buckets=self.first)
        self.reached = ReachedServers(lambda member: Mortal(self, member.rank), lambda stub: None, SECONDS)
        for rank in range(count):
            self.join(rank)
        self.generation = self.step = 0
        self.begin_generation()
        self.renew_worker()

    def peer(self, other):
        return Mortal(self, other)

    def of(self, role):
        if role == "coordinator":
            return self.coordinator
        until(lambda: self.all[role] is not None)  # It is being restarted.
        return self.all[role]

    def join(self, rank):
        self.coordinator.join("embedding_ps", rank, f"ps-{rank}")
        self.reached.update(self.coordinator.membership())

    def event(self, role, call, when):
        """Returns whether the role has died."""
        with self.lock:
            who = self.plan.pop((role, call, when), None)
        if who is None:
            return False
        self.happened.append((role, call, when))
        if who == "nn_worker":
            raise NNWorkerDies
        self.kill(who)
        return who == role

    def kill(self, who):
        if who == "coordinator":
            self.coordinator = CoordinatorServer(path=self.path, buckets=self.first)
        else:
            self.restart(who)

    def begin_generation(self):
        self.generation = self.coordinator.regenerate(1)
        self.pushed = 0
        directory = Directory("embedding_worker", lambda member: self)
        workers = EmbeddingWorkers(directory, SECONDS)
        self.rounds = MapRounds(Mortal(self, "coordinator"), self.reached, workers, self.generation, SECONDS)
        self.rounds._thread = threading.current_thread()  # Watched by hand.
        self.make_round()

    def make_round(self):
        """A round; if NN worker 0 dies in it, the next generation begins."""
        try:
            self.rounds.make(Sync(), self.step)
        except NNWorkerDies:
            self.begin_generation()

    def renew_worker(self):
        """A new embedding worker, which gets the newest map of any PS."""
        buckets, servers = self.reached.current()
        assert buckets.servers == len(servers)
        self.worker = Worker(SCHEMA, servers, newest_map=self.reached.current)

    def train_batch(self, random):
        """One step of a batch, whose gradients depend on the step. The same calls for the twin."""
        self.step += 1
        self.pushed += 1
        train(self.worker, random, self.step, self.pushed, self.generation)

    def settle(self, after):
        """Watches and makes rounds until the run has this map."""

        def settled():
            self.watch()
            self.make_round()
            return self.coordinator.map_state().adopted >= after.version

        until(settled)

    def watch(self):
        try:
            self.rounds.watch_once()
        except NNWorkerDies:
            self.begin_generation()
        except StoreError:
            pass  # As in the thread that watches.


def train(worker, random, step, sequence, generation):
    size = int(random.integers(1, 30))
    columns = {name: IdColumn(random.integers(0, 60, size).astype(np.uint64), None) for name in ("item", "user")}
    batch_id = worker.register(columns)
    worker.lookup(batch_id)
    ids = worker.distinct_ids(batch_id)
    gradients = {
        table: np.repeat(((own % 5 + step) / 8).astype(np.float32)[:, None], TABLES[table].dim, 1)
        for table, own in ids.items()
    }
    header = PushHeader(generation, 0, sequence, step - 1, size)
    worker.push(header, [Contribution(batch_id, Packed.of(gradients, np.float32))])


class Twin:
    """One PS that never moves."""

    def __init__(self):
        self.pss = PSs(1, BucketMap.even(1), TABLES)
        self.worker, self.step = Worker(SCHEMA, self.pss.all), 0

    def train_batch(self, random):
        self.step += 1
        train(self.worker, random, self.step, self.step, 1)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    monkeypatch.setattr(map_rounds, "AGAIN_SECONDS", 0.0)
    monkeypatch.setattr("persia.ps.row_move.PAUSE_SECONDS", 0.01)


def both(cluster, twin, seed, steps=3):
    for number in range(steps):
        cluster.train_batch(np.random.default_rng(seed + number))
        twin.train_batch(np.random.default_rng(seed + number))


def check(cluster, twin):
    assert cluster.rows() == twin.pss.rows()
    assert cluster.buckets == cluster.coordinator.map_state().buckets
    cluster.check_places()


CALLS = [
    (role, call, when, who)
    for role, calls in {
        0: ("begin_move", "finish_move", "adopt"),
        2: ("begin_receiving", "receive", "complete_move", "adopt"),
        "coordinator": ("commit_map", "map_adopted"),
    }.items()
    for call in calls
    for when in ("before", "after")
    for who in ((0, 2, "coordinator", "nn_worker") if call == "commit_map" else (role, "nn_worker"))
    # NN worker 0 does not make the calls by which donors send rows.
    if not (call in ("begin_receiving", "receive") and who == "nn_worker")
]
"""The role that is called, the call, and who dies before or after it."""


@pytest.mark.parametrize(("role", "call", "when", "who"), CALLS)
def test_whoever_dies_at_whatever_call(role, call, when, who, tmp_path):
    cluster, twin = Moving(3, 2, tmp_path), Twin()
    both(cluster, twin, 0)
    after = cluster.buckets.moved(3)
    cluster.coordinator.order_map(after)
    cluster.plan[role, call, when] = who
    cluster.watch()
    both(cluster, twin, 10)
    cluster.settle(after)
    both(cluster, twin, 20)
    assert cluster.happened == [(role, call, when)]
    check(cluster, twin)


@settings(max_examples=examples(8), deadline=None)
@given(data=st.data())
def test_any_moves_and_deaths(data, tmp_path_factory):
    cluster, twin = Moving(4, data.draw(st.integers(1, 3)), tmp_path_factory.mktemp("run")), Twin()
    deaths = st.sampled_from([0, 1, 2, 3, "coordinator"])
    for number in range(data.draw(st.integers(1, 4))):
        both(cluster, twin, 100 * number, data.draw(st.integers(0, 3)))
        current = cluster.buckets
        changes = [current.moved(count) for count in range(1, 5)]
        after = data.draw(st.sampled_from(changes + ([current.emptied([0])] if current.servers > 1 else [])))
        if after == current:
            continue
        cluster.coordinator.order_map(after)
        for role, call, when, who in data.draw(st.lists(st.sampled_from(CALLS), max_size=3)):
            cluster.plan[role, call, when] = who
        for _ in range(data.draw(st.integers(0, 3))):
            cluster.watch()
            both(cluster, twin, data.draw(st.integers(0, 1000)), 1)
        if data.draw(st.booleans()):
            cluster.kill(data.draw(deaths))
        if data.draw(st.booleans()):
            cluster.renew_worker()
        if data.draw(st.booleans()):
            cluster.begin_generation()
        if data.draw(st.booleans()) and cluster.coordinator.withdraw_map(after):
            cluster.watch()
            cluster.make_round()
        else:
            cluster.settle(after)
    both(cluster, twin, 5000)
    cluster.plan.clear()
    cluster.make_round()
    check(cluster, twin)


def ready_move(tmp_path):
    """A move that is ready to be finished."""
    cluster, twin = Moving(3, 2, tmp_path), Twin()
    both(cluster, twin, 0)
    after = cluster.buckets.moved(3)
    cluster.coordinator.order_map(after)
    until(lambda: cluster.watch() or cluster.rounds.ready)
    return cluster, twin, after


def test_a_move_is_not_finished_before_a_pass_after_a_checkpoint(tmp_path):
    cluster, twin, after = ready_move(tmp_path)
    for ps in cluster.all:
        ps.begin_snapshot("checkpoint", {}, str(tmp_path))
    cluster.rounds.busy = lambda: True
    assert not cluster.rounds.ready
    cluster.rounds.busy = lambda: False  # It ends between two questions to the donors, which wait with their passes.
    assert not cluster.rounds.ready
    cluster.watch()
    assert not cluster.rounds.ready
    cluster.make_round()
    assert cluster.coordinator.map_state().buckets.servers == 2
    passes = [ps.moving().passes for ps in cluster.all[:2]]
    for ps in cluster.all:
        ps.end_snapshot("checkpoint")
    until(lambda: cluster.watch() or cluster.rounds.ready)
    assert all(ps.moving().passes > before for ps, before in zip(cluster.all[:2], passes, strict=True))
    cluster.settle(after)
    check(cluster, twin)


def test_what_only_informs_may_fail_once_a_map_is_adopted(tmp_path, monkeypatch):
    cluster, twin, after = ready_move(tmp_path)

    def late(_):
        raise DeadlineError("The coordinator is late.", seconds=1.0)

    monkeypatch.setattr(cluster.coordinator, "report_move", late)
    cluster.make_round()
    assert cluster.coordinator.map_state().adopted == after.version
    both(cluster, twin, 10)
    check(cluster, twin)


def test_moves_that_are_given_up_are_reported(tmp_path, monkeypatch):
    cluster, twin, after = ready_move(tmp_path)
    finish = cluster.all[0].finish_move

    def late(*_):
        raise DeadlineError("PS 0 is late.", seconds=1.0)

    monkeypatch.setattr(cluster.all[0], "finish_move", late)
    monkeypatch.setattr(map_rounds, "AGAIN_SECONDS", SECONDS)
    cluster.make_round()
    cluster.watch()
    progress = cluster.coordinator.map_state().progress
    assert (progress.version, progress.gave_up, progress.problem) == (1, 1, "PS 0 is late.")
    monkeypatch.setattr(cluster.all[0], "finish_move", finish)
    cluster.rounds._not_before = 0.0
    cluster.settle(after)
    check(cluster, twin)


def late_to_cancel(cluster, rank, monkeypatch):
    """Lets a PS not answer the next two calls that end a move; returns all such calls."""
    cancel, calls = cluster.all[rank].cancel_move, []

    def late(version, wanted):
        calls.append(version)
        if len(calls) <= 2:
            raise DeadlineError(f"PS {rank} is late.", seconds=1.0)
        cancel(version, wanted)

    monkeypatch.setattr(cluster.all[rank], "cancel_move", late)
    return calls


@pytest.mark.parametrize("rank", [0, 2])
def test_a_move_ends_at_all_pss_though_one_does_not_answer(tmp_path, monkeypatch, rank):
    cluster, twin, after = ready_move(tmp_path)
    calls = late_to_cancel(cluster, rank, monkeypatch)
    cluster.coordinator.withdraw_map(after)
    cluster.watch()
    assert not cluster.rounds.ready
    for _ in range(4):
        cluster.watch()
    assert calls == [1, 1, 1]
    assert [ps.moving().version for ps in cluster.all] == [-1, -1, -1]
    both(cluster, twin, 10)
    check(cluster, twin)


def test_a_move_begins_once_the_move_before_has_ended_at_all_pss(tmp_path, monkeypatch):
    cluster, twin, before = ready_move(tmp_path)
    calls = late_to_cancel(cluster, 1, monkeypatch)
    cluster.coordinator.withdraw_map(before)
    after = cluster.buckets.emptied([0])
    cluster.coordinator.order_map(after)
    for _ in range(2):
        cluster.watch()
        assert [ps.moving().version for ps in cluster.all] == [-1, 1, -1]
        progress = cluster.coordinator.map_state().progress
        assert (progress.version, progress.problem[:32]) == (1, "embedding PS 1 has not answered ")
    cluster.watch()
    assert [ps.moving().version for ps in cluster.all] == [1, -1, -1]
    both(cluster, twin, 10)
    cluster.settle(after)
    assert calls == [1, 1, 1]
    check(cluster, twin)


def test_a_move_whose_order_changes_between_two_generations_ends(tmp_path, monkeypatch):
    cluster, twin = Moving(3, 2, tmp_path), Twin()
    both(cluster, twin, 0)
    before, after = cluster.buckets.moved(3), cluster.buckets.emptied([0])
    donor, receive = cluster.all[1], cluster.all[2].receive
    sending = threading.Event()

    def waits_for_space(part):
        if part.donor == 1:
            sending.set()
            # Until then PS 1 reads rows, and removes none: it could get none.
            until(lambda: (move := donor._moves._move) is not None and move.ended)
        receive(part)

    monkeypatch.setattr(cluster.all[2], "receive", waits_for_space)
    cluster.coordinator.order_map(before)
    cluster.watch()
    assert sending.wait(SECONDS)
    cluster.coordinator.withdraw_map(before)
    cluster.begin_generation()
    cluster.coordinator.order_map(after)
    cluster.watch()
    assert [ps.moving().version for ps in cluster.all] == [1, -1, -1]
    both(cluster, twin, 10)
    cluster.settle(after)
    check(cluster, twin)


def test_an_empty_ps_in_place_of_one_that_leaves_completes_a_move_that_was_committed(tmp_path, monkeypatch):
    cluster, twin = Moving(3, 3, tmp_path), Twin()
    both(cluster, twin, 0)
    after = cluster.buckets.moved(2)
    cluster.coordinator.order_map(after)
    until(lambda: cluster.watch() or cluster.rounds.ready)
    cluster.plan[0, "adopt", "before"] = "nn_worker"
    begin = cluster.begin_generation

    def lost_with_its_host():
        cluster.all[2]._moves.close()
        cluster.regions, cluster.first = tmp_path / "another host", cluster.coordinator.map_state().buckets
        cluster.all[2] = cluster.make(2)
        begin()

    monkeypatch.setattr(cluster, "begin_generation", lost_with_its_host)
    cluster.make_round()
    assert (cluster.happened, cluster.first) == ([(0, "adopt", "before")], after)
    assert cluster.coordinator.map_state().adopted == after.version
    both(cluster, twin, 10)
    check(cluster, twin)


def test_copies_continue_in_the_next_generation_while_the_order_is_the_same(tmp_path):
    cluster, twin, after = ready_move(tmp_path)

    def copies():
        return [ps._moves._move for ps in cluster.all[:2]], dict(cluster.all[2]._moves._copies)

    began = copies()
    assert set(began[1]) == {0, 1}
    cluster.begin_generation()
    cluster.watch()
    assert copies() == began
    both(cluster, twin, 10)
    cluster.settle(after)
    check(cluster, twin)


def test_a_closed_connection_to_the_coordinator_ends_a_round(tmp_path, monkeypatch):
    cluster, _, _ = ready_move(tmp_path)

    def closed(*_):
        raise ClosedError("The connection is closed.")

    monkeypatch.setattr(cluster.coordinator, "commit_map", closed)
    with pytest.raises(ClosedError):
        cluster.rounds.make(Sync(), 0)


def test_a_ps_that_does_not_answer_is_left_out(tmp_path, monkeypatch):
    cluster, twin = Moving(2, 2, tmp_path), Twin()
    both(cluster, twin, 0)
    answers = cluster.reached.current()

    def late():
        raise DeadlineError("The PS is late.", seconds=1.0)

    monkeypatch.setattr(cluster.all[1], "buckets", late)
    assert cluster.reached.current()[0] == answers[0]
    monkeypatch.setattr(cluster.all[0], "buckets", late)
    with pytest.raises(DeadlineError, match="The PS is late"):
        cluster.reached.current()
    assert cluster.worker._follows(StaleMapError("Refused.", routed=0, current=1))  # Tried again.


def test_a_ps_that_is_not_known_yet_is_named(tmp_path):
    cluster = Moving(3, 2, tmp_path)
    after = cluster.buckets.moved(4)
    cluster.coordinator.order_map(after)
    cluster.watch()
    assert "embedding PS 3 has joined" in cluster.coordinator.map_state().progress.problem
