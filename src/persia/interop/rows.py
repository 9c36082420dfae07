"""Moves rows between tensors and tables, in parts of bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from persia.errors import ConfigError, DataError
from persia.nn import EmbeddingCollection
from persia.schema import EmbeddingOptimizer, Table
from persia.types import Floats, Ids, Int64Array, RowsSet, RowState, StoredRows

__all__ = ["Vocabulary", "declared", "located", "read_parts", "set_parts", "table_ids"]

PART_VALUES = 1 << 24
"""Embedding values that are moved at once."""

Vocabulary = ArrayLike | Mapping[Any, int] | None
"""The ids of a weight's rows: a column with the value of each row; the row of each value; None: row i is number i."""


class Located(NamedTuple):
    """Ids, and where their rows are in a weight.

    Attributes:
        ids: uint64 `[n]`, distinct.
        places: int64 `[n]`, indices of rows.
    """

    ids: Ids
    places: Int64Array


def table_ids(collection: EmbeddingCollection, table: str) -> Ids:
    """Returns the ids that have a row, ascending. Reads the rows of all tables from all PSs; blocks.

    Call it while no NN worker trains, else rows of that time may be missing.

    Raises:
        ConfigError: there is no such table.
    """
    declared(collection, table)
    parts = [
        chunk.arrays["ids"]
        for server in collection.connection.servers
        for chunk in server.export_rows()
        if chunk.table == table
    ]
    return np.sort(np.concatenate(parts)) if parts else np.empty(0, np.uint64)


def declared(collection: EmbeddingCollection, table: str) -> tuple[Table, EmbeddingOptimizer]:
    """Returns a table as the schema declares it, and the optimizer of its rows.

    Raises:
        ConfigError: there is no such table.
    """
    tables = collection.schema.resolved_tables()
    if table not in tables:
        raise ConfigError(f"There is no table {table!r}; the schema has {', '.join(tables)}.", field="table")
    return tables[table], tables[table].optimizer or collection.optimizer


def located(
    collection: EmbeddingCollection, table: str, rows: int, vocabulary: Vocabulary, padding: int | None = None
) -> Located:
    """Returns the ids of a weight's rows, without the row of padding.

    Raises:
        DataError: the vocabulary does not fit the weight, a value is not one id, or two values are the same id or row.
    """
    places = np.arange(rows)
    if isinstance(vocabulary, Mapping):
        places = _places(table, list(vocabulary.values()))
        if places.size and not 0 <= places.min() <= places.max() < rows:
            raise DataError(
                f"The vocabulary of table {table!r} has rows {places.min()} to {places.max()}, but the weight has "
                f"{rows}; give the vocabulary that it was trained with.",
                table=table,
            )
        ids = collection.row_ids(table, list(vocabulary))
    else:
        if vocabulary is None:  # Row numbers are ids, unless readers hash numbers as texts.
            features = [f for f in collection.schema.id_features if f.table_name == table]
            vocabulary = places if any(f.kind == "text" for f in features) else places.astype(np.uint64)
        ids = collection.row_ids(table, vocabulary)
    if len(ids) != len(places):
        raise DataError(
            f"Table {table!r}: {len(ids)} values for a weight of {rows} rows; give one value for each row, or a "
            "mapping from value to row.",
            table=table,
        )
    distinct, first = np.unique(ids, return_index=True)
    if len(distinct) != len(ids):
        at = int(np.setdiff1d(np.arange(len(ids)), first)[0])
        raise DataError(
            f"Table {table!r}: the value at position {at} is id {ids[at]}, as an earlier one; give each id one row.",
            table=table,
            row=at,
        )
    kept = places != (-1 if padding is None else padding)
    return Located(ids[kept], places[kept])


def _places(table: str, rows: Sequence[Any]) -> Int64Array:
    """Returns the rows that a mapping names."""
    for row in rows:
        if isinstance(row, bool) or not isinstance(row, int | np.integer):
            raise DataError(
                f"The vocabulary of table {table!r} has the row {row!r}; give an integer for each value.", table=table
            )
    distinct, counts = np.unique(np.array(rows, np.int64), return_counts=True)
    if len(distinct) != len(rows):
        raise DataError(
            f"The vocabulary of table {table!r} has row {distinct[counts > 1][0]} for several values; give each value "
            "a row of its own.",
            table=table,
        )
    return np.array(rows, np.int64)


def set_parts(
    collection: EmbeddingCollection,
    table: str,
    rows: Located,
    weight: Tensor,
    state: Sequence[Tensor] | None,
    update_count: int = 0,
) -> RowsSet:
    """Sets rows of a table to those of a weight; see `EmbeddingCollection.set_rows`.

    Args:
        collection: with the table.
        table: its name.
        rows: ids, and their rows in `weight`.
        weight: `[rows, dim]`, on any device.
        state: of the optimizer, by row: tensors `[rows, width]` or `[rows]`, side by side as in `RowState.values`. None
            keeps that of existing rows; new rows get the initial state.
        update_count: of each row, with `state`.
    """
    done = RowsSet(0, 0, 0)
    for part in _parts(len(rows.ids), weight.shape[1]):
        ids, places = rows.ids[part], torch.from_numpy(rows.places[part])
        values = None
        if state is not None:
            columns = [_taken(column, places).reshape(len(ids), -1) for column in state]
            counts = np.full(len(ids), update_count, np.uint32)
            values = RowState(np.concatenate(columns, axis=1), counts, np.zeros_like(counts))
        part_done = collection.set_rows(table, ids, _taken(weight, places), state=values)
        done = RowsSet(*map(sum, zip(done, part_done, strict=True)))
    return done


def read_parts(
    collection: EmbeddingCollection, table: str, rows: Located, dim: int, state: bool
) -> Iterator[tuple[Tensor, StoredRows]]:
    """Yields those rows that a table has, with the index of each in the weight."""
    for part in _parts(len(rows.ids), dim):
        read = collection.rows(table, rows.ids[part], state=state)
        found, state_of = read.found, read.state
        kept = None
        if state_of is not None:
            kept = RowState(state_of.values[found], state_of.update_count[found], state_of.last_step[found])
        places = torch.from_numpy(rows.places[part][found])
        yield places, StoredRows(read.ids[found], read.found[found], read.values[found], kept)


def _parts(rows: int, dim: int) -> Iterator[slice]:
    most = max(1, PART_VALUES // dim)
    for start in range(0, rows, most):
        yield slice(start, min(start + most, rows))


def _taken(column: Tensor, places: Tensor) -> Floats:
    if column.is_sparse:
        column = column.to_dense()
    taken: Floats = column.detach()[places.to(column.device)].float().cpu().numpy()
    return taken
