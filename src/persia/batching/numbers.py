"""Converts columns of any kind to numbers, in their own type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from persia.batching.frames import from_frame, is_arrow
from persia.batching.ids import is_list, is_missing
from persia.batching.texts import TextBuffers, numbers_of_texts
from persia.errors import DataError
from persia.types import BoolArray, Floats

__all__ = [
    "SharedNumbers",
    "as_array",
    "float_column",
    "is_pair",
    "list_numbers",
    "number_column",
    "numbers_and_missing",
]

SharedNumbers: TypeAlias = dict[str, tuple[NDArray[np.float64], BoolArray]]
"""By column: numbers `[batch]` of texts, and whether each is present."""
_NUMBERS = frozenset({int, float, bool})


def float_column(name: str, column: Any, fill: float | None = None) -> Floats:
    """A label or another column as float32 [batch]; see `number_column`."""
    with np.errstate(over="ignore"):
        return number_column(name, column, fill).astype(np.float32, copy=False)


def number_column(name: str, column: Any, fill: float | None = None) -> NDArray[Any]:
    """A column [batch] of numbers, in its own type; texts are read as float64, booleans are 1 and 0.

    Args:
        name: name of the column, for messages.
        column: a column of any kind.
        fill: replaces missing values; None makes them an error.

    Raises:
        DataError: a value is missing or not a number; names the row and the remedy.
    """
    array, missing = numbers_and_missing(name, column)
    if fill is not None and array.dtype.kind == "f":
        missing = np.isnan(array) if missing is None else missing | np.isnan(array)
    if missing is not None and missing.any():
        if fill is None:
            row = int(missing.argmax())
            raise DataError(
                f"Column {name!r} has a missing value at row {row}; give a number there, or let the reader, "
                f"such as persia.data.csv, fill it in: fill={{{name!r}: 0.0}}.",
                column=name,
                row=row,
            )
        array = np.where(missing, fill, array)
    return array


def numbers_and_missing(name: str, column: Any) -> tuple[NDArray[Any], BoolArray | None]:
    """The numbers of a column [batch], in its own type, and a mask of missing values; None if none is missing.

    A NaN of an array of floats is not in the mask.

    Raises:
        DataError: a value is not a number, or the column has several numbers per row; names the row and the remedy.
    """
    column = from_frame(name, column)
    if is_arrow(column):
        from persia.batching.arrow_columns import arrow_floats

        array, missing = arrow_floats(name, column)
    elif isinstance(column, (list, tuple)):
        array, missing = list_numbers(name, column)
    else:
        array, missing = as_array(name, column), None
        if array.dtype.kind in "OUST" and array.ndim == 1:
            array, missing = list_numbers(name, array.tolist())
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1:
        raise DataError(
            f"Column {name!r} has shape {list(array.shape)}; dense features and labels are columns of shape [batch], "
            "unless a DenseFeature declares their size.",
            column=name,
        )
    if array.dtype.kind not in "buif":
        raise DataError(f"Column {name!r} is {array.dtype}; it must be numeric: convert it.", column=name)
    return array, missing


def list_numbers(name: str, column: Sequence[Any]) -> tuple[NDArray[Any], BoolArray | None]:
    """The numbers of a list, and a mask of the missing ones."""
    if _NUMBERS.issuperset(map(type, column)):
        try:
            plain = np.fromiter(column, np.float64, len(column))
        except OverflowError as error:
            raise _overflow(name) from error
        missing = np.isnan(plain)
        return plain, missing if missing.any() else None
    if any(isinstance(x, (str, bytes)) for x in column):
        texts = [
            "" if is_missing(x) else x.decode(errors="replace") if isinstance(x, bytes) else str(x) for x in column
        ]
        return numbers_of_texts(name, TextBuffers.of([text.encode() for text in texts]))
    missing = np.array([is_missing(x) for x in column], np.bool_)
    for row, x in enumerate(column):
        if not missing[row] and not isinstance(x, (int, float, np.integer, np.floating, np.bool_)):
            raise DataError(
                f"Column {name!r} has {type(x).__name__} {x!r} at row {row}; it must be numeric.",
                column=name,
                row=row,
                value=repr(x),
            )
    try:
        return np.array([np.nan if is_missing(x) else float(x) for x in column], np.float64), missing
    except OverflowError as error:
        raise _overflow(name) from error


def _overflow(name: str) -> DataError:
    return DataError(f"Column {name!r} has a number beyond the range of float64; scale it.", column=name)


def is_pair(column: Any) -> bool:
    """Whether a column is given as values and offsets."""
    return isinstance(column, tuple) and len(column) == 2 and all(map(_is_array_like, column))


def _is_array_like(x: Any) -> bool:
    return is_list(x) or is_arrow(x) or (hasattr(x, "__array__") and not isinstance(x, np.generic))


def as_array(name: str, column: Any) -> NDArray[Any]:
    """Converts a list, or an object with `__array__` (torch tensor of any device, pandas series), to a numpy array."""
    for method in ("detach", "cpu"):
        if hasattr(column, method):
            column = getattr(column, method)()
    if not isinstance(column, (list, tuple)) and not hasattr(column, "__array__"):
        raise DataError(
            f"Column {name!r} is a {type(column).__name__}; give a numpy array, torch tensor, pyarrow array or list.",
            column=name,
        )
    try:
        return np.asarray(column)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise DataError(
            f"Column {name!r} cannot be read as an array ({error}); convert it to numpy first.", column=name
        ) from error
