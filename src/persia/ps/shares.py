"""Divides embedding tables among PSs: how many rows of each table a PS keeps.

Ids are hashed to PSs, so each PS owns an equal part of the ids, whatever its memory. Capacities are therefore divided
equally, and unequally only as far as the memory of a PS is too small for an equal part. Of a table with `spill`, the
rows in memory are divided so; its capacity, which the disk bounds, is divided equally.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from persia.errors import ConfigError
from persia.memory import Memory, host_memory
from persia.ps.memory_checks import NAMED, too_large, too_little
from persia.ps.sizes import (
    MIN_SHARE,
    TableSize,
    declared_sizes,
    least_bytes,
    needed_bytes,
    size_of,
    takes_what_it_finds,
    text_of_bytes,
    water_level,
)
from persia.schema import EmbeddingOptimizer, Table
from persia.store import MAX_ROWS, TableConfig
from persia.telemetry.logs import get_logger

__all__ = ["MEMORY_SHARE", "Shares", "divide", "divide_here", "divide_tables", "rows_of_undeclared", "table_sizes"]

LOG = get_logger("persia.ps")

MEMORY_SHARE = Fraction(9, 10)
"""Share of a host's memory for rows, where tables take what they find: processes need some for themselves."""


ADDRESS_SPACE = 1 << 46
"""Bytes of address space for all tables of a PS that declare no capacity: half of what a process has on x86-64."""

LEAST_ROWS = 1 << 23
"""Rows that each of them has room for in any case: below, shards and admission sketches of a table would be smaller."""


class Shares(NamedTuple):
    """Rows that a PS keeps of each table, by name.

    Attributes:
        capacities: of tables with a declared capacity, rows in all.
        memory_rows: of tables with `spill`, rows in memory.
    """

    capacities: dict[str, int]
    memory_rows: dict[str, int]


def divide_tables(
    tables: Mapping[str, Table],
    optimizer: EmbeddingOptimizer,
    memory: Sequence[Memory | None],
    overcommit: bool = False,
) -> list[Shares]:
    """Divides the tables among PSs: `divide` for the rows in memory, and equal parts of what is on disk.

    A table with `spill` that does not say how many rows are in memory gets what the others leave of nine tenths of
    the memory, or of all that is for rows: in equal parts, if there are several that take what they find, but no more
    than all its rows take. Half of a part is for the index if the capacity is not declared, either. `persia plan`
    divides by this function, too.

    Args:
        tables: by name.
        optimizer: of tables that declare none.
        memory: by PS, as for `divide`; known if a table takes what it finds.
        overcommit: accept tables that do not fit.

    Raises:
        ConfigError: see `divide`.
    """
    count = len(memory)
    sizes = declared_sizes(tables, optimizer)
    sizes += _chosen_sizes(tables, optimizer, sizes, memory)
    rows = divide(sizes, [None] * count if overcommit else memory)
    shares = [Shares({}, {}) for _ in memory]
    for size in sizes:
        whole = _rounded(size.capacity, [Fraction(1)] * count) if size.capacity is not None else []
        for rank, share in enumerate(shares):
            mine = rows[rank][size.name]
            if not size.spills:
                share.capacities[size.name] = mine
                continue
            share.memory_rows[size.name] = mine
            if size.capacity is not None:
                share.capacities[size.name] = max(mine, whole[rank], min(size.capacity, MIN_SHARE))
    return shares


def divide_here(
    tables: Mapping[str, Table], optimizer: EmbeddingOptimizer, count: int, overcommit: bool = False
) -> list[Shares]:
    """Divides tables among PSs in this process; see `divide_tables`.

    Args:
        tables: by name.
        optimizer: of tables that declare none.
        count: number of PSs.
        overcommit: accept capacities that exceed the memory of this host.
    """
    return divide_tables(tables, optimizer, [host_memory().shared(count)] * count, overcommit)


def table_sizes(tables: Mapping[str, Table], optimizer: EmbeddingOptimizer, shares: Shares) -> list[TableSize]:
    """Returns the sizes of the shares of a PS; tables that take what memory they find have none."""
    found = []
    for name, table in tables.items():
        rows = (shares.capacities if table.spill is None else shares.memory_rows).get(name)
        if rows is not None:
            size = size_of(table, optimizer, rows)
            found.append(size._replace(capacity=shares.capacities.get(name) if size.spills else None))
    return found


