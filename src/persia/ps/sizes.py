"""Sizes of embedding tables: bytes per row, rows of each PS, and whether they fit into memory.

Ids are hashed to PSs, so each PS owns an equal part of the ids, whatever its memory. Capacities are therefore divided
equally, and unequally only as far as the memory of a PS is too small for an equal part. Of a table with `spill`, the
rows in memory are divided so; its capacity, which the disk bounds, is divided equally.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

import msgspec

from persia.errors import ConfigError
from persia.memory import Memory, host_memory
from persia.ps.tables import table_config
from persia.schema import EmbeddingOptimizer, Table
from persia.store import COLD_ROW_BYTES, MAX_ROWS, ROW_OVERHEAD, TableConfig
from persia.types.values import Dtype

__all__ = [
    "MEMORY_SHARE",
    "MIN_SHARE",
    "Shares",
    "TableSize",
    "check_free",
    "check_share",
    "declared_sizes",
    "divide",
    "divide_here",
    "divide_tables",
    "fits_disk",
    "needed_bytes",
    "table_sizes",
    "text_of_bytes",
    "water_level",
]

MIN_SHARE = 1024
"""Rows below which a share is not reduced: chance would decide which PS is full first, and the memory is negligible."""

LITTLE = 256 << 20
NAMED = 4
"""Maximum number of tables or PSs in a message."""
ATTEMPTS = 100
MEMORY_SHARE = Fraction(9, 10)
"""Share of a host's memory for rows, where tables take what they find: processes need some for themselves."""
DISK_RESERVE = Fraction(3, 2)
"""Bytes on disk by bytes of rows there: up to a third of the records wait to be overwritten."""

log = logging.getLogger("persia.ps")


class Shares(NamedTuple):
    """Rows that a PS keeps of each table, by name.

    Attributes:
        capacities: of tables with a declared capacity, rows in all.
        memory_rows: of tables with `spill`, rows in memory.
    """

    capacities: dict[str, int]
    memory_rows: dict[str, int]


