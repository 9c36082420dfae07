"""Divides the memory of hosts among tables, as embedding PSs do when they start."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from persia.errors import ConfigError
from persia.memory import Memory
from persia.plan.host_kinds import HostKind
from persia.plan.table_bytes import PlannedTable, TableBytes, bytes_of
from persia.ps.shares import MEMORY_SHARE, divide_tables
from persia.ps.sizes import declared_sizes, needed_bytes, takes_what_it_finds
from persia.schema import SGD, Table

__all__ = ["PlacedTables", "hosts_for", "place_tables", "whole_bytes"]

DEFAULT = SGD(1.0)
"""Optimizer of tables that declare none. All planned tables declare one."""
ADDED = "/"
"""Directory for rows on SSD of a table whose configuration has none."""


class PlacedTables(NamedTuple):
    """Tables in the memory and on the SSDs of all PSs together.

    Attributes:
        tables: bytes by table.
        needed: bytes of memory for rows that all PSs need together: the bytes of the tables, or what PSs require to
            start.
        reserved: bytes of memory that each PS reserves for rows: with this `memory` in its `Placement`, the same rows
            are in memory.
        added: tables that need `spill`, which their configuration lacks, with their capacity.
    """

    tables: list[TableBytes]
    needed: int
    reserved: int
    added: dict[str, int]


def place_tables(
    tables: Sequence[PlannedTable], chosen: Mapping[str, int], kind: HostKind, servers: int, hosts: int
) -> PlacedTables:
    """Places rows in memory, and rows that do not fit on SSD.

    Rows in memory are divided by `divide_tables`, as PSs with `reserved` bytes do. If the tables do not fit, and the
    hosts have SSDs, the plan adds `spill` to each table, and its rows as capacity if it declares none.

    Args:
        tables: tables with their numbers of rows.
        chosen: rows in memory by table; other tables have what they declare, or take the free memory.
        kind: kind of the hosts.
        servers: number of PSs.
        hosts: number of hosts over which the PSs are spread.

    Raises:
        ConfigError: rows are on SSD, but the hosts have none.
    """
    limit = _memory_for_rows(kind) // math.ceil(servers / hosts)
    by_name = _tables(tables, chosen)
    if kind.disk and kind.count is not None and whole_bytes(tables, chosen, servers) > servers * limit:
        for planned in tables:
            table = by_name[planned.config.name]
            by_name[table.name] = msgspec.structs.replace(
                table, spill=table.spill or ADDED, capacity=table.capacity or (None if table.spill else planned.rows)
            )
    takers = [name for name, table in by_name.items() if table.spill is not None and takes_what_it_finds(table)]
    # The caller checks whether all rows fit, as it counts hosts.
    shares = divide_tables(by_name, DEFAULT, [Memory(limit, limit, "", for_rows=True)] * servers, overcommit=True)
    rows = {
        name: sum(share.memory_rows[name] for share in shares) for name in by_name if by_name[name].spill is not None
    }
    sizes = [
        bytes_of(planned._replace(table=by_name[planned.config.name]), servers, rows.get(planned.config.name))
        for planned in tables
    ]
    for name in takers:
        most = by_name[name].capacity
        by_name[name] = msgspec.structs.replace(
            by_name[name], memory_rows=rows[name] if most is None else min(most, rows[name])
        )
    # If tables take the free memory, PSs count only rows: headers and last pages of shards use the remaining share.
    counted = math.ceil(sum(size.memory for size in sizes) * (MEMORY_SHARE if takers else 1))
    needed = max(needed_bytes(declared_sizes(by_name, DEFAULT), servers), counted)
    if not kind.disk and (cold := next((size for size in sizes if size.disk), None)):
        raise ConfigError(
            f"Table {cold.name!r} has {cold.rows - cold.memory_rows:,} of {cold.rows:,} rows on SSD, but hosts of kind "
            f"{kind.name!r} have none. Add `disk` to their [[hosts]] section, or raise `memory_rows` of the table.",
            field="hosts",
            host=kind.name,
        )
    added = {
        name: table.capacity or 0
        for planned in tables
        if (table := by_name[name := planned.config.name]).spill == ADDED and name not in chosen
    }
    return PlacedTables(sizes, needed, limit if takers else math.ceil(needed / servers), added)


def whole_bytes(tables: Sequence[PlannedTable], chosen: Mapping[str, int], servers: int) -> int:
    """Returns the bytes of memory that all PSs need together so that no row moves to SSD unnecessarily.

    Args:
        tables: tables with their numbers of rows.
        chosen: rows in memory by table.
        servers: number of PSs.
    """
    by_name = _tables(tables, chosen)
    memory = sum(bytes_of(table, servers, by_name[table.config.name].memory_rows).memory for table in tables)
    whole = {
        name: msgspec.structs.replace(table, memory_rows=table.memory_rows or table.capacity)
        if table.spill is not None
        else table
        for name, table in by_name.items()
    }
    return max(memory, needed_bytes(declared_sizes(whole, DEFAULT), servers))


def hosts_for(needed: int, kind: HostKind, servers: int) -> float:
    """Returns the number of hosts that have this much memory for rows, in equal parts for the PSs.

    Args:
        needed: bytes of all PSs together.
        kind: kind of the hosts.
        servers: number of PSs. They run on at most as many hosts, so a larger result means more PSs are needed.
    """
    host_bytes = _memory_for_rows(kind)
    hosts, server_bytes = needed / host_bytes, math.ceil(needed / servers)
    packed = math.ceil(servers / (host_bytes // server_bytes)) if 0 < server_bytes <= host_bytes else 0
    return hosts if packed <= math.ceil(hosts) else float(packed)


def _memory_for_rows(kind: HostKind) -> int:
    return math.floor(kind.memory * MEMORY_SHARE)


def _tables(tables: Sequence[PlannedTable], chosen: Mapping[str, int]) -> dict[str, Table]:
    """Returns the tables by name, with the chosen numbers of rows in memory."""
    by_name = {}
    for planned in tables:
        table = planned.table
        if (rows := chosen.get(table.name)) is not None:
            rows = rows if table.capacity is None else min(rows, table.capacity)
            table = msgspec.structs.replace(table, spill=table.spill or ADDED, memory_rows=rows)
        by_name[table.name] = table
    return by_name
