"""Records of rows that are read or set by id."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from persia.types.arrays import BoolArray, Floats, Ids

__all__ = ["RowState", "RowsSet", "StoredRows"]


class RowState(NamedTuple):
    """The optimizer state of rows.

    Attributes:
        values: state, float32 `[n, width]`, see docs/guide/tables.md. Adam: first moment, then second; FTRL: z, then n.
        update_count: number of updates applied to each row, uint32 `[n]`.
        last_step: global step or token of the last update, uint32 `[n]`; 0 unless the table is, or was, trained in an
            asynchronous mode, as other modes do not record it.
    """

    values: Floats
    update_count: NDArray[np.uint32]
    last_step: NDArray[np.uint32]


class StoredRows(NamedTuple):
    """Rows of one table, in the order of the requested ids.

    Attributes:
        ids: requested ids, uint64 `[n]`.
        found: whether each id has a row, bool `[n]`.
        values: embeddings, float32 `[n, dim]`; zeros without a row.
        state: optimizer state, zeros without a row; None if it was not requested.
    """

    ids: Ids
    found: BoolArray
    values: Floats
    state: RowState | None = None


class RowsSet(NamedTuple):
    """Result of setting rows.

    Attributes:
        inserted: number of ids that had no row.
        replaced: number of ids that had a row.
        evicted: number of rows that exceeded the capacity of the table: the least recently used ones or, if more rows
            were set than the table holds, some of the new ones.
    """

    inserted: int
    replaced: int
    evicted: int
