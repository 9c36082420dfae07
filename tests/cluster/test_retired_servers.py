"""The number of embedding PSs after one that retires has ended badly, without processes."""

import threading
from types import SimpleNamespace

import pytest

import persia

pytest.importorskip("ray", reason='Ray is not installed: pip install "persia-recsys[ray]"')

from persia.cluster.ray import ps_scaling, roles
from persia.cluster.ray.options import RayOptions
from persia.cluster.ray.ps_scaling import scale_servers
from persia.cluster.ray.roles import Roles
from persia.coordinator import CoordinatorServer
from persia.errors import DeadlineError, PersiaError, RoleDiedError
from persia.membership.reached_servers import ReachedServers
from persia.services import Round
from persia.types import BucketMap


def process(rank, expendable=False):
    return SimpleNamespace(role="embedding_ps", rank=rank, expendable=expendable, title=f"PS {rank}", info=None)


class Processes:
    """Four PSs that can die, or not end."""

    def __init__(self):
        self.servers = [process(rank) for rank in range(4)]
        self.failed, self.late = [], False

    def of(self, role):
        return list(self.servers) if role == "embedding_ps" else []

    def release(self, servers):
        pass

    def end(self, servers):
        self.servers = [process for process in self.servers if process not in servers]
        if self.late:
            raise DeadlineError("embedding PS 3 did not end within 20 s.", seconds=20.0)

    def need(self, servers):
        for process in servers:
            process.expendable = False

    def expended(self, servers):
        return []

    def await_ready(self, servers, timeout):
        pass

    def failures(self):
        return list(self.failed)

    def forget_failures(self, role, rank=None):
        self.failed = [death for death in self.failed if rank not in (None, death.fields["rank"])]

    def check(self):
        if self.failed:
            raise self.failed[0]

    def die(self, roles, rank):
        """As `persia.cluster.ray.processes.Processes` notices the death for good of a PS."""
        death = RoleDiedError(f"embedding PS {rank} has died.", role="embedding_ps", rank=rank)
        (process,) = [process for process in self.servers if process.rank == rank]
        roles._died(process, "killed")
        self.servers.remove(process)
        if not process.expendable:
            self.failed.append(death)


class Cluster(Roles):
    """A cluster of four PSs, whose rows move immediately. `started_ranks` has the ranks of PSs that have joined."""

    def __init__(self, monkeypatch):
        super().__init__(
            {"embedding_ps": 4, "embedding_worker": 1, "data_loader": 1, "nn_worker": 1}, RayOptions(timeout=5.0)
        )
        self.plan = self.tokens = self.stream_log = object()
        schema = SimpleNamespace(resolved_tables=lambda: {})
        self.service = SimpleNamespace(schema=schema)
        self.processes, self.started_ranks = Processes(), []
        self.coordinator = CoordinatorServer(buckets=BucketMap.even(4))
        self.placer = SimpleNamespace(server_nodes=lambda _: [], server_memory=lambda: None)
        self.placer.reserve = self.placer.release = self.placer.unpin = lambda *_: None
        self.running.acquire()
        self.before_adoption = self.after_adoption = lambda: None
        for rank in range(4):
            self.coordinator.join("embedding_ps", rank, f"ps-{rank}")
        monkeypatch.setattr(ps_scaling, "_move", self.move)
        monkeypatch.setattr(roles, "server_capacities", lambda *_: [])

    def start_servers(self, ranks, service, count=None, expendable=False):
        started = [process(rank, expendable) for rank in ranks]
        self.processes.servers += started
        for rank in ranks:
            self.coordinator.join("embedding_ps", rank, f"new-ps-{rank}")
        self.started_ranks += ranks
        return started

    def move(self, _, maps, after, added):
        self.watched = [process.rank for process in added]
        if after != maps.map_state().buckets:
            assert {process.rank for process in self.processes.servers}.issuperset(range(after.servers))
            maps.order_map(after)
            generation = maps.regenerate(1)
            assert maps.commit_map(Round(generation, 1), after)
            self.before_adoption()
            maps.map_adopted(generation, after.version)
            self.after_adoption()

    @property
    def here(self):
        """Number of PSs, and the ranks of the members that have not left."""
        members = self.coordinator.membership().members
        return self.counts["embedding_ps"], [m.rank for m in members if m.state != "dead" or m.reason]