class TableSize(NamedTuple):
    """Maximum size of a table with a declared capacity, or with rows on disk.

    Attributes:
        name: of the table.
        rows: in memory, of the whole cluster or of one PS: its capacity, unless there are rows on disk.
        row_bytes: maximum memory of a row, with optimizer state, key, counters and its share of the index.
        dim: values of the embedding.
        state: values of optimizer state.
        dtype: of the embedding.
        state_dtype: of the optimizer state.
    """

    name: str
    rows: int
    row_bytes: int
    dim: int
    state: int
    dtype: Dtype = "float32"
    state_dtype: Dtype = "float32"
    capacity: int | None = None
    """Of a table with rows on disk, its rows in all; None for one without, or if it declares none."""
    spills: bool = False
    """Whether it has rows on disk."""

    @property
    def bytes(self) -> int:
        """Maximum memory of all rows, with the index of those on disk."""
        return self.rows * self.own_bytes + (self.capacity or 0) * COLD_ROW_BYTES

    @property
    def own_bytes(self) -> int:
        """Memory by which a row in memory exceeds one on disk; all of it, if the number of those is not known."""
        return self.row_bytes - (COLD_ROW_BYTES if self.capacity is not None else 0)

    def index_bytes(self, count: int) -> int:
        """Returns the memory that each of `count` PSs needs for its equal share of rows, wherever they are."""
        return -(-(self.capacity or 0) // count) * COLD_ROW_BYTES

    def __str__(self) -> str:
        width, state_width = (4 if dtype == "float32" else 2 for dtype in (self.dtype, self.state_dtype))
        parts = f"{width} x dim {self.dim}, {state_width} x {self.state} of optimizer state, {ROW_OVERHEAD} of overhead"
        rows = f"{self.rows:,} rows of {self.row_bytes:,} bytes ({parts})"
        if self.capacity is not None:
            rows += f" and {self.capacity - self.rows:,} rows on disk of {COLD_ROW_BYTES} bytes"
        return f"table {self.name!r}: {rows} = {text_of_bytes(self.bytes)}"


def declared_sizes(tables: Mapping[str, Table], optimizer: EmbeddingOptimizer) -> list[TableSize]:
    """Returns the maximum sizes of the tables that declare a capacity, or the rows in memory of those with `spill`.

    The others take what memory they find; see `divide_tables`.

    Args:
        tables: by name.
        optimizer: of tables that declare none.
    """
    found = []
    for table in tables.values():
        rows = table.capacity if table.spill is None else table.memory_rows
        if rows is not None:
            found.append(_size(table, optimizer, rows))
    return found


def _size(table: Table, optimizer: EmbeddingOptimizer, rows: int) -> TableSize:
    """Returns the size of a table with so many rows in memory."""
    config = _config(table, optimizer)
    kinds = (config.dtype, config.state_dtype)
    spills = table.spill is not None
    capacity = table.capacity if spills else None
    return TableSize(
        table.name, rows, config.row_bytes, config.dim, config.state_width, *kinds, capacity=capacity, spills=spills
    )


def _config(table: Table, optimizer: EmbeddingOptimizer) -> TableConfig:
    """Returns what decides the size of a row."""
    return table_config(msgspec.structs.replace(table, optimizer=table.optimizer or optimizer), 0, None)


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


def table_sizes(tables: Mapping[str, Table], optimizer: EmbeddingOptimizer, shares: Shares) -> list[TableSize]:
    """Returns the sizes of the shares of a PS; tables that take what memory they find have none."""
    found = []
    for name, table in tables.items():
        rows = (shares.capacities if table.spill is None else shares.memory_rows).get(name)
        if rows is not None:
            size = _size(table, optimizer, rows)
            found.append(size._replace(capacity=shares.capacities.get(name) if size.spills else None))
    return found


def takes_what_it_finds(table: Table) -> bool:
    """Returns whether a table says neither how many rows it has in memory nor how many there are."""
    return (table.capacity if table.spill is None else table.memory_rows) is None


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
        needed_bytes([_size(table, optimizer, table.capacity)], count) if table.capacity else left for table in takers
    ]
    found = []
    for table, part in zip(takers, water_level(wholly, left), strict=True):
        if table.spill is not None:
            size = _size(table, optimizer, 0)
            index = count * size.index_bytes(count)
            rows = (part - index if size.capacity is not None else part / 2) // size.own_bytes
            most = size.capacity or count * TableConfig.capacity
            found.append(size._replace(rows=min(most, max(rows, count * MIN_SHARE))))
    return found


def needed_bytes(sizes: Sequence[TableSize], count: int) -> int:
    """Returns the least memory of `count` PSs with equal parts of it, together, that `divide` accepts."""
    return sum(
        count * size.index_bytes(count) + max(size.rows, count * min(size.rows, MIN_SHARE)) * size.own_bytes
        for size in sizes
    )


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
    least = _least(sizes) + index
    for rank, one in enumerate(memory):
        if one is not None and one.total < least:
            raise _too_little(sizes, rank, one, least)
    small = [size for size in sizes if size.rows <= count * MIN_SHARE]
    large = [size for size in sizes if size.rows > count * MIN_SHARE]
    fixed = index + sum(min(size.rows, MIN_SHARE) * size.own_bytes for size in small)
    wanted = sum(size.rows * size.own_bytes for size in large)
    limits = [wanted if one is None else min(wanted, max(0, one.total - fixed)) for one in memory]
    if sum(limits) < wanted:
        raise _too_large(sizes, memory, fixed * count + wanted, Fraction(sum(limits), wanted))
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


def water_level(limits: Sequence[int], wanted: int) -> list[Fraction]:
    """Returns equal parts of `wanted` up to the limits: what exceeds a limit goes to the others.

    Args:
        limits: the largest parts. If they do not suffice, they are the parts.
        wanted: the sum of the parts.
    """
    parts = [Fraction(limit) for limit in limits]
    left = wanted
    order = sorted(range(len(limits)), key=limits.__getitem__)
    for place, number in enumerate(order):
        level = Fraction(left, len(limits) - place)
        if limits[number] >= level:
            for other in order[place:]:
                parts[other] = level
            break
        left -= limits[number]
    return parts


