"""The records that the processes of a cluster start with, and their placement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from persia.cluster.ray.options import RayOptions
from persia.schema import EmbeddingOptimizer, Schema

__all__ = ["Plan", "ProcessInfo", "ServerSeat", "Service", "here", "node_of", "place", "seat_of"]


class Service(NamedTuple):
    """The arguments of `Cluster.connect`, for the PSs and embedding workers of a cluster."""

    schema: Schema
    optimizer: EmbeddingOptimizer
    mode: str
    """Encoded: a new process finds the class of a user's mode only after it has set the driver's path."""
    seed: int


class Plan(NamedTuple):
    """Settings that all processes of a cluster share.

    Attributes:
        name: of the cluster, unique.
        servers: number of embedding PSs.
        nn_workers: number of NN workers.
        options: of the user.
        loopback: whether all processes are on one host, and bind to loopback only.
        keys: file with the CURVE keys, or None.
        path: the driver's module search path; Ray passes on only the folder of its script.
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


class ProcessInfo(NamedTuple):
    """Place of a process, as it reports it.

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


class ServerSeat(NamedTuple):
    """Place of a PS among those of its host. It keeps it when it restarts.

    Attributes:
        neighbours: number of PSs on the host, this one included.
        position: number of those with a lower rank.
    """

    neighbours: int
    position: int


def seat_of(rank: int, nodes: Sequence[str]) -> ServerSeat:
    """Returns the place of a PS on its host.

    Args:
        rank: of the PS.
        nodes: ids of the nodes of all PSs, by rank.
    """
    return ServerSeat(nodes.count(nodes[rank]), nodes[:rank].count(nodes[rank]))


def here() -> Any:
    """Returns the placement on the host of this process."""
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def place(rank: int, reserves: bool) -> Any:
    """Returns the placement of a rank: hosts in turn, so that each has its share of memory and network.

    Hosts without CPUs, such as a head node that only manages, get none unless there are no others.

    Args:
        rank: of the process.
        reserves: whether it reserves resources. If so, it goes to another host when this one has too few left. If not,
            the placement is strict, as Ray places a process without reservations anywhere otherwise.
    """
    return NodeAffinitySchedulingStrategy(node_of(rank), soft=reserves)


def node_of(rank: int) -> str:
    """Returns the id of the node where `place` puts a rank."""
    nodes = _nodes()
    return nodes[rank % len(nodes)]


def _nodes() -> list[str]:
    nodes = sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: node["NodeID"])
    nodes = [node for node in nodes if node["Resources"].get("CPU")] or nodes
    return [node["NodeID"] for node in nodes]