@pytest.fixture
def cluster(monkeypatch):
    return Cluster(monkeypatch)


def test_pss_that_do_not_end_in_time_have_left(cluster):
    cluster.processes.late = True
    with pytest.raises(DeadlineError, match="did not end within 20 s"):
        scale_servers(cluster, 2, lambda: None)
    assert cluster.here == (2, [0, 1])
    cluster.processes.late = False
    assert scale_servers(cluster, 2, lambda: None, expected=2)
    assert cluster.here == (2, [0, 1])
    assert scale_servers(cluster, 4, lambda: None, expected=2)
    assert cluster.here == (4, [0, 1, 2, 3])
    assert cluster.started_ranks == [2, 3]


def test_a_ps_that_dies_once_its_rows_have_moved_has_left(cluster):
    def dies():
        cluster.processes.die(cluster, 3)
        cluster.started()  # It is no failure of the run.

    scale_servers(cluster, 2, dies)
    assert cluster.here == (2, [0, 1])


def test_a_ps_that_dies_before_the_driver_knows_that_all_have_adopted_the_map_is_no_failure(cluster):
    cluster.after_adoption = lambda: cluster.processes.die(cluster, 3)
    assert scale_servers(cluster, 2, cluster.started)
    assert cluster.ps_deaths == []
    assert cluster.here == (2, [0, 1])


def test_a_ps_that_dies_before_all_have_adopted_the_map_is_a_failure(cluster):
    cluster.before_adoption = lambda: cluster.processes.die(cluster, 3)
    with pytest.raises(RoleDiedError, match="embedding PS 3 has died"):
        scale_servers(cluster, 2, cluster.started)
    assert [death.fields["rank"] for death in cluster.ps_deaths] == [3]


def test_a_ps_that_dies_while_the_coordinator_does_not_answer_is_a_failure(cluster, monkeypatch):
    def late():
        raise DeadlineError("The coordinator is late.", seconds=1.0)

    monkeypatch.setattr(cluster.coordinator, "map_state", late)
    cluster.processes.die(cluster, 3)
    with pytest.raises(RoleDiedError, match="embedding PS 3 has died"):
        cluster.started()


def test_only_lost_pss_that_have_not_left_are_replaced(cluster, monkeypatch):
    """Though a failed call of `scale` has not ended the others."""
    ray = persia.cluster.Ray(4)
    connection = SimpleNamespace(reconnect=lambda: None, servers=ReachedServers(None, None, 1.0))
    ray._roles, ray._connections = cluster, [connection]

    def fails():
        raise PersiaError("The coordinator is late.")

    with pytest.raises(PersiaError, match="The coordinator is late"):
        scale_servers(cluster, 2, fails)
    for rank in (1, 3):
        cluster.processes.die(cluster, rank)
    ray.restart_servers([3])
    assert cluster.started_ranks == []
    ray.restart_servers([1, 3])
    assert cluster.started_ranks == [1]
    assert ray.owning_servers([1, 3]) == [1]
    assert len(connection.servers) == 2
    cluster.started()


