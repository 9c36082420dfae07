"""Records from which the processes of a cluster start, and their default placement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from persia.cluster.ray.options import RayOptions
from persia.schema import EmbeddingOptimizer, Schema
from persia.types import BucketMap

__all__ = ["Plan", "ProcessInfo", "ServerSeat", "Service", "here", "node_of", "place", "seat_of"]


class Service(NamedTuple):
    """The arguments of `Cluster.connect`, for the PSs and embedding workers of a cluster."""

    schema: Schema
    optimizer: EmbeddingOptimizer
    mode: str
    """Encoded, as a new process can import the class of a user's mode only after it has set the driver's path."""
    seed: int


class Plan(NamedTuple):
    """Settings that all processes of a cluster share.

    Attributes:
        name: unique name of the cluster.
        servers: number of embedding PSs.
        nn_workers: number of NN workers.
        options: options of the user.
        loopback: whether all processes are on one host and bind only to loopback.
        keys: file with the CURVE keys, or None.
        path: the driver's module search path; Ray only passes on the folder of its script.
        modules: modules of the user's modes, which every process imports.
        coordinator: address of the coordinator; empty for the coordinator itself.
        compression: compression of rows and gradients between embedding workers and NN workers.
        pool_at: where features are pooled.
        incarnation: number of drivers that the run has had, with the present one; see `RayOptions.run`.
        generation: the last generation of NN workers of the drivers before.
        buckets: the bucket map of a run that goes on; None for an even one. The coordinator may know a later one.
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
    compression: Literal["none", "fp16"] = "none"
    pool_at: Literal["nn_worker", "embedding_worker", "auto"] = "nn_worker"
    incarnation: int = 1
    generation: int = 0
    buckets: BucketMap | None = None


class ProcessInfo(NamedTuple):
    """Location of a process, as it reports it.

    Attributes:
        pid: process id.
        host: address of its node.
        node: id of its node.
        logs: files of its output, on its node.
        incarnation: incarnation of its role and rank.
        address: address on which it listens; empty if it serves no calls.
    """

    pid: int
    host: str
    node: str
    logs: list[str]
    incarnation: int
    address: str

    def is_same(self, other: ProcessInfo | None) -> bool:
        """Returns whether this is the same process as another one, not its successor."""
        known = other is not None and (other.node, other.pid, other.incarnation)
        return known == (self.node, self.pid, self.incarnation)


class ServerSeat(NamedTuple):
    """Position of a PS among the PSs of its host. A restart does not change it.

    Attributes:
        neighbours: number of PSs on the host, including this one.
        position: number of PSs on the host with a lower rank.
        attaches: whether its rows are on the host already, as a dead driver has left them.
    """

    neighbours: int
    position: int
    attaches: bool = False


def seat_of(rank: int, nodes: Sequence[str]) -> ServerSeat:
    """Returns the position of a PS on its host.

    Args:
        rank: rank of the PS.
        nodes: ids of the nodes of all PSs, by rank.
    """
    return ServerSeat(nodes.count(nodes[rank]), nodes[:rank].count(nodes[rank]))


def here() -> Any:
    """Returns the placement on the host of this process."""
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def place(rank: int, reserves: bool) -> Any:
    """Returns the placement of a rank: on the hosts in turn, to distribute memory and network.

    Hosts without CPUs, such as a head node that only manages, are used only if there are no others.

    Args:
        rank: rank of the process.
        reserves: whether it reserves resources. If so, it goes to another host if this one has too few left. If not,
            the placement is strict, as Ray would place a process without reservations anywhere.
    """
    return NodeAffinitySchedulingStrategy(node_of(rank), soft=reserves)


def node_of(rank: int) -> str:
    """Returns the id of the node on which `place` puts a rank."""
    nodes = _nodes()
    return nodes[rank % len(nodes)]


def _nodes() -> list[str]:
    nodes = sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: node["NodeID"])
    nodes = [node for node in nodes if node["Resources"].get("CPU")] or nodes
    return [node["NodeID"] for node in nodes]
