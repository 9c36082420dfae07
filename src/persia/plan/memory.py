"""Divides the memory of hosts among tables, as embedding PSs do it when they start."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from persia.errors import ConfigError
from persia.memory import Memory
from persia.plan.hosts import HostKind
from persia.plan.tables import PlannedTable, TableBytes, bytes_of
from persia.ps.shares import MEMORY_SHARE, divide_tables
from persia.ps.sizes import declared_sizes, needed_bytes, takes_what_it_finds
from persia.schema import SGD, Table

__all__ = ["PlacedTables", "hosts_for", "place_tables", "whole_bytes"]

DEFAULT = SGD(1.0)
"""Optimizer of tables that declare none: there are none."""
ADDED = "/"
"""Directory of the rows on SSD of a table that has none in its configuration."""


class PlacedTables(NamedTuple):
    """Tables in the memory and on the SSDs of all PSs together.

    Attributes:
        tables: their bytes.
        needed: bytes of memory for rows that all PSs need together: those of the tables, or what PSs ask for to start.
        reserved: bytes of memory that each PS reserves for rows: with this `memory` in its `Placement`, the same rows
            are in memory.
        added: tables that need `spill`, which they do not have in their configuration, and this capacity.
    """

    tables: list[TableBytes]
    needed: int
    reserved: int
    added: dict[str, int]


def place_tables(
    tables: Sequence[PlannedTable], chosen: Mapping[str, int], kind: HostKind, servers: int, hosts: int
) -> PlacedTables:
    """Returns where the rows are: in memory, or of those that do not fit, on SSD.

    Rows in memory are divided by `divide_tables`, as by PSs with `reserved` bytes. If the tables do not fit, and the
    hosts have SSDs, each is taken to have `spill`, and its rows as capacity if it declares none.

    Args:
        tables: with their rows.
        chosen: rows in memory by table; others have what they declare, or take what they find.
        kind: of the hosts.
        servers: number of PSs.
        hosts: number of hosts, among which they are spread.

    Raises:
        ConfigError: rows are on SSD, and the hosts have none.
    """
    limit = _memory_for_rows(kind) // math.ceil(servers / hosts)
    found = _tables(tables, chosen)
    if kind.disk and kind.count is not None and whole_bytes(tables, chosen, servers) > servers * limit:
        for planned in tables:
            table = found[planned.config.name]
            found[table.name] = msgspec.structs.replace(
                table, spill=table.spill or ADDED, capacity=table.capacity or (None if table.spill else planned.rows)
            )
    takers = [name for name, table in found.items() if table.spill is not None and takes_what_it_finds(table)]
    # Whether all of that fits is the caller's question, who counts hosts.
    shares = divide_tables(found, DEFAULT, [Memory(limit, limit, "", for_rows=True)] * servers, overcommit=True)
    rows = {name: sum(share.memory_rows[name] for share in shares) for name in found if found[name].spill is not None}
    sizes = [
        bytes_of(planned._replace(table=found[planned.config.name]), servers, rows.get(planned.config.name))
        for planned in tables
    ]
    for name in takers:
        most = found[name].capacity
        found[name] = msgspec.structs.replace(
            found[name], memory_rows=rows[name] if most is None else min(most, rows[name])
        )
    # Where tables take what they find, PSs count rows; headers and last pages of shards are of what is not for rows.
    counted = math.ceil(sum(size.memory for size in sizes) * (MEMORY_SHARE if takers else 1))
    needed = max(needed_bytes(declared_sizes(found, DEFAULT), servers), counted)
    if not kind.disk and (cold := next((size for size in sizes if size.disk), None)):
        raise ConfigError(
            f"Table {cold.name!r} has {cold.rows - cold.memory_rows:,} of {cold.rows:,} rows on SSD, and hosts of kind "
            f"{kind.name!r} have none. Add `disk` to their [[hosts]] section, or raise `memory_rows` of the table.",
            field="hosts",
            host=kind.name,
        )
    added = {
        name: table.capacity or 0
        for planned in tables
        if (table := found[name := planned.config.name]).spill == ADDED and name not in chosen
    }
    return PlacedTables(sizes, needed, limit if takers else math.ceil(needed / servers), added)


def whole_bytes(tables: Sequence[PlannedTable], chosen: Mapping[str, int], servers: int) -> int:
    """Returns the bytes of memory that all PSs need together so that no row goes to SSD which need not.

    Args:
        tables: with their rows.
        chosen: rows in memory by table.
        servers: number of PSs.
    """
    found = _tables(tables, chosen)
    memory = sum(bytes_of(table, servers, found[table.config.name].memory_rows).memory for table in tables)
    whole = {
        name: msgspec.structs.replace(table, memory_rows=table.memory_rows or table.capacity)
        if table.spill is not None
        else table
        for name, table in found.items()
    }
    return max(memory, needed_bytes(declared_sizes(whole, DEFAULT), servers))


def hosts_for(needed: int, kind: HostKind, servers: int) -> float:
    """Returns the number of hosts that have so much memory for rows, in equal parts for the PSs.

    Args:
        needed: bytes of all PSs together.
        kind: of the hosts.
        servers: number of PSs; on as many hosts at most, so a larger result asks for more.
    """
    most = _memory_for_rows(kind)
    hosts, of_each = needed / most, math.ceil(needed / servers)
    packed = math.ceil(servers / (most // of_each)) if 0 < of_each <= most else 0
    return hosts if packed <= math.ceil(hosts) else float(packed)


def _memory_for_rows(kind: HostKind) -> int:
    return math.floor(kind.memory * MEMORY_SHARE)


def _tables(tables: Sequence[PlannedTable], chosen: Mapping[str, int]) -> dict[str, Table]:
    """Returns the tables by name, with the chosen rows in memory."""
    found = {}
    for planned in tables:
        table = planned.table
        if (rows := chosen.get(table.name)) is not None:
            rows = rows if table.capacity is None else min(rows, table.capacity)
            table = msgspec.structs.replace(table, spill=table.spill or ADDED, memory_rows=rows)
        found[table.name] = table
    return found
