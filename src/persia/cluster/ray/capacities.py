"""Divides the capacities of tables among the embedding PSs of a cluster, by the memory of their hosts."""

from __future__ import annotations

import functools
import logging

from persia.cluster.ray.options import RayOptions
from persia.cluster.ray.plan import Service, neighbours, node_of
from persia.cluster.ray.processes import run_on_all
from persia.memory import Memory, host_memory
from persia.ps.sizes import declared_sizes, divide

__all__ = ["server_capacities"]

log = logging.getLogger("persia.cluster")


def server_capacities(service: Service, servers: int, options: RayOptions) -> list[dict[str, int]]:
    """Returns by PS the rows that it keeps of each table with a declared capacity.

    Blocks until each host of PSs has answered. Call it once per cluster: the shares of PSs that restart do not change.

    Args:
        service: what the PSs will serve.
        servers: number of PSs.
        options: where their regions are, whether capacities may exceed the memory, and how long to wait.

    Raises:
        ConfigError: the tables do not fit into the memory of the hosts, and `overcommit` is not set.
        DeadlineError: a host did not answer in time.
        PersiaError: a host could not be asked.
    """
    sizes = declared_sizes(service.schema.resolved_tables(), service.optimizer)
    if not sizes:
        return [{}] * servers
    memory: list[Memory | None] = [None] * servers
    if not options.overcommit:
        nodes = [node_of(rank) for rank in range(servers)]
        measure = functools.partial(host_memory, options.regions or None)
        of_node = run_on_all(set(nodes), measure, options.timeout)
        memory = [of_node[node].shared(neighbours(rank, servers)) for rank, node in enumerate(nodes)]
    shares = divide(sizes, memory)
    for rank, share in enumerate(shares):
        log.info(
            "embedding PS %d keeps up to %s", rank, ", ".join(f"{rows:,} rows of {n!r}" for n, rows in share.items())
        )
    return shares
