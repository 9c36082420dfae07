"""What the next driver finds on the hosts of Ray, without processes: rows, missing rows, roles that still run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import persia
from persia.errors import ConfigError, DeadlineError, PersiaError, StoreError
from persia.modes import Sync, encode

pytest.importorskip("ray", reason='Ray is not installed: pip install "persia-recsys[ray]"')

from persia.cluster.ray import attachment, cluster, driver_folder, ps_scaling, server_host
from persia.cluster.ray import roles as roles_module
from persia.cluster.ray.attachment import RunAttachment, _Left
from persia.cluster.ray.options import RayOptions
from persia.cluster.ray.process_plan import Plan, ProcessInfo, ServerSeat, Service
from persia.ps.ownership import Ownership
from persia.ps.regions import MANIFEST, OWNERSHIP, Regions
from persia.ps.shares import Shares
from persia.types import BucketMap

SERVICE = Service(persia.Schema([persia.IdFeature("id", 4)]), persia.optim.Adagrad(lr=0.05), encode(Sync()), 7)
PLAN = Plan("persia-0123abcd", 2, 1, RayOptions(), True, None, [], [])
MAP = BucketMap.even(2)
SHARES = [Shares({"id": 10}, {}), Shares({"id": 20}, {"id": 3})]


def place(node: str) -> ProcessInfo:
    return ProcessInfo(1, f"10.0.0.{node}", node, [], 1, "")


class Hosts:
    """Hosts of Ray; `has` is what they have, by node, and `silent` the number of the next calls that fail."""

    def __init__(self) -> None:
        self.has: dict[str, _Left] = {}
        self.removed: list[str] = []
        self.silent = 0

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": node, "Alive": True} for node in self.has]

    def on_all(self, nodes: Any, function: Any, timeout: float) -> dict[str, Any]:
        if self.silent:
            self.silent -= 1
            raise PersiaError("no answer")
        if function.func is attachment._left_here:
            return {node: self.has[node] for node in nodes}
        self.removed.append(function.args[1])
        return {}


@pytest.fixture
def hosts(monkeypatch):
    found = Hosts()
    monkeypatch.setattr(attachment.ray, "nodes", found.nodes)
    monkeypatch.setattr(attachment, "run_on_all", found.on_all)
    return found


def a_run(tmp_path, servers=2, **changes):
    return RunAttachment(RayOptions(run=str(tmp_path / "run"), **{"timeout": 0.01, **changes}), servers)


def left_behind(tmp_path, keeps=True, losses=()):
    """What a driver leaves that dies, with PSs on nodes "1" and "2"."""
    run = a_run(tmp_path)
    assert run.attach(PLAN) == PLAN
    run.placed(SERVICE, SHARES, [place("1"), place("2")], dict(losses), MAP)
    run.began(5)
    if keeps:
        run.keep([b"state"])
    run.close()


def test_the_next_driver_attaches_where_the_rows_are(tmp_path, hosts):
    left_behind(tmp_path, losses={1: 3})
    hosts.has = {"0": _Left(["ps-1.3"], []), "1": _Left(["ps-0", "ps-1.3"], []), "2": _Left(["ps-1"], [])}
    run = a_run(tmp_path)
    plan = run.attach(PLAN._replace(name="persia-ffffffff"))
    assert (plan.name, plan.incarnation, plan.generation) == ("persia-0123abcd", 2, 5)
    assert run.nodes == {0: "1", 1: "1"}  # Ray has started again on the second host, which is now two nodes.
    assert run.losses == {0: 0, 1: 3}
    assert run.shares == SHARES
    assert bytes(run.left) == b"state"
    run.check(SERVICE)
    run.check(SERVICE._replace(mode=encode(persia.modes.Hybrid(2))))
    for changes, what in (
        ({"schema": persia.Schema([persia.IdFeature("id", 8)])}, "schema"),
        ({"optimizer": persia.optim.SGD(lr=0.05), "seed": 8}, "embedding optimizer and seed"),
    ):
        with pytest.raises(ConfigError, match=f"another {what} than this program"):
            run.check(SERVICE._replace(**changes))
    assert not run.taken
    run.keep([b"later"])
    assert run.taken
    assert hosts.removed == []


def test_a_run_without_a_recovery_point_starts_over(tmp_path, hosts):
    left_behind(tmp_path, keeps=False)
    hosts.has = {"1": _Left(["ps-0"], [])}
    run = a_run(tmp_path)
    plan = run.attach(PLAN._replace(name="persia-ffffffff"))
    assert (plan.name, plan.incarnation) == ("persia-ffffffff", 1)
    assert (run.nodes, run.shares, run.left) == ({}, [], None)
    assert run.taken
    assert hosts.removed == ["persia-0123abcd/*"]


def test_rows_that_are_missing_are_waited_for_and_named(tmp_path, hosts, caplog):
    left_behind(tmp_path)
    hosts.has = {"1": _Left(["ps-0"], [])}
    run = a_run(tmp_path)
    with pytest.raises(StoreError, match=r"has the rows of embedding PS 1 \(it was on 10\.0\.0\.2\)\. Start that host"):
        run.attach(PLAN)
    assert "Waiting" in caplog.text
    assert not run.taken
    hosts.has["2"] = _Left(["ps-1"], [])
    assert run.attach(PLAN).incarnation == 2  # Again, after a failure.


def test_roles_that_still_run_are_waited_for_and_named(tmp_path, hosts):
    left_behind(tmp_path)
    hosts.has = {"1": _Left(["ps-0", "ps-1"], ["/dev/shm/persia-0123abcd/ps-1"])}
    with pytest.raises(DeadlineError, match=r"still have /dev/shm/persia-0123abcd/ps-1 open after 0\.01 s"):
        a_run(tmp_path).attach(PLAN)


def test_a_ps_that_replaces_a_lost_one_is_noted_with_the_next_recovery_point(tmp_path, hosts):
    """Before, its rows may not be there yet: a driver that attached to it would lose them without a word."""
    left_behind(tmp_path)
    hosts.has = {"1": _Left(["ps-0", "ps-1"], [])}
    run = a_run(tmp_path)
    run.attach(PLAN)
    run.placed(SERVICE, SHARES, [place("1"), place("1")], {1: 1}, MAP)
    run.placed(SERVICE, SHARES, [place("1"), place("1")], {1: 1}, MAP, now=True)  # Nor before rows move.
    run.close()
    run = a_run(tmp_path)
    run.attach(PLAN)
    assert run.losses == {0: 0, 1: 0}
    run.placed(SERVICE, SHARES, [place("1"), place("1")], {1: 1}, MAP)
    run.keep([b"state"])
    run.close()
    hosts.has = {"1": _Left(["ps-0", "ps-1.1"], [])}
    run = a_run(tmp_path)
    run.attach(PLAN)
    assert run.losses == {0: 0, 1: 1}


def test_a_run_that_was_scaled_goes_on_with_its_servers(tmp_path, hosts):
    """A PS that joins is noted before rows move to it, and one that leaves is forgotten before it ends."""
    left_behind(tmp_path)
    hosts.has = {"1": _Left(["ps-0", "ps-1", "ps-2"], [])}
    run = a_run(tmp_path)
    assert run.attach(PLAN)[1:2] == (2,)
    run.placed(
        SERVICE, SHARES, [place("1")] * 2, {}, MAP
    )  # It waits for the next recovery point; the next one does not.
    run.placed(SERVICE, [*SHARES, Shares({}, {})], [place("1")] * 3, {}, MAP, now=True)
    run.close()
    run = a_run(tmp_path)
    plan = run.attach(PLAN)
    assert (plan.servers, plan.buckets, run.nodes) == (3, MAP, dict.fromkeys(range(3), "1"))
    assert run.shares == [*SHARES, Shares({}, {})]
    run.placed(SERVICE, SHARES, [place("1")] * 2, {}, MAP.moved(3).moved(2), now=True)
    run.close()
    hosts.has = {"1": _Left(["ps-0", "ps-1"], [])}
    plan = a_run(tmp_path).attach(PLAN)
    assert (plan.servers, plan.buckets.version) == (2, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"servers": 3}, "ps = 3 instead of 2"), ({"regions": "/tmp"}, "regions = '/tmp' instead of '/dev/shm'")],
)
def test_another_program_is_refused(tmp_path, hosts, changes, message):
    left_behind(tmp_path)
    run = a_run(tmp_path, **changes)
    with pytest.raises(ConfigError, match=message):
        run.attach(PLAN)


def test_a_run_without_a_recovery_point_takes_other_options(tmp_path, hosts):
    left_behind(tmp_path, keeps=False)
    hosts.has = {"1": _Left([], [])}
    assert a_run(tmp_path, servers=3).attach(PLAN) == PLAN


def test_the_newest_map_of_the_servers_is_that_of_the_run(tmp_path, hosts):
    """The coordinator's file may be lost with the host of the dead driver."""
    left_behind(tmp_path)
    later = MAP.emptied([1])
    maps = {"ps-0": later, "ps-1": MAP, "ps-9": later.moved(2)}
    hosts.has = {"1": _Left(["ps-0", "ps-1", "ps-9"], [], maps)}
    assert a_run(tmp_path).attach(PLAN).buckets == later


