"""On which hosts processes run that stay where they are: PSs and NN workers."""

from __future__ import annotations

from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

__all__ = ["here", "neighbours", "place"]


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
