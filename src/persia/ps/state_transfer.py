"""Exports and imports the rows and the other state of a PS for checkpoints."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from persia.errors import StoreError
from persia.ps.row_chunks import row_chunk
from persia.ps.table_numbers import TableNumbers
from persia.services import RowChunk, StatePiece
from persia.store import EmbeddingStore

__all__ = ["admission_state", "check_admission", "export_rows", "export_state", "import_state", "merge_admission"]

CHUNK_BYTES = 64 << 20
"""Approximate size of an exported chunk. It bounds the memory of a checkpoint, and the time that a shard is locked."""

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


def admission_state(store: EmbeddingStore, tables: Mapping[str, int]) -> Iterator[StatePiece]:
    """Yields the admission sketches of tables that have any, one of each shard.

    Args:
        store: the store of the tables.
        tables: numbers of the tables by name.
    """
    for name, index in tables.items():
        for shard in range(store.config(index).resolved_shards if store.config(index).admission != "all" else 0):
            yield StatePiece(name, shard, "sketch", 0, store.export_state(index, shard)["sketch"])


def check_admission(store: EmbeddingStore, tables: TableNumbers, piece: StatePiece) -> None:
    """Raises StoreError unless a PS has the shard whose sketch a piece is for."""
    shards = store.config(tables.number(piece.table)).resolved_shards
    if piece.array != "sketch" or not 0 <= piece.shard < shards:
        raise StoreError(f"Table {piece.table!r} has no {piece.array!r} of shard {piece.shard}.", table=piece.table)


def merge_admission(store: EmbeddingStore, tables: TableNumbers, pieces: Sequence[StatePiece]) -> list[str]:
    """Raises the counts of admission sketches to those of other PSs. A repeated call has no effect.

    Ids then count at least as often as they were met at any PS, so none is admitted later than it would have been.

    The PS must be quiescent: the record of a push that a shard applies meanwhile is lost, and its repetition would be
    applied again.

    Args:
        store: the store of the tables.
        tables: numbers of the tables.
        pieces: the sketches, from `admission_state` of the other PSs.

    Returns:
        The tables that have sketches of another size here, which follows from their capacity. They are unchanged.
    """
    by_shard: dict[tuple[str, int], list[StatePiece]] = {}
    for piece in pieces:
        by_shard.setdefault((piece.table, piece.shard), []).append(piece)
    others: dict[str, None] = {}
    for (table, shard), group in by_shard.items():
        index = tables.number(table)
        state = store.export_state(index, shard)
        sketch = state["sketch"]
        for piece in group:
            if sketch.shape != piece.values.shape or sketch.dtype != piece.values.dtype:
                others[table] = None
            else:
                np.maximum(sketch, piece.values, out=sketch)
        store.import_state(index, shard, state)
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