def test_maps_are_read_from_regions(tmp_path):
    for rank in range(3):
        directory = tmp_path / "persia-0123abcd" / f"ps-{rank}"
        directory.mkdir(parents=True)
        (directory / MANIFEST).touch()
    Regions(str(tmp_path / "persia-0123abcd" / "ps-1")).remember_ownership(Ownership(MAP.emptied([1])))
    (tmp_path / "persia-0123abcd" / "ps-2" / OWNERSHIP).write_text("{")
    left = attachment._left_here(str(tmp_path), "persia-0123abcd")
    assert sorted(left.complete) == ["ps-0", "ps-1", "ps-2"]
    assert left.maps == {"ps-1": MAP.emptied([1])}


def test_a_host_that_does_not_answer_is_asked_again(tmp_path, hosts):
    left_behind(tmp_path)
    hosts.has = {"1": _Left(["ps-0", "ps-1"], [])}
    hosts.silent = 1
    run = a_run(tmp_path, timeout=60.0)
    assert run.attach(PLAN).incarnation == 2
    run.close()
    hosts.silent = 2**20
    run = a_run(tmp_path)
    with pytest.raises(PersiaError, match="no answer"):
        run.attach(PLAN)


@pytest.mark.parametrize("call", [lambda run: run.keep([b"later"]), lambda run: run.began(9)])
def test_a_write_that_fails_leaves_the_run(tmp_path, hosts, monkeypatch, call):
    run = a_run(tmp_path)
    run.attach(PLAN)
    monkeypatch.setattr(driver_folder.os, "fsync", refused)
    with pytest.raises(PersiaError, match="cannot be written"):
        call(run)
    assert run.taken  # There is nothing from which another driver could go on.
    monkeypatch.undo()
    run.keep([b"state"])
    monkeypatch.setattr(driver_folder.os, "fsync", refused)
    with pytest.raises(PersiaError, match="cannot be written"):
        call(run)
    assert not run.taken
    monkeypatch.undo()
    run.keep([b"state"])
    assert run.taken


