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
"""Maximum number of embedding values in a part."""

Vocabulary = ArrayLike | Mapping[Any, int] | None
"""Ids of a weight's rows: the value of each row, or a mapping from value to row; None: row i belongs to number i."""


class Located(NamedTuple):
    """Ids and the positions of their rows in a weight.

    Attributes:
        ids: uint64 `[n]`, distinct.
        places: int64 `[n]`, indices of rows.
    """

    ids: Ids
    places: Int64Array


def table_ids(collection: EmbeddingCollection, table: str) -> Ids:
    """Returns the ids that have a row, ascending. Reads the rows of all tables from all PSs; blocks.

    Call it while no NN worker trains; otherwise new rows may be missing.

    Raises:
        ConfigError: the table does not exist.
    """
    declared(collection, table)
    parts = [
        chunk.arrays["ids"]
        for server in collection.connection.servers
        for chunk in server.export_rows()
        if chunk.table == table
    ]
    return np.sort(np.concatenate(parts)) if parts else np.empty(0, np.uint64)


def declared(collection: EmbeddingCollection, table: str) -> tuple[Table, EmbeddingOptimizer | None]:
    """Returns a table as the schema declares it, and the optimizer of its rows; None if it is not trainable.

    Raises:
        ConfigError: the table does not exist.
    """
    tables = collection.schema.resolved_tables()
    if table not in tables:
        raise ConfigError(f"There is no table {table!r}; the schema has {', '.join(tables)}.", field="table")
    return tables[table], tables[table].optimizer_or(collection.optimizer)


def located(
    collection: EmbeddingCollection, table: str, rows: int, vocabulary: Vocabulary, padding: int | None = None
) -> Located:
    """Returns the ids of a weight's rows, without the padding row.

    Raises:
        DataError: the vocabulary does not match the weight, a value has no single id, or two values have the same id
            or row.
    """
    places = np.arange(rows)
    if isinstance(vocabulary, Mapping):
        places = _places(table, list(vocabulary.values()))
        if places.size and not 0 <= places.min() <= places.max() < rows:
            raise DataError(
                f"The vocabulary of table {table!r} has rows {places.min()} to {places.max()}, but the weight has "
                f"{rows}; pass the vocabulary that it was trained with.",
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
            f"Table {table!r}: {len(ids)} values for a weight of {rows} rows; pass one value for each row, or a "
            "mapping from value to row.",
            table=table,
        )
    distinct, first = np.unique(ids, return_index=True)
    if len(distinct) != len(ids):
        at = int(np.setdiff1d(np.arange(len(ids)), first)[0])
        raise DataError(
            f"Table {table!r}: the value at position {at} has the id {ids[at]} of an earlier value; pass each id once.",
            table=table,
            row=at,
        )
    retained = places != (-1 if padding is None else padding)
    return Located(ids[retained], places[retained])


def _places(table: str, rows: Sequence[Any]) -> Int64Array:
    """Returns the rows that a mapping names."""
    for row in rows:
        if isinstance(row, bool) or not isinstance(row, int | np.integer):
            raise DataError(
                f"The vocabulary of table {table!r} has the row {row!r}; pass an integer for each value.", table=table
            )
    distinct, counts = np.unique(np.array(rows, np.int64), return_counts=True)
    if len(distinct) != len(rows):
        raise DataError(
            f"The vocabulary of table {table!r} has row {distinct[counts > 1][0]} for several values; give each value "
            "its own row.",
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
    """Sets rows of a table to rows of a weight; see `EmbeddingCollection.set_rows`.

    Args:
        collection: collection with the table.
        table: name of the table.
        rows: ids and their rows in `weight`.
        weight: weight `[rows, dim]`, on any device.
        state: optimizer state by row: tensors `[rows, width]` or `[rows]` in the order of `RowState.values`. None keeps
            the state of existing rows; new rows get the initial state.
        update_count: number of updates of each row, with `state`.
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
    """Yields the rows that exist in a table, with the index of each in the weight."""
    for part in _parts(len(rows.ids), dim):
        read = collection.rows(table, rows.ids[part], state=state)
        present, state_of_ids = read.found, read.state
        present_state = None
        if state_of_ids is not None:
            present_state = RowState(
                state_of_ids.values[present], state_of_ids.update_count[present], state_of_ids.last_step[present]
            )
        places = torch.from_numpy(rows.places[part][present])
        yield places, StoredRows(read.ids[present], read.found[present], read.values[present], present_state)


def _parts(rows: int, dim: int) -> Iterator[slice]:
    most = max(1, PART_VALUES // dim)
    for start in range(0, rows, most):
        yield slice(start, min(start + most, rows))


def _taken(column: Tensor, places: Tensor) -> Floats:
    if column.is_sparse:
        column = column.to_dense()
    taken: Floats = column.detach()[places.to(column.device)].float().cpu().numpy()
    return taken
