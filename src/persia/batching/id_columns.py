"""Converts columns of any kind to ids; see `IdFeature.kind`."""

from __future__ import annotations

from typing import Any

import numpy as np

from persia.batching.frames import from_frame, is_arrow
from persia.batching.id_column import IdColumn
from persia.batching.ids import ids_of_list, ids_of_numbers, is_list, is_missing
from persia.batching.numbers import as_array, is_pair
from persia.batching.validation import check_offsets
from persia.errors import DataError
from persia.schema import IdKind
from persia.types import Int64Array

__all__ = ["id_column", "jagged", "list_entries"]


def id_column(name: str, column: Any, kind: IdKind = "auto") -> IdColumn:
    """Ids of a feature from a column of any kind; see `IdFeature.kind`.

    Raises:
        DataError: a value is not an id of this kind, or the column cannot be read as ids.
    """
    if isinstance(column, IdColumn):  # Ids already.
        return column
    column = from_frame(name, column)
    if is_arrow(column):
        from persia.batching.arrow_columns import arrow_ids

        return arrow_ids(name, column, kind)
    if is_pair(column):
        return jagged(name, id_column(name, column[0], kind), column[1])
    if isinstance(column, (list, tuple)):
        return ids_of_list(name, column, kind)
    array = as_array(name, column)
    if array.dtype.kind in "OUST" and array.ndim >= 1:
        return ids_of_list(name, array.tolist(), kind)
    if array.ndim == 2:
        offsets = np.arange(len(array) + 1, dtype=np.int64) * array.shape[1]
        return ids_of_numbers(name, array.reshape(-1), offsets, kind)
    if array.ndim != 1:
        raise DataError(
            f"Feature {name!r} has shape {list(array.shape)}; give [batch], [batch, k], or (values, offsets).",
            feature=name,
        )
    return ids_of_numbers(name, array, None, kind)


def list_entries(column: Any) -> Int64Array | None:
    """Returns the number of entries in each list of a column, including missing ones; None if it has no lists."""
    if isinstance(column, IdColumn):
        return None
    if is_arrow(column):
        from persia.batching.arrow_columns import arrow_entries

        return arrow_entries(column)
    if is_pair(column):
        return np.diff(as_array("offsets", column[1])).astype(np.int64)
    if not isinstance(column, (list, tuple)):
        array = as_array("list", column)
        if array.dtype.kind != "O":
            return None if array.ndim == 1 else np.full(len(array), array.shape[1], np.int64)
        column = array.tolist()
    if not any(map(is_list, column)):
        return None
    return np.array([len(row) if is_list(row) else int(not is_missing(row)) for row in column], np.int64)


def jagged(name: str, flat: IdColumn, offsets: Any) -> IdColumn:
    """Returns ids with the offsets of given values, some of which are missing in `flat`.

    Raises:
        DataError: the offsets are invalid.
    """
    bounds = as_array(name, offsets)
    if bounds.dtype.kind not in "iu":
        raise DataError(f"Offsets of feature {name!r} are {bounds.dtype}; they must be whole numbers.", feature=name)
    count = len(flat)
    check_offsets(name, bounds, count)
    bounds = bounds.astype(np.int64, copy=False)
    # `flat` lacks the missing values, so its offsets map positions in the given values to positions in the ids.
    return IdColumn(flat.values, bounds if flat.offsets is None else flat.offsets[bounds])
