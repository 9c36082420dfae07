"""Sizes of embedding tables: bytes per row, and memory of several PSs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

import msgspec

from persia.ps.table_configs import table_config
from persia.schema import EmbeddingOptimizer, Table
from persia.store import COLD_ROW_BYTES, ROW_OVERHEAD, TableConfig
from persia.types.half_floats import Dtype

__all__ = [
    "MIN_SHARE",
    "TableSize",
    "declared_sizes",
    "least_bytes",
    "needed_bytes",
    "size_of",
    "takes_what_it_finds",
    "text_of_bytes",
    "water_level",
]

MIN_SHARE = 1024
"""Minimum rows of a share: with fewer, chance would decide which PS is full first, and the memory is negligible."""


class TableSize(NamedTuple):
    """Maximum size of a table with a declared capacity, or with rows on disk.

    Attributes:
        name: name of the table.
        rows: rows in memory, of the whole cluster or of one PS; the capacity, unless there are rows on disk.
        row_bytes: maximum memory of a row, with optimizer state, key, counters and its share of the index.
        dim: number of values of the embedding.
        state: number of values of optimizer state.
        dtype: dtype of the embedding.
        state_dtype: dtype of the optimizer state.
    """

    name: str
    rows: int
    row_bytes: int
    dim: int
    state: int
    dtype: Dtype = "float32"
    state_dtype: Dtype = "float32"
    capacity: int | None = None
    """Declared capacity of a table with rows on disk; None for other tables, or if it declares none."""
    spills: bool = False
    """Whether the table has rows on disk."""

    @property
    def bytes(self) -> int:
        """Maximum memory of all rows, with the index of the rows on disk."""
        return self.rows * self.own_bytes + (self.capacity or 0) * COLD_ROW_BYTES

    @property
    def own_bytes(self) -> int:
        """Memory of a row in memory minus that of a row on disk; all of it if the number of rows on disk is unknown."""
        return self.row_bytes - (COLD_ROW_BYTES if self.capacity is not None else 0)

    def index_bytes(self, count: int) -> int:
        """Returns the memory of the index in each of `count` PSs, for an equal share of rows in memory and on disk."""
        return -(-(self.capacity or 0) // count) * COLD_ROW_BYTES

    def __str__(self) -> str:
        width, state_width = (4 if dtype == "float32" else 2 for dtype in (self.dtype, self.state_dtype))
        parts = f"{width} x dim {self.dim}, {state_width} x {self.state} of optimizer state, {ROW_OVERHEAD} of overhead"
        rows = f"{self.rows:,} rows of {self.row_bytes:,} bytes ({parts})"
        if self.capacity is not None:
            rows += f" and {self.capacity - self.rows:,} rows on disk of {COLD_ROW_BYTES} bytes"
        return f"table {self.name!r}: {rows} = {text_of_bytes(self.bytes)}"


def declared_sizes(tables: Mapping[str, Table], optimizer: EmbeddingOptimizer) -> list[TableSize]:
    """Returns the maximum sizes of tables with a declared capacity, or, if they have `spill`, declared `memory_rows`.

    Other tables use the available memory; see `divide_tables`.

    Args:
        tables: tables by name.
        optimizer: optimizer of tables that declare none.
    """
    sizes = []
    for table in tables.values():
        rows = table.capacity if table.spill is None else table.memory_rows
        if rows is not None:
            sizes.append(size_of(table, optimizer, rows))
    return sizes


def size_of(table: Table, optimizer: EmbeddingOptimizer, rows: int) -> TableSize:
    """Returns the size of a table with `rows` rows in memory."""
    config = _config(table, optimizer)
    kinds = (config.dtype, config.state_dtype)
    spills = table.spill is not None
    capacity = table.capacity if spills else None
    return TableSize(
        table.name, rows, config.row_bytes, config.dim, config.state_width, *kinds, capacity=capacity, spills=spills
    )


def _config(table: Table, optimizer: EmbeddingOptimizer) -> TableConfig:
    """Returns a configuration that determines the size of a row."""
    return table_config(msgspec.structs.replace(table, optimizer=table.optimizer_or(optimizer)), 0, None)


def takes_what_it_finds(table: Table) -> bool:
    """Returns whether a table declares no bound for its rows in memory, and uses the available memory."""
    return (table.capacity if table.spill is None else table.memory_rows) is None


def least_bytes(sizes: Sequence[TableSize]) -> int:
    """Returns the memory of the least shares of a PS, without the index of rows on disk."""
    return sum(min(size.rows, MIN_SHARE) * size.own_bytes for size in sizes)


def needed_bytes(sizes: Sequence[TableSize], count: int) -> int:
    """Returns the least total memory of `count` equal PSs that `divide` accepts."""
    return sum(
        count * size.index_bytes(count) + max(size.rows, count * min(size.rows, MIN_SHARE)) * size.own_bytes
        for size in sizes
    )


def water_level(limits: Sequence[int], total: int) -> list[Fraction]:
    """Divides `total` into equal parts up to the limits; the excess over a limit goes to the other parts.

    Args:
        limits: maximum of each part. If their sum is below `total`, they are the parts.
        total: sum of the parts.
    """
    parts = [Fraction(limit) for limit in limits]
    left = total
    order = sorted(range(len(limits)), key=limits.__getitem__)
    for place, number in enumerate(order):
        level = Fraction(left, len(limits) - place)
        if limits[number] >= level:
            for other in order[place:]:
                parts[other] = level
            break
        left -= limits[number]
    return parts


def text_of_bytes(count: int) -> str:
    """Formats a number of bytes in MiB, GiB or TiB."""
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB")):
        if count >= unit:
            return f"{count / unit:,.1f} {name}"
    return f"{count / (1 << 20):,.1f} MiB"
