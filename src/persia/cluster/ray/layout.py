"""`HostLayout`: assigns hosts, given as records, to all processes of a cluster. Does not import ray."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from persia.cluster.ray.options import RayOptions
from persia.cluster.ray.placement import RESOURCE_UNIT, Place, PlacedRole, Placement, nn_worker_gpus
from persia.errors import ConfigError
from persia.types import TITLES

__all__ = ["REGIONS", "HostLayout", "RayNode", "RoleDemand", "demands_of"]

NAMES: Mapping[str, PlacedRole] = {
    "embedding_ps": "ps",
    "embedding_worker": "embedding_worker",
    "data_loader": "data_loader",
    "nn_worker": "nn_worker",
    "dense_ps": "dense_ps",
}
"""Names of roles in `place`."""

REGIONS = "memory of regions"
"""Free bytes of the directory of regions. Ray does not count them, so they are measured."""

NAMED_HOSTS = 8
"""Maximum number of addresses in a line of a message."""
OWN = ("node:", "object_store_memory", "accelerator_type:", "bundle_group_")
"""Prefixes of resources that Ray gives to hosts for its own purposes."""
OWN_LABEL = "ray.io/node-id"


class RayNode(NamedTuple):
    """A host of Ray.

    Attributes:
        id: id of the Ray node.
        address: address of the host.
        total: amounts of its resources by name, memory in bytes.
        free: amounts that no process has reserved.
        labels: values of labels by name.
    """

    id: str
    address: str
    total: Mapping[str, float]
    free: Mapping[str, float]
    labels: Mapping[str, str]


class RoleDemand(NamedTuple):
    """The processes of a role, and the demands of each process.

    Attributes:
        number: number of processes at the start.
        placement: strategy and labels.
        amounts: amounts of resources that each process takes.
        key: name of the role in `place`.
    """

    number: int
    placement: Placement
    amounts: Mapping[str, float]
    key: str


def demands_of(placements: Place, counts: Mapping[str, int], options: RayOptions) -> dict[str, RoleDemand]:
    """Returns the demands of the processes of a cluster, by role.

    Args:
        placements: placements of the user. Roles without a placement are spread.
        counts: numbers of processes by role, without dense PSs: `options` has their number.
        options: options of the cluster.

    Raises:
        ConfigError: the placement and the options of NN workers differ in their number of GPUs.
    """
    options = nn_worker_gpus(placements, options)
    demands = {}
    for role, number in {**counts, "dense_ps": options.dense_ps if "dense_ps" in placements else 0}.items():
        placement = placements.get(NAMES[role], Placement())
        cpu = options.cpus if placement.cpu is None else placement.cpu
        gpu = options.gpus if role == "nn_worker" else 0.0
        placement = msgspec.structs.replace(placement, cpu=cpu, gpu=gpu)
        amounts = placement.demand()
        if role == "embedding_ps" and "memory" in amounts and not options.overcommit:
            amounts[REGIONS] = amounts["memory"]
        demands[role] = RoleDemand(number, placement, amounts, NAMES[role])
    return demands


class HostLayout:
    """The hosts of all processes of a cluster. Thread-safe.

    A role is placed rank by rank. Hosts qualify by labels and by their remaining resources; without a label or custom
    resource in its placement a role avoids hosts without CPUs, such as a head node that only manages. Preferences among
    qualifying hosts:

    - processes without a GPU prefer hosts without GPUs;
    - "spread": PSs prefer the host with the most memory per PS, other roles the host with the fewest of their role;
    - "pack": processes prefer the host with the most of their role, then the host where the most of them fit.

    Roles for which the fewest hosts qualify are placed first. The choice is greedy: if two roles compete for the same
    hosts, use labels.

    Args:
        demands: demands by role.
        nodes: living hosts.
        pinned: nodes of PSs that have their rows already, by rank.

    Attributes:
        demands: see above.

    Raises:
        ConfigError: a process cannot be placed; the message lists the hosts and what each has.
    """

    def __init__(
        self, demands: Mapping[str, RoleDemand], nodes: Sequence[RayNode], pinned: Mapping[int, str] | None = None
    ) -> None:
        self.demands = demands
        self._lock = threading.Lock()
        self._nodes: dict[str, RayNode] = {}
        self._hosts: dict[tuple[str, int], str] = {
            ("embedding_ps", rank): node for rank, node in (pinned or {}).items()
        }
        """Node by role and rank."""
        self.update(nodes)
        order = sorted(demands, key=lambda role: sum(_lack(node, demands[role], node.total) is None for node in nodes))
        for role in order:
            self.place(role, range(demands[role].number))

    def update(self, nodes: Iterable[RayNode]) -> None:
        """Adds hosts that have joined, and removes hosts that are gone.

        Remaining resources of a known host are computed from this cluster's own placements, which Ray reports with a
        delay. Other programs may have released more meanwhile.
        """
        with self._lock:
            self._nodes = {node.id: _with_more(self._nodes.get(node.id), node) for node in nodes}

    def place(self, role: str, ranks: Iterable[int]) -> None:
        """Chooses hosts for these ranks, unless they have a living one: for all, or for none on an error.

        Raises:
            ConfigError: a process cannot be placed.
        """
        with self._lock:
            previous = dict(self._hosts)
            try:
                for rank in ranks:
                    if self._hosts.get((role, rank)) not in self._nodes:
                        self._hosts[role, rank] = self._choose(role, rank)
            except ConfigError:
                self._hosts = previous
                raise

    def placed(self, role: str, ranks: Iterable[int]) -> bool:
        """Returns whether all of these processes have a living host."""
        with self._lock:
            return all(self._hosts.get((role, rank)) in self._nodes for rank in ranks)

    def release(self, role: str, ranks: Collection[int]) -> None:
        """Removes processes that have ended permanently."""
        with self._lock:
            for rank in ranks:
                self._hosts.pop((role, rank), None)

    def renumber(self, role: str, ranks: Sequence[int], keep: Collection[int] = ()) -> None:
        """Gives processes other ranks; see `Placer.renumber`."""
        with self._lock:
            of_role = {rank: self._hosts.pop((role, rank)) for placed, rank in list(self._hosts) if placed == role}
            self._hosts |= {(role, rank): of_role[rank] for rank in keep if rank in of_role}
            self._hosts |= {(role, now): of_role[rank] for now, rank in enumerate(ranks) if rank in of_role}

    def node_of(self, role: str, rank: int) -> str | None:
        """Returns the id of the node of a process, which may be gone; None if it is not placed."""
        with self._lock:
            return self._hosts.get((role, rank))

    def _choose(self, role: str, rank: int) -> str:
        demand = self.demands[role]
        free = self._free()
        qualified = [node for node in self._eligible(demand) if _lack(node, demand, free[node.id]) is None]
        if not qualified:
            raise self._refusal(role, rank, free)
        role_counts = Counter(node for (placed_role, _), node in self._hosts.items() if placed_role == role)
        host_counts = Counter(self._hosts.values())

        def preference(node: RayNode) -> tuple[float, ...]:
            avoids = float(bool(node.total.get("GPU")) and not demand.amounts.get("GPU"))
            count = role_counts[node.id]
            if demand.placement.strategy == "pack":
                return avoids, -count, -_fitting(demand, free[node.id])
            if role != "embedding_ps":
                return avoids, count, host_counts[node.id]
            memory = free[node.id].get("memory", 0.0) + count * demand.amounts.get("memory", 0.0)
            memory = min(memory, node.free.get(REGIONS, memory))
            return avoids, -memory / (count + 1), count

        return min(qualified, key=lambda node: (*preference(node), node.id)).id

    def _free(self) -> dict[str, dict[str, float]]:
        """Returns the remaining resources of each host."""
        free = {node.id: dict(node.free) for node in self._nodes.values()}
        for (role, _), node in self._hosts.items():
            if node in free:
                for name, amount in self.demands[role].amounts.items():
                    free[node][name] = free[node].get(name, 0.0) - amount
        return free

    def _eligible(self, demand: RoleDemand) -> list[RayNode]:
        nodes = list(self._nodes.values())
        if demand.placement.labels or demand.placement.resources:
            return nodes
        return [node for node in nodes if node.total.get("CPU")] or nodes

    def _refusal(self, role: str, rank: int, free: Mapping[str, Mapping[str, float]]) -> ConfigError:
        demand = self.demands[role]
        holds: dict[str, Counter[str]] = {node_id: Counter() for node_id in self._nodes}
        for (placed_role, _), host in self._hosts.items():
            if host in holds:
                holds[host][TITLES[placed_role]] += 1
        lines: dict[str, list[str]] = {}
        eligible = self._eligible(demand)
        for node in sorted(self._nodes.values(), key=lambda node: node.address):
            lack = _lack(node, demand, free[node.id]) if node in eligible else "no CPUs"
            lines.setdefault(_described(node, free[node.id], holds[node.id], lack or ""), []).append(node.address)
        listed = "\n".join(f"    {_joined(addresses)}: {line}" for line, addresses in lines.items())
        wants = [_amount(name, amount) for name, amount in demand.amounts.items()]
        wants += [f"label {name}={value}" for name, value in demand.placement.labels.items()]
        return ConfigError(
            f"{TITLES[role]} {rank} (of {max(demand.number, rank + 1)}) cannot be placed: no host has "
            f"{', '.join(wants) or 'a place'} for it. The hosts of Ray, with the resources that this cluster leaves:\n"
            f"{listed or '    none'}\n"
            f"Ask for less in place[{demand.key!r}], use fewer processes, or add hosts to Ray.",
            field=f"place.{demand.key}",
            role=role,
            rank=rank,
            hosts=[
                {
                    "address": node.address,
                    "total": _amounts(node.total),
                    "free": _amounts(free[node.id]),
                    "labels": dict(node.labels),
                }
                for node in self._nodes.values()
            ],
        )


def _with_more(known: RayNode | None, now: RayNode) -> RayNode:
    """Returns a host whose free resources are the maximum of those before this cluster's processes and those now."""
    if known is None:
        return now
    free = {name: max(known.free.get(name, 0.0), now.free.get(name, 0.0)) for name in {*known.free, *now.free}}
    return now._replace(total={**now.total, **known.total}, free=free)


