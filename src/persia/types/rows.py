"""Records of rows that are read or set by id."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from persia.types.arrays import BoolArray, Floats, Ids

__all__ = ["RowState", "RowsSet", "StoredRows"]


class RowState(NamedTuple):
    """The state of the optimizer for some rows.

    Attributes:
        values: float32 `[n, width]`, see docs/guide/tables.md. Adam: first moment, then second; FTRL: z, then n.
        update_count: uint32 `[n]`, updates applied to each row.
        last_step: uint32 `[n]`, the global step or token of the last one; 0 unless the table is, or was, trained in an
            asynchronous mode, since others do not ask for it.
    """

    values: Floats
    update_count: NDArray[np.uint32]
    last_step: NDArray[np.uint32]


class StoredRows(NamedTuple):
    """Rows of one table, in the order of the ids that were asked for.

    Attributes:
        ids: uint64 `[n]`.
        found: bool `[n]`, whether the id has a row.
        values: float32 `[n, dim]`, the embeddings; zeros without a row.
        state: of the optimizer, zeros without a row; None if it was not asked for.
    """

    ids: Ids
    found: BoolArray
    values: Floats
    state: RowState | None = None


class RowsSet(NamedTuple):
    """Result of setting rows.

    Attributes:
        inserted: ids that had no row.
        replaced: ids that had one.
        evicted: rows that a full table had no capacity for: less recently used ones or, if more rows were set than the
            table holds, some of those.
    """

    inserted: int
    replaced: int
    evicted: int