def refused(file: int) -> None:
    raise OSError(30, "Read-only file system")


def test_hosts_that_do_not_answer_do_not_hold_back_the_end(tmp_path, hosts, caplog):
    run = a_run(tmp_path)
    run.attach(PLAN)
    hosts.silent = 1
    run.remove_regions()
    assert "Remove /dev/shm/persia-0123abcd there with `persia cluster regions --clean`" in caplog.text
    run.end()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("losses", [0, 1])
def test_a_ps_whose_rows_are_gone_does_not_start_without_them(tmp_path, monkeypatch, losses):
    monkeypatch.setattr(server_host.Host, "__init__", lambda self, plan, rank: vars(self).update(plan=plan, rank=rank))
    monkeypatch.setattr(server_host.EmbeddingServerHost, "_predecessor", lambda self: ("", True, MAP))
    plan = PLAN._replace(options=RayOptions(regions=str(tmp_path)))
    with pytest.raises(StoreError, match="PS 1 died with its driver, and its rows are not on this host"):
        server_host.EmbeddingServerHost(plan, 1, SERVICE, SHARES[1], losses, ServerSeat(1, 0, attaches=True))


def test_the_generation_of_a_move_between_two_runs_is_stored(monkeypatch):
    """Else PSs would refuse the rounds of the next driver, if the coordinator's file is lost with this one's host."""
    began = []
    coordinator = SimpleNamespace(regenerate=lambda nn_workers: 6)
    roles = SimpleNamespace(
        started=lambda: (None, PLAN, coordinator),
        counts={"nn_worker": 1},
        attachment=SimpleNamespace(began=began.append),
    )

    def connect(*arguments, **settings):
        assert began == [settings["generation"]] == [6]
        raise PersiaError("far enough")

    monkeypatch.setattr(ps_scaling, "WorkerConnection", connect)
    with pytest.raises(PersiaError, match="far enough"):
        ps_scaling._Watch(roles, None, MAP, [])._begin_rounds()