def _lack(node: RayNode, demand: RoleDemand, free: Mapping[str, float]) -> str | None:
    """Returns a description of the first demand that a host does not meet; None if it meets all."""
    for name, value in demand.placement.labels.items():
        if node.labels.get(name) != value:
            return f"label {name} is not {value}"
    for name, amount in demand.amounts.items():
        if free.get(name, 0.0) < amount - RESOURCE_UNIT:
            return f"too little {name}" if free.get(name, 0.0) > RESOURCE_UNIT else f"no {name} left"
    return None


def _fitting(demand: RoleDemand, free: Mapping[str, float]) -> int:
    """Returns the number of processes that fit into the remaining resources of a host; 0 if nothing limits them."""
    counts = [math.floor((free.get(name, 0.0) + RESOURCE_UNIT) / amount) for name, amount in demand.amounts.items()]
    return min(counts, default=0)


def _described(node: RayNode, free: Mapping[str, float], holds: Mapping[str, int], lack: str) -> str:
    parts = []
    for name in sorted(_amounts(node.total) | _amounts(free)):
        total = f" of {_quantity(name, node.total[name])}" if name in node.total else ""
        parts.append(f"{name} {_quantity(name, max(0.0, free.get(name, 0.0)))}{total}")
    parts += [f"label {name}={value}" for name, value in node.labels.items() if name != OWN_LABEL]
    held = ", ".join(f"{count} {title}" for title, count in holds.items())
    return ", ".join(parts) + (f"; has {held}" if held else "") + (f"; {lack}" if lack else "")


def _amounts(resources: Mapping[str, float]) -> dict[str, float]:
    return {name: amount for name, amount in resources.items() if not name.startswith(OWN)}


def _amount(name: str, amount: float) -> str:
    return f"{name} {_quantity(name, amount)}"


def _quantity(name: str, amount: float) -> str:
    return f"{amount / 1e9:,.4g} GB" if name in ("memory", REGIONS) else f"{amount:,.4g}"


def _joined(addresses: Sequence[str]) -> str:
    text = ", ".join(addresses[:NAMED_HOSTS])
    return text + (f" and {len(addresses) - NAMED_HOSTS} others" if len(addresses) > NAMED_HOSTS else "")
