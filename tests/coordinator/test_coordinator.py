"""The coordinator, in this process and over rpc."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from persia import rpc, services
from persia.coordinator import CoordinatorServer
from persia.errors import ConfigError, PersiaError
from persia.types import Member

DEADLINE = 20.0


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture(params=["here", "rpc"])
def coordinator(request, clock):
    role = CoordinatorServer(clock)
    if request.param == "here":
        yield role
        return
    with rpc.serve(role, protocol=services.Coordinator) as server:
        stub = rpc.connect(server.address, services.Coordinator, timeout=DEADLINE)
        yield stub
        rpc.close(stub)


def test_a_new_process_of_a_rank_has_the_next_incarnation(coordinator):
    first = coordinator.join("embedding_worker", 1, "tcp://127.0.0.1:1")
    assert first == Member("embedding_worker", 1, 1, "tcp://127.0.0.1:1")
    version = coordinator.membership().version
    assert coordinator.join("embedding_worker", 1, "tcp://127.0.0.1:1") == first  # A repetition.
    assert coordinator.membership().version == version
    second = coordinator.join("embedding_worker", 1, "tcp://127.0.0.1:2")
    assert second.incarnation == 2
    coordinator.depart("embedding_worker", 1, 1, "too late to matter")
    assert coordinator.membership().members == [second]
    coordinator.depart("embedding_worker", 1, 2, "killed")
    assert coordinator.membership().members == [second._replace(state="dead", reason="killed")]
    # Even at the same address it is another one: the one before has departed.
    assert coordinator.join("embedding_worker", 1, "tcp://127.0.0.1:2").incarnation == 3


def test_nn_workers_are_of_a_generation(coordinator):
    with pytest.raises(ConfigError, match="regenerate"):
        coordinator.join("nn_worker", 0, "")
    assert coordinator.regenerate(2) == 1
    members = [coordinator.join("nn_worker", rank, "") for rank in (0, 1)]
    assert [m.incarnation for m in members] == [1, 1]
    with pytest.raises(ConfigError, match="Invalid NN worker 2: generation 1 has 2"):
        coordinator.join("nn_worker", 2, "")
    assert coordinator.regenerate(1) == 2
    found = coordinator.membership()
    assert found.generation == 2
    assert {m.state for m in found.members} == {"dead"}
    assert coordinator.join("nn_worker", 0, "").incarnation == 2
    assert [m.state for m in coordinator.membership().members] == ["alive", "dead"]


def test_membership_waits_for_a_change(coordinator):
    version = coordinator.membership().version
    assert coordinator.membership(version, timeout=0.01).version == version
    with ThreadPoolExecutor(2) as threads:
        started = threading.Barrier(3, timeout=DEADLINE)

        def wait():
            started.wait()
            return coordinator.membership(version, DEADLINE / 2)

        waiting = [threads.submit(wait) for _ in range(2)]
        started.wait()
        coordinator.join("data_loader", 0, "tcp://127.0.0.1:1")
        for call in waiting:
            found = call.result(DEADLINE)
            assert found.version > version
            assert [m.role for m in found.members] == ["data_loader"]


def test_members_are_sorted_by_role_and_rank(coordinator):
    for role, rank in (("data_loader", 0), ("embedding_ps", 1), ("embedding_worker", 0), ("embedding_ps", 0)):
        coordinator.join(role, rank, f"tcp://127.0.0.1:{rank + 1}")
    found = coordinator.membership().members
    assert [(m.role, m.rank) for m in found] == [
        ("embedding_ps", 0), ("embedding_ps", 1), ("embedding_worker", 0), ("data_loader", 0),
    ]  # fmt: skip


def test_who_leaves_is_leaving_until_it_departs(coordinator):
    member = coordinator.join("embedding_worker", 0, "tcp://127.0.0.1:1")
    for _ in range(2):
        coordinator.retire("embedding_worker", 0)
        assert coordinator.membership().members == [member._replace(state="leaving")]
    coordinator.depart("embedding_worker", 0, 1)
    coordinator.retire("embedding_worker", 0)
    assert coordinator.membership().members == [member._replace(state="dead")]
    with pytest.raises(ConfigError, match="can leave"):
        coordinator.retire("embedding_ps", 0)
    with pytest.raises(ConfigError, match="data_loader 3 cannot be retired"):
        coordinator.retire("data_loader", 3)


def test_reports_have_an_age(coordinator, clock):
    coordinator.join("data_loader", 0, "tcp://127.0.0.1:1")
    clock.now += 2
    assert coordinator.statistics() == {"data_loader-0": {"age": 2.0}}
    coordinator.report("data_loader", 0, {"rows": 7.0})
    clock.now += 1.5
    assert coordinator.statistics() == {"data_loader-0": {"rows": 7.0, "age": 1.5}}
    with pytest.raises(ConfigError, match="must join before it reports"):
        coordinator.report("data_loader", 1, {})


def test_roles_are_checked(coordinator):
    with pytest.raises(ConfigError, match="Invalid role 'driver'; expected one of: embedding_ps"):
        coordinator.join("driver", 0, "")
    with pytest.raises(ConfigError, match="nn_workers = 0"):
        coordinator.regenerate(0)


def test_its_state_survives_a_restart(tmp_path):
    path = str(tmp_path / "members")
    first = CoordinatorServer(path=path)
    first.regenerate(2)
    first.join("nn_worker", 1, "")
    first.join("data_loader", 0, "tcp://a:1")
    first.depart("data_loader", 0, 1, "killed")
    second = CoordinatorServer(path=path)
    assert second.membership() == first.membership()
    assert second.join("data_loader", 0, "tcp://a:2").incarnation == 2
    assert second.regenerate(2) == 2
    (tmp_path / "members").write_bytes(b"nonsense")
    with pytest.raises(PersiaError, match="not the state of a coordinator"):
        CoordinatorServer(path=path)


def test_a_coordinator_of_another_driver_knows_nobody_any_more(tmp_path):
    path = str(tmp_path / "members")
    first = CoordinatorServer(path=path)
    first.regenerate(2)
    first.join("embedding_ps", 0, "tcp://127.0.0.1:1")
    first.join("embedding_worker", 0, "tcp://127.0.0.1:2")
    first.depart("embedding_worker", 0, 1, "killed")
    first.join("embedding_worker", 1, "tcp://127.0.0.1:3")
    first.depart("embedding_worker", 1, 1)
    assert first.begins
    again = CoordinatorServer(path=path)  # Restarted: its driver is the same.
    assert not again.begins
    assert again.membership().members == first.membership().members
    later = CoordinatorServer(path=path, incarnation=2, generation=1)
    assert later.begins
    assert later.membership().version > again.membership().version
    members = later.membership().members
    assert [(m.state, m.address, m.reason) for m in members] == [
        ("dead", "", "its driver died"),
        ("dead", "", "killed"),
        ("dead", "", ""),  # It had left.
    ]
    assert later.join("embedding_ps", 0, "tcp://127.0.0.1:1").incarnation == 2
    restarted = CoordinatorServer(path=path, incarnation=2, generation=1)
    assert [m.state for m in restarted.membership().members] == ["alive", "dead", "dead"]
    assert restarted.regenerate(2) == 2
    assert CoordinatorServer(path=str(tmp_path / "lost"), incarnation=3, generation=9).regenerate(1) == 10