def test_servers_are_noted_by_rank_and_only_together(monkeypatch):
    noted = []
    processes = [SimpleNamespace(rank=rank, info=info) for rank, info in ((0, place("1")), (1, None), (2, place("3")))]
    roles = SimpleNamespace(
        attachment=SimpleNamespace(placed=lambda *arguments: noted.append(arguments[2])),
        service=SERVICE,
        started=lambda check: (SimpleNamespace(of=lambda role: processes), PLAN, None),
        counts={"embedding_ps": 3},
        _capacities=SHARES,
        _losses={},
    )
    maps = SimpleNamespace(map_state=lambda: SimpleNamespace(buckets=MAP))
    monkeypatch.setattr(roles_module.rpc, "cast_to", lambda protocol, stub: maps)
    roles_module.Roles.note_servers(roles)
    assert noted == []
    roles_module.Roles.note_servers(roles, 1)
    processes[1].info = place("2")
    roles_module.Roles.note_servers(roles)
    assert noted == [[place("1")], [place("1"), place("2"), place("3")]]


class Reader:
    """A connection of the driver to `count` PSs."""

    def __init__(self, count):
        self.servers = self
        self.count = count

    def __len__(self):
        return self.count

    def resize(self, count):
        self.count = count

    def reconnect(self):
        pass


@pytest.mark.parametrize("servers", [1, 3])
def test_the_driver_follows_a_move_that_one_before_had_ordered(tmp_path, monkeypatch, servers):
    driver = persia.cluster.Ray(ps=2, options=RayOptions(run=str(tmp_path / "run")))
    noted = []
    driver._connections.append(Reader(2))
    monkeypatch.setattr(driver._roles, "note_servers", lambda now: noted.append(now))
    monkeypatch.setattr(cluster, "bucket_map", lambda _: MAP)
    driver._follow_earlier_order()
    assert noted == []
    monkeypatch.setattr(cluster, "bucket_map", lambda _: MAP.moved(servers))
    with driver._roles.moving:
        driver._follow_earlier_order()
    assert noted == []
    driver._follow_earlier_order()
    assert (noted, len(driver._connections[0])) == ([True], servers)
    driver._follow_earlier_order()
    assert noted == [True]
    driver._connections.clear()
    driver.close()


def test_a_run_that_ends_leaves_nothing(tmp_path, hosts):
    left_behind(tmp_path)
    hosts.has = {"1": _Left(["ps-0", "ps-1"], [])}
    run = a_run(tmp_path)
    run.attach(PLAN)
    run.take()
    run.forget()
    run.remove_regions()
    run.end()
    assert hosts.removed == ["persia-0123abcd/*"]
    assert not (tmp_path / "run").exists()


def test_options_of_a_run():
    with pytest.raises(ConfigError, match="it needs regions"):
        RayOptions(run="/runs/one", regions="")
    with pytest.raises(ConfigError, match="it needs the path"):
        RayOptions(run="")