def _rounded(rows: int, weights: Sequence[Fraction]) -> list[int]:
    """Returns whole numbers in the ratio of the weights that add up to `rows` (largest remainders, then first ones)."""
    total = sum(weights)
    exact = [rows * weight / total for weight in weights]
    found = [math.floor(one) for one in exact]
    order = sorted(range(len(exact)), key=lambda number: found[number] - exact[number])
    for number in order[: rows - sum(found)]:
        found[number] += 1
    return found


def _least(sizes: Sequence[TableSize]) -> int:
    """Returns the memory of the least shares of a PS, without the index of rows on disk."""
    return sum(min(size.rows, MIN_SHARE) * size.own_bytes for size in sizes)


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
        log.warning(
            "The memory of some embedding PSs is too small for an equal share of the tables: %s. Each PS owns an equal "
            "part of the ids, so these evict rows while the others have space. Place PSs on hosts with equal memory, "
            "or lower `capacity` to %.3f %% of what is declared.",
            "; ".join(named), math.floor(100_000 * min(parts) / equal) / 1000,
        )  # fmt: skip


def _enough_servers(sizes: Sequence[TableSize], memory: int) -> int | None:
    """Returns the least number of PSs with this memory each that the tables fit into; None if there is none."""
    count = 1
    for _ in range(ATTEMPTS):  # What is needed grows with the number, as shares have a least size.
        needed = needed_bytes(sizes, count)
        if needed <= count * memory:
            return count
        if memory <= _least(sizes):
            return None
        count = math.ceil(needed / memory)
    return None


def _too_little(sizes: Sequence[TableSize], rank: int, memory: Memory, least: int) -> ConfigError:
    """Returns the error for a PS whose memory does not hold the least shares and the index of rows on disk."""
    cold = least - _least(sizes)
    index = f", and {text_of_bytes(cold)} for the index of rows on disk" if cold else ""
    return ConfigError(
        f"Embedding PS {rank} has {text_of_bytes(memory.total)} of memory ({memory.limit}), but each PS needs "
        f"{text_of_bytes(least)}: for up to {MIN_SHARE:,} rows of each of {len(sizes):,} tables, as it owns an equal "
        f"part of the ids{index}. Do one of: place the PSs on hosts with more memory; use fewer PSs for each host; "
        "declare fewer tables; if the tables will not be full, set `overcommit` of the cluster.",
        field="capacity",
        rank=rank,
        wanted=least,
        memory=memory.total,
    )


def check_share(shares: Sequence[TableSize], memory: Memory) -> None:
    """Checks that the share of a PS fits into the memory of the host that it runs on.

    Args:
        shares: of this PS.
        memory: its part of the memory of this host.

    Raises:
        ConfigError: the share does not fit. `divide` was given the memory of another host.
    """
    wanted = sum(size.bytes for size in shares)
    # Least shares and whole rows may exceed what `divide` was given.
    if wanted > memory.total + _least(shares) + sum(size.row_bytes for size in shares):
        rows = ", ".join(f"{size.rows:,} rows of {size.name!r}" for size in shares[:NAMED])
        more = f" and of {len(shares) - NAMED} other tables" if len(shares) > NAMED else ""
        raise ConfigError(
            f"This host has {text_of_bytes(memory.total)} for an embedding PS ({memory.limit}), but its share of the "
            f"tables needs {text_of_bytes(wanted)}: {rows}{more}. Lower `capacity`, place the PSs on hosts with more "
            "memory, or if the tables will not be full, set `overcommit`.",
            field="capacity",
            wanted=wanted,
            memory=memory.total,
        )


