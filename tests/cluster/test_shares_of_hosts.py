"""Shares of a capacity in a cluster, by the memory of the hosts; without a cluster."""

from __future__ import annotations

import pytest

pytest.importorskip("ray", reason='Ray is not installed: pip install "persia[ray]"')

from ray.exceptions import RayError

from persia.cluster.ray import capacities
from persia.cluster.ray.options import RayOptions
from persia.cluster.ray.plan import Service
from persia.errors import ConfigError
from persia.ps.memory import Memory
from persia.schema import SGD, IdFeature, Schema, Table


def service(capacity):
    return Service(Schema([IdFeature("item", dim=15)], tables=[Table("item", 15, capacity=capacity)]), SGD(0.1), "", 0)


@pytest.fixture
def hosts(monkeypatch):
    """Three hosts, of 1 GB, 2 GB and one that does not answer; five PSs on them, in turn."""

    def measured(node, function):
        if node == "c":
            raise RayError("it is gone")
        return Memory({"a": 10**9, "b": 2 * 10**9}[node], 10**9, "the memory of the host")

    monkeypatch.setattr(capacities, "node_of", lambda rank: "abc"[rank % 3])
    monkeypatch.setattr(capacities, "neighbours", lambda rank, count: len(range(rank % 3, count, 3)))
    monkeypatch.setattr(capacities, "run_on", measured)


def test_a_host_of_two_ps_with_little_memory_keeps_less(hosts, caplog):
    """A row has 100 bytes; PSs 0 and 3 have half of 1 GB each, PSs 1 and 4 half of 2 GB."""
    shares = capacities.server_capacities(service(40_000_000), 5, RayOptions())
    assert [share["item"] for share in shares] == [5_000_000, 10_000_000, 10_000_000, 5_000_000, 10_000_000]
    assert "not checked against the memory of node c, which does not answer: it is gone" in caplog.text
    equal = capacities.server_capacities(service(20_000_001), 5, RayOptions())
    assert [share["item"] for share in equal] == [4_000_001, 4_000_000, 4_000_000, 4_000_000, 4_000_000]


def test_a_host_without_an_answer_is_not_a_reason_to_refuse(hosts):
    shares = capacities.server_capacities(service(10**10), 5, RayOptions())
    assert shares[2]["item"] == 10**10 - 30_000_000
    with pytest.raises(ConfigError, match=r"the 2 embedding PSs together have 2\.8 GiB"):
        capacities.server_capacities(service(10**10), 2, RayOptions())


def test_overcommit_divides_equally(hosts):
    assert capacities.server_capacities(service(10**10), 2, RayOptions(overcommit=True)) == [{"item": 5 * 10**9}] * 2


def test_hosts_are_not_asked_without_a_declared_capacity(hosts, monkeypatch):
    monkeypatch.setattr(capacities, "run_on", None)
    assert capacities.server_capacities(service(None), 2, RayOptions()) == [{}, {}]