def rows_of_undeclared(
    tables: Mapping[str, Table], optimizer: EmbeddingOptimizer, memory: Memory | None
) -> dict[str, int]:
    """Returns how many rows a PS has room for in tables without a capacity, by name; only address space is taken.

    That is more than the host can hold, and no more: a few hundred tables with room for 2^30 rows each would be more
    than the address space of a process. A table that is declared larger has what it declares.

    Args:
        tables: by name.
        optimizer: of tables that declare none.
        memory: of the host; None if the number must not depend on it, as in regions, which another host may attach to.
    """
    names = [name for name, table in tables.items() if table.capacity is None and table.spill is None]
    found = {}
    for name in names:
        row_bytes = size_of(tables[name], optimizer, 0).row_bytes
        most = ADDRESS_SPACE // len(names)
        held = most if memory is None else 2 * memory.total  # Twice: what is swapped out is in no limit.
        found[name] = min(TableConfig.capacity, max(LEAST_ROWS, min(most, held) // row_bytes))
        if most < held and found[name] < TableConfig.capacity:
            LOG.warning(
                "Table %r has room for %d rows, a share of the address space of a process; declare the `capacity` of "
                "tables that may have more.", name, found[name],
            )  # fmt: skip
    return found


def _chosen_sizes(
    tables: Mapping[str, Table],
    optimizer: EmbeddingOptimizer,
    declared: Sequence[TableSize],
    memory: Sequence[Memory | None],
) -> list[TableSize]:
    """Returns the sizes of tables with `spill` that do not say how many rows are in memory."""
    count = len(memory)
    known = sum(
        one.total if one.for_rows else math.floor(one.total * MEMORY_SHARE) for one in memory if one is not None
    )
    left = max(0, known - needed_bytes(declared, count))
    takers = [table for table in tables.values() if takes_what_it_finds(table)]
    wholly = [
        needed_bytes([size_of(table, optimizer, table.capacity)], count) if table.capacity else left for table in takers
    ]
    found = []
    for table, part in zip(takers, water_level(wholly, left), strict=True):
        if table.spill is not None:
            size = size_of(table, optimizer, 0)
            index = count * size.index_bytes(count)
            rows = (part - index if size.capacity is not None else part / 2) // size.own_bytes
            most = size.capacity or count * TableConfig.capacity
            found.append(size._replace(rows=min(most, max(rows, count * MIN_SHARE))))
    return found


def divide(sizes: Sequence[TableSize], memory: Sequence[Memory | None]) -> list[dict[str, int]]:
    """Divides the rows in memory among PSs.

    The shares of a table add up to its capacity and differ by one row at most. A PS whose memory is too small for an
    equal share gets what fits, the same fraction of each table, and the others get the rest; a warning names it, as it
    evicts rows before the others are full. A share is never below 1,024 rows, or the capacity if that is less; of
    tables with fewer than 1,024 rows for each PS, all PSs together may hold more than the capacity.

    Args:
        sizes: of the tables.
        memory: by PS, its part of the memory of its host; None for enough.

    Returns:
        By PS, the rows of each table that it keeps in memory.

    Raises:
        ConfigError: all PSs together have too little memory, a PS has too little for the least shares, or too few row
            numbers; the message has the numbers.
    """
    count = len(memory)
    index = sum(size.index_bytes(count) for size in sizes)
    least = least_bytes(sizes) + index
    for rank, one in enumerate(memory):
        if one is not None and one.total < least:
            raise too_little(sizes, rank, one, least)
    small = [size for size in sizes if size.rows <= count * MIN_SHARE]
    large = [size for size in sizes if size.rows > count * MIN_SHARE]
    fixed = index + sum(min(size.rows, MIN_SHARE) * size.own_bytes for size in small)
    wanted = sum(size.rows * size.own_bytes for size in large)
    limits = [wanted if one is None else min(wanted, max(0, one.total - fixed)) for one in memory]
    if sum(limits) < wanted:
        raise too_large(sizes, memory, fixed * count + wanted, Fraction(sum(limits), wanted))
    parts = water_level(limits, wanted)
    _warn_of_unequal(parts, memory)
    shares: list[dict[str, int]] = [{} for _ in memory]
    for size in sizes:
        weights = parts if size.rows > count * MIN_SHARE else [Fraction(1)] * count
        for mine, rows in zip(shares, _rounded(size.rows, weights), strict=True):
            mine[size.name] = max(rows, min(size.rows, MIN_SHARE))
            whole = size.capacity or size.rows
            share = max(mine[size.name], -(-whole // count))
            if share > MAX_ROWS:
                raise ConfigError(
                    f"Table {size.name!r} has a capacity of {whole:,} rows, {share:,} for one of {count} embedding "
                    f"PSs; a PS numbers {MAX_ROWS:,} rows of a table at most. Lower `capacity`, or use "
                    f"{math.ceil(whole / MAX_ROWS)} PSs or more.",
                    field="capacity",
                    table=size.name,
                )
    return shares


def _rounded(rows: int, weights: Sequence[Fraction]) -> list[int]:
    """Returns whole numbers in the ratio of the weights that add up to `rows` (largest remainders, then first ones)."""
    total = sum(weights)
    exact = [rows * weight / total for weight in weights]
    found = [math.floor(one) for one in exact]
    order = sorted(range(len(exact)), key=lambda number: found[number] - exact[number])
    for number in order[: rows - sum(found)]:
        found[number] += 1
    return found


def _warn_of_unequal(parts: Sequence[Fraction], memory: Sequence[Memory | None]) -> None:
    """Warns of PSs with less than an equal part: ids are hashed equally, so these evict while others have space."""
    equal = Fraction(sum(parts), len(parts))
    short = [
        (rank, part, one) for rank, (part, one) in enumerate(zip(parts, memory, strict=True)) if part < equal and one
    ]
    if short:
        named = [
            f"PS {rank} has {text_of_bytes(one.total)} ({one.limit}) and keeps {float(100 * part / equal):.4g} % of one"
            for rank, part, one in short[:NAMED]
        ]
        if len(short) > NAMED:
            named.append(f"{len(short) - NAMED} other PSs")
        LOG.warning(
            "The memory of some embedding PSs is too small for an equal share of the tables: %s. Each PS owns an equal "
            "part of the ids, so these evict rows while the others have space. Place PSs on hosts with equal memory, "
            "or lower `capacity` to %.3f %% of what is declared.",
            "; ".join(named), math.floor(100_000 * min(parts) / equal) / 1000,
        )  # fmt: skip
