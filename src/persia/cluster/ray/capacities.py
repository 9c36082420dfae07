"""Divides the capacities of tables among the embedding PSs of a cluster, by the memory of their hosts."""

from __future__ import annotations

import functools
import logging

from ray.exceptions import RayError

from persia.cluster.ray.options import RayOptions
from persia.cluster.ray.plan import Service, neighbours, node_of
from persia.cluster.ray.processes import run_on
from persia.ps.memory import Memory, host_memory
from persia.ps.sizes import declared_sizes, divide

__all__ = ["server_capacities"]

log = logging.getLogger("persia.cluster")


def server_capacities(service: Service, servers: int, options: RayOptions) -> list[dict[str, int]]:
    """Returns by PS the rows that it keeps of each table with a declared capacity.

    Blocks for a call to each host of PSs. Call it once per cluster: the shares of PSs that restart do not change.

    Args:
        service: what the PSs will serve.
        servers: number of PSs.
        options: where their regions are, and whether capacities may exceed the memory.

    Raises:
        ConfigError: the tables do not fit into the memory of the hosts, and `overcommit` is not set.
    """
    sizes = declared_sizes(service.schema.resolved_tables(), service.optimizer)
    if not sizes:
        return [{}] * servers
    memory: list[Memory | None] = [None] * servers
    if not options.overcommit:
        nodes = [node_of(rank) for rank in range(servers)]
        of_node = {node: _memory(node, options.regions) for node in set(nodes)}
        of_rank = [of_node[node] for node in nodes]
        memory = [one and one.shared(neighbours(rank, servers)) for rank, one in enumerate(of_rank)]
    shares = divide(sizes, memory)
    for rank, share in enumerate(shares):
        log.info(
            "embedding PS %d keeps up to %s", rank, ", ".join(f"{rows:,} rows of {n!r}" for n, rows in share.items())
        )
    return shares


def _memory(node: str, regions: str) -> Memory | None:
    """Returns the memory of a host; None if it does not answer."""
    try:
        return run_on(node, functools.partial(host_memory, regions or None))
    except RayError as error:
        log.warning("capacities are not checked against the memory of node %s, which does not answer: %s", node, error)
        return None
