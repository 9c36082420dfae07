"""What the placer does with Ray's hosts: waits, measures and reserves; without a cluster."""

from __future__ import annotations

import logging
import re
import threading
from typing import NamedTuple

import pytest

pytest.importorskip("ray", reason='Ray is not installed: pip install "persia-recsys[ray]"')

from persia.cluster.ray import placing
from persia.cluster.ray.layout import RayNode
from persia.cluster.ray.options import RayOptions
from persia.cluster.ray.placement import read_place
from persia.cluster.ray.placing import Placer
from persia.cluster.ray.runs import Replacement
from persia.errors import ConfigError, DeadlineError, RoleDiedError, StoreError
from persia.memory import Memory
from support.cluster_samples import eventually

COUNTS = {"embedding_ps": 2, "embedding_worker": 1, "data_loader": 1, "nn_worker": 1}


def node(name, memory=10**9, free=None, labels=None):
    total = {"CPU": 4.0, "memory": memory}
    return RayNode(name, f"10.0.0.{name}", total, {**total, "memory": free or memory}, labels or {})


class Affinity(NamedTuple):
    """As that of Ray, which takes only ids that look like its own."""

    node_id: str
    soft: bool


class Hosts:
    """Living hosts, and the free memory of those that measure it."""

    def __init__(self):
        self.living = [node("a"), node("b")]
        self.memory = dict.fromkeys("abcd", 10**9)
        self.asked = []
        self.reads = 0

    def nodes(self):
        self.reads += 1
        return list(self.living)

    def measure(self, nodes, function, timeout):
        self.asked.append(sorted(nodes))
        if any(one not in self.memory for one in nodes):
            raise DeadlineError(f"No answer within {timeout:g} s")
        return {one: Memory(2 * self.memory[one], self.memory[one], "the size of /dev/shm") for one in nodes}


