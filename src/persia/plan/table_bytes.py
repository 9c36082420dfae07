"""Bytes of tables in memory, on SSD and in checkpoints, computed as in the store (`cpp/include/persia`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import msgspec

from persia.errors import ConfigError
from persia.ps.table_configs import table_config
from persia.schema import EmbeddingOptimizer, IdFeature, Schema, Table
from persia.schema.pooled_features import poolable_features
from persia.store import TableConfig
from persia.types.half_floats import words_of

__all__ = [
    "PlannedTable",
    "TableBytes",
    "bytes_of",
    "disk_row_bytes",
    "index_slots",
    "planned_tables",
]

ROW_HEADER_BYTES = 16
LAST_STEP_BYTES = 4
SLOT_BYTES = 8
FIRST_SLOTS = 64
DOUBLING_SLOTS = 4096
GROWTH, COLD_GROWTH = 3, 8
"""Divisors of the slots by which a large index grows: a third, or an eighth if rows are on SSD."""
SHARD_BYTES = 16384 + 4096
"""Header and undo slot of a shard."""
PAGE_BYTES = 2 << 20
"""Rows and index of a shard each end within a huge page, half of which is unused on average."""

IDS_OF_PARTS = {"minute": 60, "hour": 24, "weekday": 7, "hour_of_week": 168, "day": 31, "week": 53, "month": 12}
"""Possible ids by part of a time."""

BLOCK_BYTES = 64 << 10
RECORD_HEADER_BYTES = 8
RECORD_BITS = 3
"""Bits of memory for each record of the SSD tier."""
LIVE_SHARE = 2 / 3
"""Minimum share of live records in the SSD tier, which compaction maintains."""


class PlannedTable(NamedTuple):
    """A table of a plan.

    Attributes:
        config: configuration of the store of a single PS that has all rows.
        rows: number of rows in the whole cluster.
        table: declaration in the schema, with its optimizer, and a capacity of at least `rows` if it declares one.
        last_steps: whether each row has its last step, as in asynchronous modes.
        poolable: number of features whose values an embedding worker can send in place of rows; 0 if a feature of the
            table is not pooled.
    """

    config: TableConfig
    rows: int
    table: Table
    last_steps: bool = False
    poolable: int = 0

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in memory, without its share of the index."""
        config = self.config
        words = config.row_words + words_of(config.state_dtype, config.state_width)
        return ROW_HEADER_BYTES + 4 * words + (LAST_STEP_BYTES if self.last_steps else 0)

    @property
    def checkpoint_row_bytes(self) -> int:
        """Bytes of a row in a checkpoint: id, embedding, state in float32, and three counters."""
        config = self.config
        return 8 + config.dim * (4 if config.dtype == "float32" else 2) + 4 * config.state_width + 12


class TableBytes(NamedTuple):
    """Bytes of a table in all PSs together.

    Attributes:
        name: name of the table.
        rows: number of rows.
        memory_rows: number of rows in memory; the others are on SSD.
        memory: bytes of memory: rows, index, and the index of rows on SSD.
        disk: bytes on SSD, including dead records that compaction leaves.
        checkpoint: bytes of a checkpoint.
    """

    name: str
    rows: int
    memory_rows: int
    memory: int
    disk: int
    checkpoint: int


def planned_tables(
    schema: Schema, optimizer: EmbeddingOptimizer, rows: Mapping[str, int], asynchronous: bool
) -> list[PlannedTable]:
    """Returns the tables of a schema with their numbers of rows.

    Args:
        schema: the input of the model.
        optimizer: optimizer of tables that declare none.
        rows: number of rows by table; other tables have their declared capacity, or the rows of their buckets and
            parts of times.
        asynchronous: whether the mode records last steps.

    Raises:
        ConfigError: a table has no number of rows, or a named table does not exist.
    """
    tables = schema.resolved_tables()
    if unknown := [name for name in rows if name not in tables]:
        raise ConfigError(
            f"Invalid --rows {unknown[0]}: there is no such table; expected one of: {', '.join(tables)}.", field="rows"
        )
    planned, poolable = [], poolable_features(schema)
    for name, table in tables.items():
        count = rows.get(name, table.capacity)
        count = _bounded_rows(schema, name) if count is None else count
        if count is None:
            raise ConfigError(
                f"The number of rows of table {name!r} is unknown: pass --rows {name}=N, or declare its capacity.",
                field=f"rows.{name}",
            )
        capacity = None if table.capacity is None else max(count, table.capacity)
        table = msgspec.structs.replace(table, optimizer=table.optimizer_or(optimizer), capacity=capacity)
        config, features = table_config(table, 0, None), len(poolable.get(name, []))
        planned.append(PlannedTable(config, count, table, asynchronous, features))
    return planned