def _too_large(sizes: Sequence[TableSize], memory: Sequence[Memory | None], wanted: int, fits: Fraction) -> ConfigError:
    """Returns the error for tables that do not fit, with what fits and what to change.

    Args:
        sizes: of the tables.
        memory: by PS.
        wanted: bytes of all shares.
        fits: fraction of the tables above the least shares that fits.
    """
    known = [one for one in memory if one is not None]
    total, least = sum(one.total for one in known), min(known)
    largest = sorted(sizes, key=lambda size: -size.bytes)
    named = [f"{size}" for size in largest[:NAMED]]
    if len(largest) > NAMED:
        others = sum(size.bytes for size in largest[NAMED:])
        named.append(f"{len(largest) - NAMED} other tables = {text_of_bytes(others)}")
    servers = "the embedding PS has" if len(memory) == 1 else f"the {len(memory)} embedding PSs together have"
    limit = "memory_rows" if largest[0].spills else "capacity"
    remedies = [
        f"lower `{limit}`, to {math.floor(largest[0].rows * fits):,} for table {largest[0].name!r} and others alike"
    ]
    if not largest[0].spills:
        remedies.append("set `spill` of the tables, for rows on an SSD")
    if (enough := _enough_servers(sizes, least.total)) is not None:
        remedies.append(f"use {enough} PSs with {text_of_bytes(least.total)} each, on other hosts")
    if "size of" in least.limit:
        remedies.append("enlarge that file system")
    remedies.append(
        "choose a smaller dim, dtype = 'bfloat16', or an optimizer with less state: RowwiseAdagrad has one float a row"
    )
    remedies.append("if the tables will not be full, set `overcommit` of the cluster")
    return ConfigError(
        f"The declared capacity of the tables needs {text_of_bytes(wanted)} of memory, and {servers} "
        f"{text_of_bytes(total)} ({least.limit}). {'; '.join(named)}. So {float(100 * fits):.4g} % of the rows fit. "
        f"Do one of: {'; '.join(remedies)}.",
        field="capacity",
        wanted=wanted,
        memory=total,
    )


def check_free(shares: Sequence[TableSize], memory: Memory, place: str | None) -> None:
    """Warns if the share of a PS does not fit into what is free now; rows that come later may find no memory.

    Args:
        shares: of this PS.
        memory: its part of the memory of this host.
        place: directory of its regions; None if rows are in the memory of the process.
    """
    wanted = sum(size.bytes for size in shares)
    where = place or "this host"
    free = f"{where} has {text_of_bytes(memory.free)} free"
    fails = "lookups of new ids fail" if place else "the process is killed"
    remedy = "Free memory, lower the capacity of tables, or use more PSs on other hosts"
    if place:
        remedy += (
            "; or enlarge it (as root: `mount -o remount,size=... /dev/shm`; in a container: `--shm-size`), or set "
            "`regions` to another directory"
        )
    if wanted > memory.free:
        log.warning(
            "%s for an embedding PS, but its tables may grow to %s: when it is full, %s. %s.",
            free, text_of_bytes(wanted), fails, remedy,
        )  # fmt: skip
    elif place and memory.free < LITTLE:
        log.warning("%s: when it is full, %s. %s.", free, fails, remedy)
    else:
        log.info("%s for an embedding PS, %s declared", free, text_of_bytes(wanted))


def fits_disk(sizes: Sequence[TableSize], record_bytes: Mapping[str, int], free: int, place: str) -> bool:
    """Returns whether the rows that a PS may have on a disk fit into what is free there; warns if they do not.

    Args:
        sizes: of the tables with rows there, and a declared capacity: the shares of this PS.
        record_bytes: of a row on disk, by table.
        free: bytes, its part of what is free.
        place: directory, for the message.
    """
    wanted = math.floor(sum((size.capacity or 0) * record_bytes[size.name] for size in sizes) * DISK_RESERVE)
    if wanted > free:
        log.warning(
            "%s has %s free for an embedding PS, but its rows on disk may take %s: %s. When it is full, training "
            "pauses. Free space there, set `spill` to a directory on a larger disk, or lower `capacity`.",
            place, text_of_bytes(free), text_of_bytes(wanted),
            ", ".join(f"{size.capacity:,} rows of {size.name!r}" for size in sizes[:NAMED]),
        )  # fmt: skip
    return wanted <= free


def text_of_bytes(count: int) -> str:
    """Formats a number of bytes in MiB, GiB or TiB."""
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB")):
        if count >= unit:
            return f"{count / unit:,.1f} {name}"
    return f"{count / (1 << 20):,.1f} MiB"
