"""The embedding parameter server (Persia paper, section 4.2.2): the rows of a partition, and their optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from persia.errors import ConfigError, StoreError
from persia.modes import Aggregation, Mode
from persia.schema import EmbeddingOptimizer, Schedule, Table
from persia.services import RowChunk
from persia.store import EmbeddingStore, TableConfig
from persia.types import Floats, Ids, UpdateCounts

__all__ = ["EmbeddingServer"]

CHUNK_BYTES = 64 << 20


class EmbeddingServer:
    """Owns the rows of all tables. Safe to call from several threads; calls block for the work they do.

    Args:
        tables: by name; tables without an optimizer of their own get `optimizer`.
        optimizer: the default.
        mode: decides what happens to arriving gradients.
        seed: of row initialisation and admission.
        threads: threads that share the work of a call, over tables and their shards.
    """

    def __init__(
        self, tables: Mapping[str, Table], optimizer: EmbeddingOptimizer, mode: Mode, seed: int, threads: int
    ) -> None:
        self._mode = mode
        self._store = EmbeddingStore(threads)
        self._tables = {
            name: msgspec.structs.replace(table, optimizer=table.optimizer or optimizer)
            for name, table in tables.items()
        }
        shards = shards_for(threads, len(tables))
        self._index = {
            name: self._store.create_table(table_config(table, seed, shards)) for name, table in self._tables.items()
        }

    def tables(self) -> Mapping[str, Table]:
        """The tables by name, their optimizers filled in."""
        return self._tables

    def lookup(self, ids: Mapping[str, Ids], train: bool) -> dict[str, Floats]:
        """Rows of distinct ids, by table; see `persia.services.EmbeddingPS`."""
        rows = self._store.lookup([self._number(name) for name in ids], list(ids.values()), train)
        return dict(zip(ids, rows, strict=True))

    def push(
        self, client: int, sequence: int, step: int, gradients: Mapping[str, tuple[Ids, Floats]]
    ) -> dict[str, UpdateCounts]:
        """Applies gradients, once per (client, sequence); see `persia.services.EmbeddingPS`."""
        if self._mode.aggregate(arrived=1, nn_workers=1) is not Aggregation.APPLY:
            raise ConfigError(f"Mode {self._mode!r} holds gradients back, which needs several NN workers.")
        counts = self._store.update(
            [self._number(name) for name in gradients],
            [ids for ids, _ in gradients.values()],
            [values for _, values in gradients.values()],
            [learning_rate(self._tables[name], step) for name in gradients],
            step,
            client,
            sequence,
        )
        return dict(zip(gradients, counts, strict=True))

    def statistics(self) -> dict[str, dict[str, int]]:
        """Counters by table."""
        return {name: dict(self._store.statistics(index)) for name, index in self._index.items()}

    def _number(self, table: str) -> int:
        index = self._index.get(table)
        if index is None:
            raise StoreError(
                f"There is no table {table!r}; this server has {', '.join(self._index)}. "
                "Train and serve with the same schema.",
                table=table,
            )
        return index


def shards_for(threads: int, tables: int) -> int:
    """Shards per table: enough for the threads to share one table, few enough not to cut small batches to pieces."""
    shards = 1
    while shards < 2 * threads and shards * tables < 16 * threads:
        shards *= 2
    return shards


def learning_rate(table: Table, step: int) -> float:
    """The learning rate of a table at a global step."""
    assert table.optimizer is not None
    schedule: Schedule | None = table.optimizer.schedule
    return table.optimizer.lr * (schedule.factor(step) if schedule is not None else 1.0)
