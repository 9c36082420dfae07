"""Converts columns to labels, weights and groups of samples."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from persia.batching.ids import ids_of_list, is_missing
from persia.batching.numbers import float_column
from persia.batching.validation import check_weights
from persia.errors import ConfigError, DataError
from persia.schema import Label
from persia.types import Floats, Ids, Int64Array

__all__ = ["group_column", "label_column", "weight_column"]


def label_column(label: Label, column: Any) -> Floats:
    """A label as float32 [batch]: its numbers, or the numbers of classes that are given by name; NaN is missing.

    Raises:
        DataError: a value is missing though the label does not mask it, is not a number, or names no class.
    """
    if not isinstance(label.classes, tuple):
        return float_column(label.name, column, np.nan if label.missing == "mask" else None)
    ids, present = _single_ids(label.name, column)
    names, order = _classes(label)
    places = np.minimum(np.searchsorted(names, ids), len(names) - 1)
    values = np.full(len(present), np.nan, np.float32)
    values[present] = order[places]
    unknown = np.flatnonzero(present)[names[places] != ids]
    if len(unknown):
        row = int(unknown[0])
        value = _value(column, row)
        raise DataError(
            f"Label {label.name!r} is {value!r} at row {row}, which is none of its classes: "
            f"{', '.join(map(repr, label.classes[:20]))}{', ...' if len(label.classes) > 20 else ''}. Add it to "
            "Label.classes, or leave the row out.",
            column=label.name,
            row=row,
            value=repr(value),
        )
    return values


@functools.lru_cache(maxsize=256)
def _classes(label: Label) -> tuple[Ids, Int64Array]:
    """Returns the ids of the names of classes, rising, and the number of the class of each.

    Names are compared by their ids of the kind "auto", so that 5 in a file of numbers is the class "5".
    """
    ids = ids_of_list(label.name, list(label.class_names), "auto").values
    order = np.argsort(ids)
    if len(ids) != len(label.class_names) or (np.diff(ids[order]) == 0).any():
        raise ConfigError(
            f"Label({label.name!r}).classes has names that are empty or the same number, such as '1' and '1.0'; "
            "give different ones.",
            field="classes",
        )
    return ids[order], order.astype(np.int64)


def weight_column(name: str, column: Any) -> Floats:
    """Weights of samples as float32 [batch].

    Raises:
        DataError: a weight is missing, negative or not finite.
    """
    weights = float_column(name, column)
    check_weights(name, weights)
    return weights


def group_column(name: str, column: Any) -> Ids:
    """Groups of samples as uint64 [batch]; texts are hashed.

    Raises:
        DataError: a sample has no group, or several.
    """
    ids, present = _single_ids(name, column)
    if not present.all():
        row = int(present.argmin())
        raise DataError(
            f"Column {name!r}, the group, has no value at row {row}; give one, such as its own, or leave the row out.",
            column=name,
            row=row,
        )
    return ids


def _single_ids(name: str, column: Any) -> tuple[Ids, Any]:
    """Returns the ids of the kind "auto" of the rows that have one, and which rows do.

    Raises:
        DataError: a row has several values.
    """
    from persia.batching.id_columns import id_column

    ids = id_column(name, column)
    if ids.offsets is None:
        return ids.values, np.ones(len(ids.values), np.bool_)
    counts = np.diff(ids.offsets)
    if (counts > 1).any():
        row = int((counts > 1).argmax())
        raise DataError(f"Column {name!r} has {counts[row]} values at row {row}; give one.", column=name, row=row)
    return ids.values, counts == 1


def _value(column: Any, row: int) -> Any:
    """Returns a value of a column for a message."""
    value = column.iloc[row] if hasattr(column, "iloc") else column[row]
    value = value.as_py() if hasattr(value, "as_py") else value
    value = value.decode(errors="replace") if isinstance(value, bytes) else value
    return None if is_missing(value) else value.item() if isinstance(value, np.generic) else value