def _bounded_rows(schema: Schema, table: str) -> int | None:
    """Returns the most rows of a table whose features all have few possible ids; None for another table."""
    counts = [_bounded_ids(feature) for feature in schema.id_features if feature.table_name == table]
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _bounded_ids(feature: IdFeature) -> int | None:
    filled = feature.fill is not None
    if feature.time is not None:
        count = IDS_OF_PARTS.get(feature.time.part)
        return None if count is None else count + filled
    if feature.bucketize is None or feature.bucketize.width is not None:
        return None
    edges = feature.bucketize.edges
    return (feature.bucketize.quantiles or 1 if edges is None else len(edges) + 1) + filled


def index_slots(rows: int, capacity: int, growth: int = GROWTH) -> int:
    """Returns the slots of a shard's index with n rows. It grows at a load of 80 %, by a fraction once it is large.

    Follows `Index::grown` in `cpp/include/persia/index.hpp`.
    """
    most = (capacity + capacity // 4 + 64 + 7) // 8 * 8
    slots = min(FIRST_SLOTS, most)
    while slots * 4 // 5 < rows and slots < most:
        slots = min(most, slots * 2 if slots < DOUBLING_SLOTS else (slots + slots // growth) // 8 * 8)
    return slots


def disk_row_bytes(table: PlannedTable) -> float:
    """Returns the bytes of SSD per row: records are packed in blocks, of which compaction keeps two thirds live."""
    record = RECORD_HEADER_BYTES + table.row_bytes - (LAST_STEP_BYTES if table.last_steps else 0)
    per_block = BLOCK_BYTES // record
    packed = BLOCK_BYTES / per_block if per_block else math.ceil(record / 4096) * 4096
    return packed / LIVE_SHARE


def bytes_of(table: PlannedTable, servers: int, memory_rows: int | None = None) -> TableBytes:
    """Returns the bytes of a table.

    Args:
        table: the table.
        servers: number of PSs that share it.
        memory_rows: maximum rows in memory of the whole cluster, for a table with rows on SSD; None for others.
    """
    hot = table.rows if memory_rows is None else min(table.rows, memory_rows)
    cold = table.rows - hot
    most = table.table.capacity
    share = math.ceil(table.rows / servers)
    capacity = max(share, TableConfig.capacity if most is None else math.ceil(most / servers))
    config = replace(table.config, capacity=capacity)
    if memory_rows is not None:
        config = replace(config, memory_rows=min(capacity, max(1, math.ceil(memory_rows / servers))))
    shards = servers * config.resolved_shards
    # Rows on SSD have their slots in the same index.
    growth = GROWTH if memory_rows is None else COLD_GROWTH
    slots = index_slots(math.ceil(table.rows / shards), math.ceil(capacity / config.resolved_shards), growth) * shards
    bits = RECORD_BITS / 8 / LIVE_SHARE  # Of memory, per live record.
    unused = sum(PAGE_BYTES // 2 for size in (slots * SLOT_BYTES, hot * table.row_bytes) if size > shards * PAGE_BYTES)
    return TableBytes(
        table.config.name,
        table.rows,
        hot,
        shards * (SHARD_BYTES + unused) + slots * SLOT_BYTES + hot * table.row_bytes + math.ceil(cold * bits),
        math.ceil(cold * disk_row_bytes(table)),
        table.rows * table.checkpoint_row_bytes,
    )
