"""What the processes of a cluster are told when they start."""

from __future__ import annotations

from typing import Any, NamedTuple

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from persia.cluster.ray.options import RayOptions
from persia.schema import EmbeddingOptimizer, Schema

__all__ = ["TITLES", "LoaderData", "Plan", "ProcessInfo", "Service", "here", "neighbours", "place"]

TITLES = {
    "coordinator": "coordinator",
    "embedding_ps": "embedding PS",
    "dense_ps": "dense PS",
    "embedding_worker": "embedding worker",
    "data_loader": "data loader",
    "nn_worker": "NN worker",
}
"""The roles as people read them."""


class Service(NamedTuple):
    """What the PSs and embedding workers of a cluster serve: the arguments of `Cluster.connect`."""

    schema: Schema
    optimizer: EmbeddingOptimizer
    mode: str
    """As text: a process that starts finds the class of a user's mode only once it has the driver's path."""
    seed: int


class Plan(NamedTuple):
    """What all processes of a cluster have in common.

    Attributes:
        name: of the cluster, unique.
        servers: how many PSs there are.
        nn_workers: how many NN workers.
        options: of the user.
        loopback: whether all processes are on one host, so that nobody else need reach them.
        keys: file with the CURVE keys, or None.
        path: where the driver finds modules; Ray passes on only the folder of its script.
        modules: the modules of the user's modes; every process imports them.
        coordinator: where it listens; empty for itself.
    """

    name: str
    servers: int
    nn_workers: int
    options: RayOptions
    loopback: bool
    keys: str | None
    path: list[str]
    modules: list[str]
    coordinator: str = ""


class LoaderData(NamedTuple):
    """What the data loaders read.

    Attributes:
        name: unique.
        pickled: reference of Ray to the source, pickled.
        accumulation_steps: so many batches of an NN worker lie on one embedding worker.
    """

    name: str
    pickled: Any
    accumulation_steps: int


class ProcessInfo(NamedTuple):
    """Where a process is, as it says itself.

    Attributes:
        pid: of its process.
        host: address of its node.
        node: id of its node.
        logs: files that its output goes to, on its node.
        incarnation: number of this process among those of its role and rank.
        address: where it listens; empty if nowhere.
    """

    pid: int
    host: str
    node: str
    logs: list[str]
    incarnation: int
    address: str


def here() -> Any:
    """On the host of this process."""
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def place(rank: int, reserves: bool) -> Any:
    """Where the process of a rank goes: one host after another, as each is to have its share of memory and network.

    Hosts without CPUs, such as a head that is only to manage, get none, unless there are no others.

    Args:
        rank: of the process.
        reserves: whether it reserves resources. If so, and the host has too little left, it goes to another one. If
            not, Ray must be told strictly: what reserves nothing it puts anywhere, whatever it is asked for.
    """
    nodes = _nodes()
    return NodeAffinitySchedulingStrategy(nodes[rank % len(nodes)], soft=reserves)


def neighbours(rank: int, count: int) -> int:
    """How many of `count` processes have the same place as that of a rank, which is one of them."""
    hosts = len(_nodes())
    return len(range(rank % hosts, count, hosts))


def _nodes() -> list[str]:
    nodes = sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: node["NodeID"])
    nodes = [node for node in nodes if node["Resources"].get("CPU")] or nodes
    return [node["NodeID"] for node in nodes]
