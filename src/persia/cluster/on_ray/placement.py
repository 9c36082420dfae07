"""On which hosts the PSs run."""

from __future__ import annotations

import itertools
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

__all__ = ["spread"]


def spread(count: int) -> list[Any]:
    """Where so many PSs go: one host after another, as each is to have its share of memory and network.

    Ray's own strategy "SPREAD" looks at what a process reserves, and ours may reserve nothing. Hosts without CPUs,
    such as a head that is only to manage, get none, unless there are no others.
    """
    nodes = sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: node["NodeID"])
    nodes = [node for node in nodes if node["Resources"].get("CPU")] or nodes
    places = itertools.cycle(NodeAffinitySchedulingStrategy(node["NodeID"], soft=True) for node in nodes)
    return list(itertools.islice(places, count))
