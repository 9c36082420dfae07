"""Shares of a capacity in a cluster, by the memory of the hosts; without a cluster."""

from __future__ import annotations

import pytest

pytest.importorskip("ray", reason='Ray is not installed: pip install "persia-recsys[ray]"')

from ray.exceptions import RayError

from persia.cluster.ray import capacities, placing, processes
from persia.cluster.ray.cluster import Ray
from persia.cluster.ray.options import RayOptions
from persia.cluster.ray.process_plan import Service
from persia.cluster.ray.roles import Roles
from persia.errors import ConfigError, DeadlineError, PersiaError
from persia.memory import Memory
from persia.modes import Sync
from persia.ps.shares import Shares
from persia.schema import SGD, IdFeature, Schema, Table


def service(capacity):
    return Service(Schema([IdFeature("item", dim=16)], tables=[Table("item", 16, capacity=capacity)]), SGD(0.1), "", 0)


class Hosts:
    """Hosts of 1 GB, 2 GB and 2 GB; those in `silent` do not answer, those in `gone` do not exist."""

    def __init__(self):
        self.silent, self.gone, self.asked, self.waits = set(), set(), [], []

    def ask(self, node, function):
        self.asked.append(node)
        return node

    def wait(self, calls, num_returns, timeout):
        assert num_returns == len(calls)
        assert sorted(self.asked[-len(calls) :]) == sorted(calls)  # All are asked before the wait.
        self.waits.append(timeout)
        return [c for c in calls if c not in self.silent], [c for c in calls if c in self.silent]

    def get(self, call, timeout):
        if call in self.gone:
            raise RayError("it is gone")
        return Memory({"a": 10**9, "b": 2 * 10**9, "c": 2 * 10**9}[call], 10**9, "the memory of the host")


@pytest.fixture
def hosts(monkeypatch):
    """Three hosts."""
    made = Hosts()
    monkeypatch.setattr(processes, "_task_on", made.ask)
    monkeypatch.setattr(processes, "own_node", lambda: "driver")
    monkeypatch.setattr(processes.ray, "wait", made.wait)
    monkeypatch.setattr(processes.ray, "get", made.get)
    return made


def test_a_host_of_two_ps_with_little_memory_keeps_less(hosts, caplog):
    """A row has 100 bytes; PSs 0 and 3 have half of 1 GB each, PSs 1 and 4 half of 2 GB, PS 2 2 GB."""
    shares = capacities.server_capacities(service(20_000_001), "abcab", RayOptions())
    assert [share.capacities["item"] for share in shares] == [4_000_001, 4_000_000, 4_000_000, 4_000_000, 4_000_000]
    assert "equal share" not in caplog.text
    shares = capacities.server_capacities(service(40_000_000), "abcab", RayOptions())
    assert [share.capacities["item"] for share in shares] == [5_000_000, 10_000_000, 10_000_000, 5_000_000, 10_000_000]
    assert "PS 0 has 476.8 MiB (the memory of the host) and keeps 62.5 % of one; PS 3 has" in caplog.text
    assert "lower `capacity` to 62.500 % of what is declared" in caplog.text


def test_all_hosts_are_asked_concurrently_with_the_timeout(hosts):
    capacities.server_capacities(service(10_000), "abcab", RayOptions(timeout=77.0))
    assert sorted(hosts.asked) == ["a", "b", "c"]
    assert hosts.waits == [77.0]


def test_a_host_without_an_answer_is_an_error_that_names_it(hosts):
    hosts.silent.add("c")
    with pytest.raises(DeadlineError, match=r"No answer within 5 s from the hosts of these Ray nodes: c\."):
        capacities.server_capacities(service(10**10), "abcab", RayOptions(timeout=5.0))
    # It has no PS.
    assert capacities.server_capacities(service(10_000), "ab", RayOptions()) == [Shares({"item": 5_000}, {})] * 2


def test_a_host_that_is_gone_is_an_error_that_names_it(hosts):
    hosts.gone.add("b")
    with pytest.raises(PersiaError, match="The host of Ray node b does not respond: it is gone"):
        capacities.server_capacities(service(10_000), "abcab", RayOptions())


def test_what_the_hosts_have_no_memory_for_is_refused(hosts):
    with pytest.raises(ConfigError, match=r"the 2 embedding PSs together have 2\.8 GiB"):
        capacities.server_capacities(service(10**10), "ab", RayOptions())


def test_a_ps_keeps_no_more_than_it_reserves(hosts, caplog):
    """Rows have 100 bytes. PS 2 is alone on a host of 2 GB."""
    shares = capacities.server_capacities(service(18_000_000), "abcab", RayOptions(), reserved=4 * 10**8)
    assert [share.capacities["item"] for share in shares] == [3_600_000] * 5
    with pytest.raises(ConfigError, match=r"have 1\.9 GiB \(`memory` of place\['ps'\]\)"):
        capacities.server_capacities(service(20_000_001), "abcab", RayOptions(), reserved=4 * 10**8)
    shares = capacities.server_capacities(service(37_000_000), "abcab", RayOptions(), reserved=9 * 10**8)
    assert [share.capacities["item"] for share in shares] == [5_000_000, 9_000_000, 9_000_000, 5_000_000, 9_000_000]
    assert "PS 0 has 476.8 MiB (the memory of the host)" in caplog.text  # Less than it reserves.


def test_overcommit_divides_equally(hosts):
    hosts.silent.add("a")
    shares = capacities.server_capacities(service(10**10), "ab", RayOptions(overcommit=True))
    assert shares == [Shares({"item": 5 * 10**9}, {})] * 2
    assert not hosts.asked


def test_hosts_are_not_asked_without_a_declared_capacity(hosts):
    assert capacities.server_capacities(service(None), "ab", RayOptions()) == [Shares({}, {})] * 2
    assert not hosts.asked


def test_no_role_starts_if_tables_do_not_fit(hosts, monkeypatch):
    """Only the coordinator runs by then."""
    monkeypatch.setattr(Roles, "started", lambda self, check=True: (None, None, None))
    for name in ("start_nn_workers", "serve"):
        monkeypatch.setattr(Roles, name, lambda *_, name=name: pytest.fail(name))
    monkeypatch.setattr(placing, "node_of", lambda rank: "abc"[rank % 3])
    with pytest.raises(ConfigError, match="The declared capacity of the tables needs"):
        Ray(ps=2).connect(service(10**10).schema, SGD(0.1), Sync(), 0)


def test_hosts_are_asked_how_many_rows_their_memory_holds(hosts):
    table = Table("item", 16, capacity=10**9, spill="/ssd")  # 12 bytes of index for each row.
    schema = Schema([IdFeature("item", dim=16)], tables=[table])
    (one, two) = capacities.server_capacities(Service(schema, SGD(0.1), "", 0), "ab", RayOptions(overcommit=True))
    assert one.capacities == two.capacities == {"item": 5 * 10**8}
    assert hosts.asked
