"""Divides the tables among the embedding PSs of a cluster, by the memory of their hosts."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from persia.cluster.ray.options import RayOptions
from persia.cluster.ray.process_plan import Service, seat_of
from persia.cluster.ray.processes import run_on_all
from persia.memory import Memory, host_memory
from persia.ps.shares import Shares, divide_tables
from persia.telemetry.logs import get_logger

__all__ = ["server_capacities"]

log = get_logger("persia.cluster")


def server_capacities(
    service: Service, nodes: Sequence[str], options: RayOptions, reserved: int | None = None
) -> list[Shares]:
    """Returns, by PS, its share of rows of each table with a declared capacity or with rows on disk.

    Blocks until each host of PSs has answered. Call it once per cluster: restarts of PSs do not change their shares.

    Args:
        service: service of the PSs.
        nodes: ids of the Ray nodes of the PSs, by rank.
        options: regions, `overcommit` and timeout of the cluster.
        reserved: bytes that each PS reserves and does not exceed; None for its part of its host's memory.

    Raises:
        ConfigError: the tables do not fit into the memory of the hosts, and `overcommit` is not set.
        DeadlineError: a host did not answer in time.
        PersiaError: a host did not respond.
    """
    tables = service.schema.resolved_tables()
    if all(table.capacity is None and table.spill is None for table in tables.values()):
        return [Shares({}, {})] * len(nodes)
    memory: list[Memory | None] = [None] * len(nodes)
    measured = any(table.spill is not None and table.memory_rows is None for table in tables.values())
    if measured or not options.overcommit:
        measure = functools.partial(host_memory, options.regions or None)
        node_memory = run_on_all(set(nodes), measure, options.timeout)
        shared = [node_memory[node].shared(seat_of(rank, nodes).neighbours) for rank, node in enumerate(nodes)]
        memory = [_limited(reserved, one) for one in shared]
    shares = divide_tables(tables, service.optimizer, memory, options.overcommit)
    for rank, share in enumerate(shares):
        rows = [f"{rows:,} rows of {name!r}" for name, rows in share.capacities.items()]
        rows += [f"{rows:,} rows of {name!r} in memory" for name, rows in share.memory_rows.items()]
        log.info("embedding PS %d holds up to %s", rank, ", ".join(rows))
    return shares


def _limited(reserved: int | None, memory: Memory) -> Memory:
    if reserved is None or reserved >= memory.total:
        return memory
    return Memory(reserved, min(reserved, memory.free), "`memory` of place['ps']", for_rows=True)
