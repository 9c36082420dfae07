"""Exports and imports the rows and the other state of a PS for checkpoints."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from persia.errors import StoreError
from persia.ps.row_chunks import row_chunk
from persia.ps.table_numbers import TableNumbers
from persia.services import MovedCounts, RowChunk, StatePiece
from persia.store import EmbeddingStore

__all__ = ["admission_counts", "check_counts", "export_rows", "export_state", "import_state", "merge_admission"]

CHUNK_BYTES = 64 << 20
"""Approximate size of an exported chunk. It bounds the memory of a checkpoint, and the time that a shard is locked."""

COUNTERS = 64
"""Counters in a block of an admission sketch that is left out if all are 0: each id has four, at places by its hash."""

MOST_PIECES = 1000
"""Maximum number of pieces of state in one list, as the size of a message is limited."""


def export_rows(store: EmbeddingStore, tables: Iterable[int]) -> Iterator[RowChunk]:
    """Yields all rows of tables, in chunks of about 64 MiB; each row is consistent.

    Args:
        store: the store of the tables.
        tables: numbers of the tables.
    """
    for index in tables:
        config = store.config(index)
        most = max(1, CHUNK_BYTES // (24 + 4 * (config.dim + config.state_width)))
        for shard, rows in store.iterate_rows(index, max_rows=most):
            yield row_chunk(config, shard, rows)


def export_state(store: EmbeddingStore, tables: Mapping[str, int]) -> Iterator[list[StatePiece]]:
    """Yields the state besides rows in lists of about 64 MiB; see `EmbeddingServer.export_state`.

    Args:
        store: the store of the tables.
        tables: numbers of the tables by name.
    """
    pieces: list[StatePiece] = []
    nbytes = 0
    for piece in _pieces(store, tables):
        if pieces and (nbytes + piece.values.nbytes > CHUNK_BYTES or len(pieces) >= MOST_PIECES):
            yield pieces
            pieces, nbytes = [], 0
        pieces.append(piece)
        nbytes += piece.values.nbytes
    if pieces:
        yield pieces


def import_state(store: EmbeddingStore, tables: TableNumbers, pieces: Sequence[StatePiece]) -> None:
    """Imports state after the rows; see `EmbeddingServer.import_state`.

    Args:
        store: the store of the tables.
        tables: numbers of the tables.
        pieces: pieces of the state.
    """
    for (name, shard), group in itertools.groupby(pieces, key=lambda piece: (piece.table, piece.shard)):
        index = tables.number(name)
        if not 0 <= shard < store.config(index).resolved_shards:
            raise StoreError(f"Table {name!r} has no shard {shard}; use the same shards.", table=name)
        state = store.export_state(index, shard)
        for piece in group:
            array = state.get(piece.array) if piece.array != "clients" else None
            end = piece.start + len(piece.values)
            if array is None or piece.start < 0 or end > len(array) or piece.values.dtype != array.dtype:
                raise StoreError(
                    f"Table {name!r}: {piece.array!r} of shard {shard} has no {piece.values.dtype} values from "
                    f"{piece.start} to {end}; use the same capacity, shards and admission.",
                    table=name,
                )
            array[piece.start : end] = piece.values
        store.import_state(index, shard, state)


def admission_counts(store: EmbeddingStore, tables: Mapping[str, int]) -> Iterator[MovedCounts]:
    """Yields the counts of the admission sketches of tables that have any, shard by shard.

    A sketch has up to 8 MiB, even if few ids were met: blocks of counters that are all 0 are left out, and shards
    without any others.

    Args:
        store: the store of the tables.
        tables: numbers of the tables by name.
    """
    for name, index in tables.items():
        shards = store.config(index).resolved_shards
        for shard in range(shards) if store.config(index).admission != "all" else ():
            sketch = store.export_state(index, shard)["sketch"]
            blocks = sketch.reshape(-1, COUNTERS)
            used = np.flatnonzero(blocks.any(axis=1))
            if len(used):
                yield MovedCounts(name, shard, shards, len(sketch), used.astype(np.uint32), blocks[used])


def check_counts(tables: TableNumbers, counts: MovedCounts) -> None:
    """Raises StoreError unless a PS has the table of counts, and their blocks are those of a sketch."""
    tables.number(counts.table)
    blocks, values = counts.blocks, counts.counts
    if (
        not 0 <= counts.shard < counts.shards
        or blocks.dtype != np.uint32
        or values.dtype != np.uint16
        or values.ndim != 2
        or blocks.shape != values.shape[:1]
        or not values.size
        or counts.counters % values.shape[1]
        or int(blocks.max()) >= counts.counters // values.shape[1]
    ):
        raise StoreError(
            f"Admission counts of table {counts.table!r} need a shard, blocks uint32 [n] within its sketch and counts "
            "uint16 [n, counters in a block].",
            table=counts.table,
        )


def merge_admission(store: EmbeddingStore, tables: TableNumbers, state: Sequence[MovedCounts]) -> list[str]:
    """Raises the counts of admission sketches to those of other PSs. A repeated call has no effect.

    Ids then count at least as often as they were met at any PS, so none is admitted later than it would have been.

    The PS must be quiescent: the record of a push that a shard applies meanwhile is lost, and its repetition would be
    applied again.

    Args:
        store: the store of the tables.
        tables: numbers of the tables.
        state: the counts, from `admission_counts` of the other PSs and checked by `check_counts`.

    Returns:
        The tables that have another number of shards here, or sketches of another size, which follow from their
        capacity. They are unchanged.
    """
    by_shard: dict[tuple[str, int], list[MovedCounts]] = {}
    others: dict[str, None] = {}
    for counts in state:
        if counts.shards == store.config(tables.number(counts.table)).resolved_shards:
            by_shard.setdefault((counts.table, counts.shard), []).append(counts)
        else:
            others[counts.table] = None
    for (table, shard), group in by_shard.items():
        index = tables.number(table)
        before = store.export_state(index, shard)
        sketch = before["sketch"]
        for counts in group:
            if len(sketch) != counts.counters:
                others[table] = None
            else:
                blocks = sketch.reshape(-1, counts.counts.shape[1])  # A view.
                blocks[counts.blocks] = np.maximum(blocks[counts.blocks], counts.counts)
        store.import_state(index, shard, before)
    return list(others)


def _pieces(store: EmbeddingStore, tables: Mapping[str, int]) -> Iterator[StatePiece]:
    for name, index in tables.items():
        for shard in range(store.config(index).resolved_shards):
            for array, values in store.export_state(index, shard).items():
                if array == "clients" or (array == "ages" and not store.config(index).ttl):
                    continue
                most = CHUNK_BYTES // values.itemsize
                for start in range(0, len(values), most):
                    yield StatePiece(name, shard, array, start, values[start : start + most])