@pytest.fixture
def hosts(monkeypatch):
    made = Hosts()
    monkeypatch.setattr(placing, "ray_nodes", made.nodes)
    monkeypatch.setattr(placing, "run_on_all", made.measure)
    monkeypatch.setattr(placing, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(placing, "NodeAffinitySchedulingStrategy", Affinity)
    return made


def placer(place, timeout=60.0, **options):
    made = Placer(read_place(place), RayOptions(timeout=timeout, **options))
    made.lay_out(COUNTS)
    return made


def test_what_a_process_reserves(hosts):
    placed = placer({"ps": {"memory": "1GB", "CPU": 1, "resources": {}}, "embedding_worker": {"labels": {}}}, cpus=0.5)
    assert placed.server_nodes(2) == ["a", "b"]
    assert placed.server_memory() == 10**9
    found = placed.actor_options("embedding_ps", 1)
    where = found.pop("scheduling_strategy")
    assert (where.node_id, where.soft) == ("b", False)  # Its rows are there.
    assert found == {"num_cpus": 1, "memory": 10**9}
    found = placed.actor_options("data_loader", 0)
    assert found.pop("scheduling_strategy").soft
    assert found == {"num_cpus": 0.5}


@pytest.mark.parametrize("place", [{}, {"ps": {"CPU": 1}}])
def test_rows_of_a_dead_driver_on_a_host_that_dies_are_named(hosts, place):
    """Anywhere else the PS would start without them."""
    placed = Placer(read_place(place), RayOptions(run="/runs/one"))
    placed.pin({0: "b", 1: "a"})
    placed.lay_out(COUNTS)
    placed.reserve("embedding_ps", range(2))
    assert placed.server_nodes(2) == ["b", "a"]
    assert placed.actor_options("embedding_ps", 0)["scheduling_strategy"].node_id == "b"
    hosts.living.pop()
    with pytest.raises(StoreError, match=r"PS 0 are on Ray node b, .*Start that host again.*remove /runs/one"):
        placed.reserve("embedding_ps", range(2))
    placed.unpin([0])  # Its rows are loaded from a checkpoint.
    placed.reserve("embedding_ps", range(2))


def test_labels_hold_where_ray_restarts_a_process(hosts):
    hosts.living = [node("a"), node("b", labels={"pool": "x"})]
    place = {"embedding_worker": {"labels": {"pool": "x"}}, "nn_worker": {"resources": {"fast": 0.5}, "GPU": 1}}
    for one in hosts.living:
        one.total.update(GPU=1.0, fast=1.0)
    hosts.living = [one._replace(free=one.total) for one in hosts.living]
    placed = placer(place)
    found = placed.actor_options("embedding_worker", 0)
    assert found["scheduling_strategy"].node_id == "b"
    assert found["label_selector"] == {"pool": "x"}
    placed = Placer(read_place(place), RayOptions(gpus=1))
    placed.lay_out(COUNTS)
    found = placed.actor_options("nn_worker", 0)
    assert not found["scheduling_strategy"].soft
    assert (found["num_gpus"], found["resources"]) == (1, {"fast": 0.5})


def test_without_placements_nothing_is_read(hosts):
    placed = Placer({}, RayOptions())
    placed.lay_out(COUNTS)
    placed.reserve("nn_worker", [0])
    placed.release("nn_worker", [0])
    assert placed.server_memory() is None
    assert placed.actor_options("embedding_worker", 0) == {"num_cpus": 0.0}
    assert not hosts.reads


@pytest.mark.parametrize(
    ("place", "addresses", "compression"),
    [
        ({}, ["10.0.0.a", "10.0.0.b"], "fp16"),  # Ray may start the embedding worker on either.
        ({"embedding_worker": {"labels": {"pool": "x"}}}, ["10.0.0.a", "10.0.0.b"], "fp16"),
        ({role: {"labels": {"pool": "x"}} for role in ("embedding_worker", "nn_worker")}, ["10.0.0.b"], "none"),
    ],
)
def test_rows_are_compressed_where_roles_are_on_different_hosts(hosts, place, addresses, compression):
    hosts.living = [node("a"), node("b", labels={"pool": "x"})]
    found = placer(place).row_hosts()
    assert found == addresses
    assert RayOptions().row_compression(len(found) == 1) == compression
    assert RayOptions().feature_pooling(len(found) == 1) == ("auto" if compression == "fp16" else "nn_worker")
    for chosen in ("none", "fp16"):
        assert RayOptions(compression=chosen).row_compression(len(found) == 1) == chosen
    for place in ("nn_worker", "embedding_worker"):
        assert RayOptions(pool_at=place).feature_pooling(len(found) == 1) == place


def test_several_nodes_of_ray_may_be_one_host(hosts):
    hosts.living = [node("a"), node("b")._replace(address="10.0.0.a")]
    assert placer({}).row_hosts() == ["10.0.0.a"]


def test_free_memory_of_regions_is_measured(hosts):
    hosts.living.append(node("c", labels={"pool": "x"}))
    hosts.memory["a"] = 5 * 10**8
    assert placer({"ps": {"memory": "600MB"}}).server_nodes(2) == ["b", "c"]
    assert hosts.asked == [["a", "b", "c"]]
    with pytest.raises(ConfigError, match=r"embedding PS 1 (.|\n)*; too little memory"):
        placer({"ps": {"memory": "600MB", "labels": {"pool": "x"}}})
    assert hosts.asked[-1] == ["c"]
    asked = len(hosts.asked)
    assert placer({"ps": {"memory": "600MB"}}, overcommit=True).server_nodes(2) == ["a", "b"]
    placer({"ps": {}})
    assert len(hosts.asked) == asked


def test_what_cannot_be_had_is_refused_at_once(hosts):
    with pytest.raises(ConfigError, match="embedding PS 0"):
        placer({"ps": {"memory": "2GB"}})
    assert hosts.reads == 1


def test_placing_waits_for_memory_that_a_cluster_just_released(hosts):
    whole, hosts.living = hosts.living, [node(name, free=10**8) for name in "ab"]
    made = []
    thread = threading.Thread(target=lambda: made.append(placer({"ps": {"memory": "800MB"}})))
    thread.start()
    eventually(lambda: hosts.reads > 2, "it polls")
    hosts.living = whole
    thread.join(30)
    assert made[0].server_nodes(2) == ["a", "b"]


def test_memory_that_others_keep_is_refused_after_a_while(hosts, monkeypatch):
    monkeypatch.setattr(placing, "RELEASE_SECONDS", 0.05)
    hosts.living = [node(name, free=10**8) for name in "ab"]
    with pytest.raises(ConfigError, match=r"memory 0\.1 GB of 1 GB"):
        placer({"ps": {"memory": "800MB"}})


def test_a_lost_host_is_waited_for(hosts, caplog):
    placed = placer({"ps": {"memory": "800MB"}})
    hosts.living = [node("a")]
    thread = threading.Thread(target=placed.reserve, args=("embedding_ps", [1]))
    thread.start()
    # Less of the 60 s are left where the first look took long.
    eventually(lambda: re.search(r"Waiting (60|5\d) s for a host", caplog.text) is not None, "it says so")
    assert "10.0.0.a: CPU 4 of 4, memory 0.2 GB of 1 GB" in caplog.text
    hosts.living = [node("a"), node("x")]  # Does not report its memory yet.
    reads = hosts.reads
    eventually(lambda: hosts.reads > reads + 2, "it polls")
    hosts.memory["x"] = 10**9
    thread.join(30)
    assert placed.server_nodes(2) == ["a", "x"]
    assert caplog.text.count("Waiting") == 1


def test_a_lost_host_that_does_not_come_back_is_an_error(hosts):
    placed = placer({"ps": {"memory": "800MB"}}, timeout=0.05)
    hosts.living = [node("a")]
    with pytest.raises(ConfigError, match=r"embedding PS 1 \(of 2\) cannot be placed"):
        placed.reserve("embedding_ps", [1])


def test_more_processes_are_refused_at_once(hosts):
    placed = placer({"embedding_worker": {"CPU": 3}})
    placed.reserve("embedding_worker", [1])
    reads = hosts.reads
    with pytest.raises(ConfigError, match="embedding worker 2"):
        placed.reserve("embedding_worker", [2])
    assert hosts.reads == reads + 2
    placed.release("embedding_worker", [1])
    placed.reserve("embedding_worker", [2])


def test_the_others_do_not_wait_for_an_nn_worker_without_a_host(caplog):
    """In an asynchronous mode: the phase ends, and the next attempt waits."""

    class Tokens:
        def cancel(self, generation, rank):
            return True

    def start(rank):
        raise ConfigError(f"NN worker {rank} cannot be placed")

    replacement = Replacement(None, Tokens(), 1, start, 1.0)
    death = RoleDiedError("it has died", role="nn_worker", rank=1)
    with caplog.at_level(logging.WARNING, "persia"):
        assert not replacement.replace(death)
    assert "The others cannot continue without it: NN worker 1 cannot be placed" in caplog.text
    assert not replacement.deaths