def test_rows_do_not_move_while_they_are_saved_and_all_pss_of_the_map_are_known(cluster, monkeypatch):
    ray = persia.cluster.Ray(4)
    connection = SimpleNamespace(reconnect=lambda: None, servers=ReachedServers(None, None, 1.0))
    ray._roles, ray._connections = cluster, [connection]
    ray._nn_workers._roles = cluster
    cluster.running.release()
    cluster.after_adoption = lambda: save()  # Before `scale` has come to it.
    saved, rounds = [], []
    watch = ps_scaling._Watch(cluster, cluster.coordinator, BucketMap.even(4).moved(2), [])
    monkeypatch.setattr(watch, "_begin_rounds", lambda: rounds.append(cluster.resting.locked()))

    def save():
        with ray.keeping_rows():
            watch._make_round()
            saved.append((len(connection.servers), list(rounds), watch._pauses))

    assert scale_servers(cluster, 2, lambda: None)
    assert saved == [(2, [], True)]
    watch._make_round()
    assert rounds == [True]
    begun = threading.Event()

    def save_in_thread():
        with ray.keeping_rows():
            begun.set()

    with cluster.resting:  # As while a round is made.
        thread = threading.Thread(target=save_in_thread)
        thread.start()
        assert not begun.wait(0.2)
    assert begun.wait(10)
    thread.join(10)
    assert (cluster.fits, watch._pauses) == (0, False)


def test_rows_can_be_saved_without_the_coordinator(cluster, monkeypatch):
    ray = persia.cluster.Ray(4)
    ray._roles = cluster

    def late():
        raise DeadlineError("The coordinator is late.", seconds=1.0)

    monkeypatch.setattr(cluster.coordinator, "map_state", late)
    with ray.keeping_rows():
        pass


def test_a_ps_that_has_died_before_it_was_told_that_it_leaves_is_no_failure(cluster):
    cluster.processes.die(cluster, 3)
    cluster.remove_servers(2)
    assert cluster.here == (2, [0, 1])
    cluster.started()


def test_pss_end_though_the_coordinator_does_not_answer_and_leave_later(cluster, monkeypatch):
    def late(*_):
        raise DeadlineError("The coordinator is late.", seconds=1.0)

    with monkeypatch.context() as patch:
        patch.setattr(cluster.coordinator, "depart", late)
        with pytest.raises(DeadlineError, match="The coordinator is late"):
            scale_servers(cluster, 2, lambda: None)
    assert [process.rank for process in cluster.processes.servers] == [0, 1]
    assert cluster.here == (2, [0, 1, 2, 3])
    scale_servers(cluster, 2, lambda: None)
    assert cluster.here == (2, [0, 1])


@pytest.mark.parametrize("count", [2, 4])
def test_pss_without_rows_that_a_failed_call_has_left_and_that_die_are_replaced(cluster, count):
    def fails():
        raise PersiaError("The coordinator is late.")

    with pytest.raises(PersiaError, match="The coordinator is late"):
        scale_servers(cluster, 2, fails)
    assert cluster.here == (4, [0, 1, 2, 3])
    cluster.processes.die(cluster, 3)
    assert scale_servers(cluster, count, lambda: None)
    assert cluster.here == (count, list(range(count)))
    assert cluster.started_ranks == list(range(2, count))


def test_pss_without_rows_that_a_failed_call_has_left_are_watched_as_they_get_rows(cluster):
    def fails():
        raise PersiaError("The coordinator is late.")

    with pytest.raises(PersiaError, match="The coordinator is late"):
        scale_servers(cluster, 2, fails)
    assert scale_servers(cluster, 4, lambda: None)
    assert cluster.watched == [2, 3]
    assert cluster.started_ranks == []


def test_pss_that_could_not_start_have_left(cluster, monkeypatch):
    scale_servers(cluster, 2, lambda: None)

    def fails(*_):
        raise RoleDiedError("embedding PS 3 could not start.", role="embedding_ps", rank=3)

    monkeypatch.setattr(cluster.processes, "await_ready", fails)
    with pytest.raises(RoleDiedError, match="could not start"):
        scale_servers(cluster, 4, lambda: None)
    assert cluster.here == (2, [0, 1])
    assert [process.rank for process in cluster.processes.servers] == [0, 1]
