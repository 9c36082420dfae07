"""Places the processes of a cluster on Ray's hosts: as the user's `place` specifies, or on the hosts in turn."""

from __future__ import annotations

import functools
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from persia.cluster.ray.layout import REGIONS, HostLayout, RayNode, RoleDemand, demands_of
from persia.cluster.ray.options import RayOptions
from persia.cluster.ray.placement import Place
from persia.cluster.ray.process_plan import node_of, place
from persia.cluster.ray.processes import run_on_all
from persia.errors import ConfigError, PersiaError, StoreError
from persia.memory import host_memory
from persia.retry import Deadline
from persia.telemetry.logs import get_logger

__all__ = ["Placer", "ray_nodes"]

LOG = get_logger("persia.cluster")

RETURNING = ("embedding_worker", "data_loader")
"""Roles that Ray restarts on any host that meets their demands."""
ROW_ROLES = ("embedding_worker", "nn_worker")
"""Roles that exchange the rows of batches and their gradients."""
RELEASE_SECONDS = 10.0
"""Maximum time until Ray has released the reservations of ended processes."""
POLL_SECONDS = 0.2


class Placer:
    """Assigns hosts and reservations to the processes of a cluster. Thread-safe.

    Without placements, PSs and NN workers go to the hosts in turn, and Ray places the other roles. With placements, a
    `HostLayout` places all roles; roles without a placement are spread.

    Args:
        placements: placements by role.
        options: options of the cluster.
    """

    def __init__(self, placements: Place, options: RayOptions) -> None:
        self._placements = placements
        self._options = options
        self._layout: HostLayout | None = None
        self._pinned: dict[int, str] = {}

    def pin(self, nodes: Mapping[int, str]) -> None:
        """Puts PSs on nodes that have their rows already. Call it before `lay_out`.

        Args:
            nodes: ids of nodes, by rank.
        """
        self._pinned = dict(nodes)

    def lay_out(self, counts: Mapping[str, int]) -> None:
        """Chooses a host for each process, before the first one starts.

        Blocks for at most a few seconds, while Ray still counts reservations of processes that have just ended.

        Args:
            counts: numbers of processes by role.

        Raises:
            ConfigError: a process cannot be placed; the message lists the hosts and what each has.
            DeadlineError: a host did not report its memory in time.
        """
        if not self._placements:
            return
        demands = demands_of(self._placements, counts, self._options)
        deadline = Deadline(RELEASE_SECONDS)
        while True:
            nodes = self._nodes(demands["embedding_ps"])
            try:
                self._layout = HostLayout(demands, nodes, self._pinned)
                break
            except ConfigError:
                if deadline.passed or not _fits(demands, nodes):
                    raise
            time.sleep(POLL_SECONDS)
        for role, demand in demands.items():
            hosts = [self._layout.node_of(role, rank) for rank in range(demand.number)]
            LOG.info("placed %s on the Ray nodes %s", role, hosts)

    def reserve(self, role: str, ranks: Collection[int], wait: bool = True) -> None:
        """Chooses hosts for processes that are about to start, unless they have one: for all or none of them.

        Blocks for at most `RayOptions.timeout` if a host is gone and no other host fits its processes: Ray may add one.

        Args:
            role: role of the processes.
            ranks: ranks of the processes.
            wait: whether to wait for a host.

        Raises:
            ConfigError: a process cannot be placed; the message lists the hosts and what each has.
            PersiaError: a host did not report its memory.
            StoreError: a PS is pinned to a host that is gone.
        """
        if role == "embedding_ps":
            for rank in ranks:
                self._pinned_node(rank)
        layout = self._layout
        if layout is None:
            return
        layout.update(ray_nodes())
        if layout.placed(role, ranks):
            return
        replaces = any(layout.node_of(role, rank) is not None for rank in ranks)
        deadline = Deadline(self._options.timeout if wait and replaces else 0)
        warned = False
        while True:
            try:
                layout.update(self._nodes(layout.demands[role]))
                layout.place(role, ranks)
                return
            except PersiaError as error:
                if deadline.passed:
                    raise
                if not warned:
                    LOG.warning("%s\nWaiting %.0f s for a host.", error.message, deadline.left)
                    warned = True
            time.sleep(POLL_SECONDS)

    def unpin(self, ranks: Collection[int]) -> None:
        """Lets PSs go to any node, as their rows are lost, or at others."""
        for rank in ranks:
            self._pinned.pop(rank, None)

    def release(self, role: str, ranks: Collection[int]) -> None:
        """Removes processes that have ended permanently."""
        if role == "embedding_ps":
            self.unpin(ranks)
        if self._layout is not None:
            self._layout.release(role, ranks)

    def renumber(self, role: str, ranks: Sequence[int], keep: Collection[int] = ()) -> None:
        """Gives processes other ranks, 0, 1, ..., and releases the others of their role.

        Args:
            role: role of the processes.
            ranks: ranks so far, by rank from now on.
            keep: ranks of processes that keep theirs, which are not in `ranks`.
        """
        if self._layout is not None:
            self._layout.renumber(role, ranks, keep)

    def server_nodes(self, count: int) -> list[str]:
        """Returns the ids of the nodes of the PSs, by rank."""
        layout = self._layout
        if layout is None:
            return [self._pinned.get(rank) or node_of(rank) for rank in range(count)]
        return [layout.node_of("embedding_ps", rank) or "" for rank in range(count)]

    def row_hosts(self) -> list[str]:
        """Returns the addresses of the hosts that exchange rows: of embedding workers and NN workers, sorted.

        Where Ray chooses the hosts of embedding workers, these may be all hosts.
        """
        addresses = {node.id: node.address for node in ray_nodes()}
        layout = self._layout
        if layout is None:
            return sorted(set(addresses.values()))
        nodes = [layout.node_of(role, rank) for role in ROW_ROLES for rank in range(layout.demands[role].number)]
        return sorted({addresses[node] for node in nodes if node in addresses})

    def server_memory(self) -> int | None:
        """Returns the bytes that each PS reserves; None if its placement does not specify it."""
        return (self._placements["ps"].memory_bytes or None) if "ps" in self._placements else None

    def actor_options(self, role: str, rank: int) -> dict[str, Any]:
        """Returns the Ray options of a process: its reservations and its host. Call `reserve` before."""
        layout = self._layout
        if layout is None:
            return self._in_turn(role, rank)
        placement = layout.demands[role].placement
        node = layout.node_of(role, rank)
        assert node is not None
        # A PS restarts on the host with its rows, an NN worker only with its GPU.
        strategy = NodeAffinitySchedulingStrategy(node, soft=role in RETURNING)
        ray_options: dict[str, Any] = {"num_cpus": placement.cpu, "scheduling_strategy": strategy}
        if placement.gpu:
            ray_options["num_gpus"] = placement.gpu
        if placement.memory_bytes:
            ray_options["memory"] = placement.memory_bytes
        if placement.resources:
            ray_options["resources"] = placement.resources
        if placement.labels and role in RETURNING:  # Also for a restart on another host.
            ray_options["label_selector"] = placement.labels
        return ray_options

    def _in_turn(self, role: str, rank: int) -> dict[str, Any]:
        options = self._options
        ray_options: dict[str, Any] = {"num_cpus": options.cpus}
        if role == "embedding_ps" and (node := self._pinned_node(rank)) is not None:
            ray_options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node, soft=False)
        elif role == "embedding_ps":
            ray_options["scheduling_strategy"] = place(rank, options.cpus > 0)
        elif role == "nn_worker":
            # Ray knows which hosts have GPUs.
            ray_options["scheduling_strategy"] = "SPREAD" if options.gpus else place(rank, options.cpus > 0)
            ray_options["num_gpus"] = options.gpus
        return ray_options

    def _pinned_node(self, rank: int) -> str | None:
        """Returns the node to which a PS is pinned, or None. Raises StoreError if it is gone: elsewhere are no rows."""
        node = self._pinned.get(rank)
        if node is not None and all(living.id != node for living in ray_nodes()):
            raise StoreError(
                f"The rows of embedding PS {rank} are on Ray node {node}, which has died. Start that host again, `ray "
                "start` on it, and run the same command. If its memory is lost, start over from the last checkpoint: "
                f"remove {self._options.run} and the rows of the run on each host with `persia cluster regions "
                "--clean`.",
                rank=rank,
                node=node,
            )
        return node

    def _nodes(self, demand: RoleDemand) -> list[RayNode]:
        """Returns the living hosts, with their free memory for regions if the role demands any."""
        nodes = ray_nodes()
        if REGIONS not in demand.amounts:
            return nodes
        candidates = [node.id for node in nodes if demand.placement.labels.items() <= node.labels.items()]
        measure = functools.partial(host_memory, self._options.regions or None)
        memory = run_on_all(candidates, measure, self._options.timeout)
        return [_with_regions(node, memory[node.id].free) if node.id in memory else node for node in nodes]


def ray_nodes() -> list[RayNode]:
    """Returns the living hosts of Ray."""
    free = ray._private.state.available_resources_per_node()
    return [
        RayNode(
            node["NodeID"],
            node["NodeManagerAddress"],
            node["Resources"],
            free.get(node["NodeID"], node["Resources"]),
            node.get("Labels", {}),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def _with_regions(node: RayNode, free: float) -> RayNode:
    return node._replace(total={**node.total, REGIONS: free}, free={**node.free, REGIONS: free})


def _fits(demands: Mapping[str, RoleDemand], nodes: Sequence[RayNode]) -> bool:
    """Returns whether the processes can be placed once nothing else is reserved."""
    try:
        HostLayout(demands, [node._replace(free=node.total) for node in nodes])
    except ConfigError:
        return False
    return True
