"""Divides embedding tables among PSs: computes the number of rows of each table in each PS.

Ids are hashed to buckets, of which each PS owns equally many (up to one), whatever its memory. Capacities are therefore
divided equally, unless the memory of a PS is too small for an equal part. For tables with `spill`, the rows in memory
are divided in this way; their capacity, which the disk bounds, is divided equally.
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
"""Share of a host's memory for rows if tables use the available memory; processes need the rest."""


ADDRESS_SPACE = 1 << 46
"""Bytes of address space for all tables of a PS without a declared capacity: half of a process's on x86-64."""

LEAST_ROWS = 1 << 23
"""Minimum capacity of such a table: with less, its shards and admission sketches would be smaller."""


class Shares(NamedTuple):
    """Maximum rows of each table in a PS, by name.

    Attributes:
        capacities: rows in total, of tables with a declared capacity.
        memory_rows: rows in memory, of tables with `spill`.
    """

    capacities: dict[str, int]
    memory_rows: dict[str, int]


def divide_tables(
    tables: Mapping[str, Table],
    optimizer: EmbeddingOptimizer,
    memory: Sequence[Memory | None],
    overcommit: bool = False,
) -> list[Shares]:
    """Divides the tables among PSs: `divide` for the rows in memory, and equal parts of the rows on disk.

    A table with `spill` but without `memory_rows` gets the memory that other tables leave, out of nine tenths of the
    memory, or of all memory set aside for rows. Several such tables get equal parts, but no more than all their rows
    need. If the capacity is not declared either, half of a part is for the index. `persia plan` also uses this
    function.

    Args:
        tables: tables by name.
        optimizer: optimizer of tables that declare none.
        memory: memory by PS, as for `divide`; must be known if a table uses the available memory.
        overcommit: whether to accept tables that do not fit.

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
            own_rows = rows[rank][size.name]
            if not size.spills:
                share.capacities[size.name] = own_rows
                continue
            share.memory_rows[size.name] = own_rows
            if size.capacity is not None:
                share.capacities[size.name] = max(own_rows, whole[rank], min(size.capacity, MIN_SHARE))
    return shares


def divide_here(
    tables: Mapping[str, Table], optimizer: EmbeddingOptimizer, count: int, overcommit: bool = False
) -> list[Shares]:
    """Divides tables among PSs in this process; see `divide_tables`.

    Args:
        tables: tables by name.
        optimizer: optimizer of tables that declare none.
        count: number of PSs.
        overcommit: whether to accept capacities that exceed the memory of this host.
    """
    return divide_tables(tables, optimizer, [host_memory().shared(count)] * count, overcommit)


def table_sizes(tables: Mapping[str, Table], optimizer: EmbeddingOptimizer, shares: Shares) -> list[TableSize]:
    """Returns the sizes of the shares of a PS; tables that use the available memory have none."""
    sizes = []
    for name, table in tables.items():
        rows = (shares.capacities if table.spill is None else shares.memory_rows).get(name)
        if rows is not None:
            size = size_of(table, optimizer, rows)
            sizes.append(size._replace(capacity=shares.capacities.get(name) if size.spills else None))
    return sizes


def rows_of_undeclared(
    tables: Mapping[str, Table], optimizer: EmbeddingOptimizer, memory: Memory | None
) -> dict[str, int]:
    """Returns the capacity in a PS of tables without a declared capacity, by name; only address space is reserved.

    The capacity exceeds the memory of the host, but is bounded: a few hundred tables with capacity for 2^30 rows each
    would exceed the address space of a process. Declare the capacity of larger tables.

    Args:
        tables: tables by name.
        optimizer: optimizer of tables that declare none.
        memory: memory of the host; None if the result must not depend on it, as for regions, to which another host may
            attach.
    """
    names = [name for name, table in tables.items() if table.capacity is None and table.spill is None]
    rows = {}
    for name in names:
        row_bytes = size_of(tables[name], optimizer, 0).row_bytes
        most = ADDRESS_SPACE // len(names)
        held_bytes = most if memory is None else 2 * memory.total  # Twice, as no limit counts swapped-out memory.
        rows[name] = min(TableConfig.capacity, max(LEAST_ROWS, min(most, held_bytes) // row_bytes))
        if most < held_bytes and rows[name] < TableConfig.capacity:
            LOG.warning(
                "Table %r has a capacity of %d rows, a share of the address space of a process; declare the `capacity` "
                "of tables that may have more.", name, rows[name],
            )  # fmt: skip
    return rows


def _chosen_sizes(
    tables: Mapping[str, Table],
    optimizer: EmbeddingOptimizer,
    declared: Sequence[TableSize],
    memory: Sequence[Memory | None],
) -> list[TableSize]:
    """Returns the sizes of tables with `spill` but without `memory_rows`."""
    count = len(memory)
    known = sum(
        each.total if each.for_rows else math.floor(each.total * MEMORY_SHARE) for each in memory if each is not None
    )
    left = max(0, known - needed_bytes(declared, count))
    takers = [table for table in tables.values() if takes_what_it_finds(table)]
    limits = [
        needed_bytes([size_of(table, optimizer, table.capacity)], count) if table.capacity else left for table in takers
    ]
    chosen = []
    for table, part in zip(takers, water_level(limits, left), strict=True):
        if table.spill is not None:
            size = size_of(table, optimizer, 0)
            index = count * size.index_bytes(count)
            rows = (part - index if size.capacity is not None else part / 2) // size.own_bytes
            most = size.capacity or count * TableConfig.capacity
            chosen.append(size._replace(rows=min(most, max(rows, count * MIN_SHARE))))
    return chosen


def divide(sizes: Sequence[TableSize], memory: Sequence[Memory | None]) -> list[dict[str, int]]:
    """Divides the rows in memory among PSs.

    The shares of a table add up to its capacity and differ by at most one row. A PS whose memory is too small for an
    equal share gets what fits, the same fraction of each table, and the others get the rest; a warning names the PS, as
    it evicts rows before the others are full. A share is never below 1,024 rows, or the capacity if that is less; all
    PSs together may hold more than the capacity of tables with fewer than 1,024 rows per PS.

    Args:
        sizes: sizes of the tables.
        memory: part of the memory of its host for each PS; None if there is enough.

    Returns:
        Rows of each table in memory, by PS.

    Raises:
        ConfigError: the memory of all PSs together is too small, or the memory of one PS for the least shares, or a PS
            has too few row numbers; the message has the numbers.
    """
    count = len(memory)
    index = sum(size.index_bytes(count) for size in sizes)
    least = least_bytes(sizes) + index
    for rank, each in enumerate(memory):
        if each is not None and each.total < least:
            raise too_little(sizes, rank, each, least)
    small = [size for size in sizes if size.rows <= count * MIN_SHARE]
    large = [size for size in sizes if size.rows > count * MIN_SHARE]
    fixed = index + sum(min(size.rows, MIN_SHARE) * size.own_bytes for size in small)
    needed = sum(size.rows * size.own_bytes for size in large)
    limits = [needed if each is None else min(needed, max(0, each.total - fixed)) for each in memory]
    if sum(limits) < needed:
        raise too_large(sizes, memory, fixed * count + needed, Fraction(sum(limits), needed))
    parts = water_level(limits, needed)
    _warn_of_unequal(parts, memory)
    shares: list[dict[str, int]] = [{} for _ in memory]
    for size in sizes:
        weights = parts if size.rows > count * MIN_SHARE else [Fraction(1)] * count
        for own_rows, rows in zip(shares, _rounded(size.rows, weights), strict=True):
            own_rows[size.name] = max(rows, min(size.rows, MIN_SHARE))
            whole = size.capacity or size.rows
            share = max(own_rows[size.name], -(-whole // count))
            if share > MAX_ROWS:
                raise ConfigError(
                    f"Table {size.name!r} has a capacity of {whole:,} rows, {share:,} for one of {count} embedding "
                    f"PSs; a PS numbers at most {MAX_ROWS:,} rows of a table. Lower `capacity`, or use "
                    f"{math.ceil(whole / MAX_ROWS)} PSs or more.",
                    field="capacity",
                    table=size.name,
                )
    return shares


def _rounded(rows: int, weights: Sequence[Fraction]) -> list[int]:
    """Returns whole numbers in the ratio of the weights that add up to `rows` (largest remainders, then first ones)."""
    total = sum(weights)
    exact = [rows * weight / total for weight in weights]
    whole = [math.floor(each) for each in exact]
    order = sorted(range(len(exact)), key=lambda number: whole[number] - exact[number])
    for number in order[: rows - sum(whole)]:
        whole[number] += 1
    return whole


def _warn_of_unequal(parts: Sequence[Fraction], memory: Sequence[Memory | None]) -> None:
    """Warns of PSs with less than an equal part: ids are hashed equally, so they evict while others have space."""
    equal = Fraction(sum(parts), len(parts))
    short = [
        (rank, part, own) for rank, (part, own) in enumerate(zip(parts, memory, strict=True)) if part < equal and own
    ]
    if short:
        named = [
            f"PS {rank} has {text_of_bytes(own.total)} ({own.limit}) and keeps {float(100 * part / equal):.4g} % of one"
            for rank, part, own in short[:NAMED]
        ]
        if len(short) > NAMED:
            named.append(f"{len(short) - NAMED} other PSs")
        LOG.warning(
            "The memory of some embedding PSs is too small for an equal share of the tables: %s. Each PS owns an equal "
            "part of the ids, so these evict rows while the others have space. Place PSs on hosts with equal memory, "
            "or lower `capacity` to %.3f %% of what is declared.",
            "; ".join(named), math.floor(100_000 * min(parts) / equal) / 1000,
        )  # fmt: skip
