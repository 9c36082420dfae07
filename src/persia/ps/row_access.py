"""Rows for checkpoints, and writing rows by id, composed of the methods that a store has for checkpoints."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from persia.errors import StoreError
from persia.ps.regions import retry_when_full
from persia.services import RowChunk
from persia.store import EmbeddingStore, Rows, TableConfig
from persia.types import Floats, Ids, RowsSet, RowState
from persia.types.values import LARGEST, to_halves

__all__ = ["RowSetter", "checked_values", "row_chunk", "set_rows"]

KEPT_ANSWERS = 64
"""Number of answers kept for repeated calls: a call is repeated soon, and few callers set rows at the same time."""

MAX_STAMP = 2**32 - 1


class RowSetter:
    """Writes rows of a store, each call once. Safe to call from several threads.

    Args:
        store: with all its tables.
        timeout: seconds to wait for space.
    """

    def __init__(self, store: EmbeddingStore, timeout: float) -> None:
        self._store = store
        self._timeout = timeout
        self._lock = threading.Lock()
        self._answers: OrderedDict[int, RowsSet] = OrderedDict()

    def set(self, call: int, table: int, ids: Ids, values: Floats, state: RowState | None) -> RowsSet:
        """See `persia.services.EmbeddingPS.set_rows`."""
        with self._lock:
            known = self._answers.get(call)
            if known is not None:
                return known
            answer = set_rows(
                self._store, table, ids, values, state, lambda work: retry_when_full(work, self._timeout, "set_rows")
            )
            self._answers[call] = answer
            if len(self._answers) > KEPT_ANSWERS:
                self._answers.popitem(last=False)
            return answer


def set_rows(
    store: EmbeddingStore,
    table: int,
    ids: Ids,
    values: Floats,
    state: RowState | None,
    attempt: Callable[[Callable[[], None]], None] = lambda work: work(),
) -> RowsSet:
    """Writes rows of a table.

    Args:
        store: with the table.
        table: number of the table.
        ids: uint64 `[n]`, distinct.
        values: float32 `[n, dim]`.
        state: None keeps the state of existing rows; new rows get the initial one.
        attempt: calls the work, repeatedly if needed.
    """
    config = store.config(table)
    values = checked_values(config, values)
    found, rows = store.peek(table, ids)
    if state is None:
        rows.state[~found] = config.initial_state
        state = RowState(rows.state, rows.update_count, rows.last_step)
    # Ahead of all clocks, so that a full shard evicts other rows.
    clock = max(int(store.export_state(table, shard)["clocks"][0]) for shard in range(config.resolved_shards))
    stamps = np.full(len(ids), min(clock + 1, MAX_STAMP), np.uint32)
    evicted = store.statistics(table)["evicted"]
    whole = Rows(ids, values, *state, stamps)
    attempt(lambda: store.import_rows(table, whole))
    replaced = int(found.sum())
    return RowsSet(len(ids) - replaced, replaced, store.statistics(table)["evicted"] - evicted)


def row_chunk(config: TableConfig, shard: int, rows: Rows) -> RowChunk:
    """Returns rows of a shard for a checkpoint, embeddings in the dtype of the table."""
    return RowChunk(config.name, shard, {**rows._asdict(), "embeddings": to_halves(rows.embeddings, config.dtype)})


def checked_values(config: TableConfig, values: Floats) -> Floats:
    """Returns values that a table can store.

    Raises:
        StoreError: a finite value exceeds the largest number of the dtype, as beyond 65,504 in float16.
    """
    if config.dtype == "float32":
        return values
    largest = LARGEST[config.dtype]
    finite = np.abs(values[np.isfinite(values)])
    if (most := float(finite.max(initial=0.0))) > largest:
        raise StoreError(
            f"Table {config.name!r}: {most:g} exceeds {largest:g}, the largest number of {config.dtype}; none of these "
            "rows was set. Declare the table with dtype = 'bfloat16' or 'float32'.",
            table=config.name,
        )
    return values
