"""Converts rows for checkpoints, and writes rows by id with the checkpoint methods of a store."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from persia.errors import StoreError
from persia.ps.space import SpaceWait
from persia.services import RowChunk
from persia.store import EmbeddingStore, Rows, TableConfig
from persia.types import Floats, Ids, RowsSet, RowState
from persia.types.half_floats import LARGEST, Dtype, from_halves, largest_finite, to_halves

__all__ = ["RowSetter", "chunk_rows", "row_chunk", "set_rows"]

RETAINED_ANSWERS = 64
"""Number of answers retained for repeated calls: calls are repeated soon, and few callers set rows concurrently."""

MAX_STAMP = 2**32 - 1

CHUNK_DTYPES: dict[Dtype, type[np.generic]] = {"float32": np.float32, "bfloat16": np.uint16, "float16": np.float16}
"""Dtype of embeddings in a `RowChunk`, by the dtype of their table."""


class RowSetter:
    """Writes rows of a store, each call once. Safe to call from several threads.

    Args:
        store: the store, with all its tables.
        space: waits for space.
    """

    def __init__(self, store: EmbeddingStore, space: SpaceWait) -> None:
        self._store = store
        self._space = space
        self._lock = threading.Lock()
        self._answers: OrderedDict[int, RowsSet] = OrderedDict()

    def set(self, call: int, table: int, ids: Ids, values: Floats, state: RowState | None) -> RowsSet:
        """See `persia.services.EmbeddingPS.set_rows`."""
        deadline = self._space.deadline()  # Before the lock, which another call may hold while it waits for space.
        with self._lock:
            known = self._answers.get(call)
            if known is not None:
                return known
            answer = set_rows(
                self._store, table, ids, values, state, lambda work: self._space.retry(work, "set_rows", deadline)
            )
            self._answers[call] = answer
            if len(self._answers) > RETAINED_ANSWERS:
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
        store: the store of the table.
        table: number of the table.
        ids: uint64 `[n]`, distinct.
        values: float32 `[n, dim]`.
        state: optimizer state; None keeps the state of existing rows, and new rows get the initial state.
        attempt: calls the work, repeatedly if needed.
    """
    config = store.config(table)
    _check_values(config, values)
    exists, rows = store.peek(table, ids)
    if state is None:
        rows.state[~exists] = config.initial_state
        state = RowState(rows.state, rows.update_count, rows.last_step)
    # Stamps ahead of all clocks, so that a full shard evicts other rows.
    clock = max(int(store.export_state(table, shard)["clocks"][0]) for shard in range(config.resolved_shards))
    stamps = np.full(len(ids), min(clock + 1, MAX_STAMP), np.uint32)
    evicted = store.statistics(table)["evicted"]
    whole = Rows(ids, values, *state, stamps)
    attempt(lambda: store.import_rows(table, whole))
    replaced = int(exists.sum())
    return RowsSet(len(ids) - replaced, replaced, store.statistics(table)["evicted"] - evicted)


def row_chunk(config: TableConfig, shard: int, rows: Rows) -> RowChunk:
    """Returns rows of a shard for a checkpoint, with embeddings in the dtype of the table."""
    return RowChunk(config.name, shard, {**rows._asdict(), "embeddings": to_halves(rows.embeddings, config.dtype)})


def chunk_rows(config: TableConfig, chunk: RowChunk) -> Rows:
    """Returns the rows of a chunk of a checkpoint. State of another optimizer is replaced by the initial state.

    Raises:
        StoreError: a column is missing, embeddings have an unsupported dtype, or the table cannot store a value.
    """
    arrays = dict(chunk.arrays)
    if missing := [name for name in ("ids", "embeddings", "last_step", "stamp") if name not in arrays]:
        raise StoreError(f"Rows of table {config.name!r} lack {', '.join(missing)}.", table=config.name)
    if "state" not in arrays or "update_count" not in arrays or arrays["state"].shape[1:] != (config.state_width,):
        count = len(arrays["ids"])
        arrays["state"] = np.full((count, config.state_width), config.initial_state, np.float32)
        arrays["update_count"] = np.zeros(count, np.uint32)
    actual = arrays["embeddings"].dtype
    dtype = next((dtype for dtype, stored in CHUNK_DTYPES.items() if stored == actual), None)
    if dtype is None:
        raise StoreError(
            f"Table {config.name!r}: embeddings have dtype {actual}; expected float32, float16, or the bits of "
            "bfloat16 as uint16.",
            table=config.name,
        )
    arrays["embeddings"] = from_halves(arrays["embeddings"])
    if LARGEST[dtype] > LARGEST[config.dtype]:
        _check_values(config, arrays["embeddings"])
    return Rows(**{name: arrays[name] for name in Rows._fields})


def _check_values(config: TableConfig, values: Floats) -> None:
    largest = LARGEST[config.dtype]
    if config.dtype != "float32" and (most := largest_finite(values)) > largest:
        raise StoreError(
            f"Table {config.name!r}: {most:g} exceeds {largest:g}, the largest number of {config.dtype}; none of the "
            f"rows of this call was set. Declare the table with dtype = {_wider(most)}.",
            table=config.name,
        )


def _wider(value: float) -> str:
    return " or ".join(repr(dtype) for dtype in ("bfloat16", "float32") if value <= LARGEST[dtype])
