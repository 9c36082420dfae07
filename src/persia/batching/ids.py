"""Converts values of an ID-type feature to ids (docs/guide/your-data.md, "From values to ids")."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from persia.batching.id_column import IdColumn
from persia.batching.texts import TextBuffers, text_ids
from persia.errors import DataError
from persia.schema import IdKind
from persia.types import BoolArray, Ids, Int64Array

__all__ = [
    "flattened",
    "ids_of_list",
    "ids_of_numbers",
    "ids_of_texts",
    "is_list",
    "is_missing",
    "offsets_of_present",
    "row_of",
    "text_of_id",
]


def ids_of_numbers(name: str, values: NDArray[Any], offsets: Int64Array | None, kind: IdKind) -> IdColumn:
    """Ids from numbers [n]; NaN is a missing id.

    Raises:
        DataError: a number is not an id of this kind; names the feature, the row and the remedy.
    """
    if values.dtype.kind == "f":
        return _ids_of_floats(name, values, offsets, kind)
    if values.dtype.kind not in "iub":
        raise DataError(
            f"Feature {name!r} is {values.dtype}; ids are whole numbers, texts or floats: convert the column.",
            feature=name,
        )
    if kind == "text":
        if values.dtype.kind == "b":
            if not len(values):
                return IdColumn(np.empty(0, np.uint64), offsets)
            raise _no_text(name, values[0], row_of(0, offsets))
        return IdColumn(_hashed(values), offsets)
    if values.dtype.kind != "i":
        return IdColumn(np.ascontiguousarray(values, dtype=np.uint64), offsets)
    ids = np.ascontiguousarray(values, dtype=np.int64).view(np.uint64)
    if values.size and values.min() < 0:
        negative = values < 0
        if kind == "number":
            raise _no_number(name, str(values[(at := int(negative.argmax()))]), row_of(at, offsets))
        ids = ids.copy()
        ids[negative] = _hashed(values[negative])
    return IdColumn(ids, offsets)


def _ids_of_floats(name: str, values: NDArray[Any], offsets: Int64Array | None, kind: IdKind) -> IdColumn:
    present = ~np.isnan(values)
    if not present.all():
        values, offsets = values[present], offsets_of_present(present, offsets)
    if kind == "text" and len(values):
        raise _no_text(name, values[0], row_of(0, offsets))
    inexact = np.abs(values) >= _exact_below(values)
    if inexact.any():
        at = int(inexact.argmax())
        raise _inexact(name, values[at], row_of(at, offsets))
    whole = values == np.trunc(values)
    usable = whole & (values >= 0)
    if usable.all():
        return IdColumn(values.astype(np.uint64), offsets)
    if kind == "number":
        at = int(usable.argmin())
        raise _no_number(name, str(values[at]), row_of(at, offsets))
    ids = np.empty(len(values), np.uint64)
    ids[usable] = values[usable].astype(np.uint64)
    negative = whole & ~usable
    ids[negative] = _hashed(values[negative].astype(np.int64))
    ids[~whole] = _hashed(values[~whole])  # The shortest text that names the float, as Python prints it.
    return IdColumn(ids, offsets)


def _hashed(numbers: NDArray[Any]) -> Ids:
    """XXH64 of numbers as texts."""
    return text_ids(TextBuffers.of_fixed(numbers.astype("S32")), "text").ids


def ids_of_texts(name: str, texts: TextBuffers, offsets: Int64Array | None, kind: IdKind) -> IdColumn:
    """Ids from texts [n]; a null or empty text is a missing id.

    Raises:
        DataError: a text is not an id of this kind; names the feature, the row and the remedy.
    """
    result = text_ids(texts, kind)
    if result.bad >= 0:
        raise _no_number(name, texts.text(result.bad), row_of(result.bad, offsets))
    if result.present.all():
        return IdColumn(result.ids, offsets)
    return IdColumn(result.ids[result.present], offsets_of_present(result.present, offsets))


def ids_of_list(name: str, rows: Sequence[Any], kind: IdKind) -> IdColumn:
    """Ids from a list of values, or of lists of values.

    Raises:
        DataError: a value is not an id of this kind; names the feature, the row and the remedy.
    """
    flat, bounds = flattened(rows)
    if all(isinstance(x, (int, np.integer)) and not isinstance(x, bool) for x in flat):
        whole = [int(x) for x in flat]
        if not whole or (min(whole) >= 0 and max(whole) < 2**64):
            return ids_of_numbers(name, np.array(whole, np.uint64), bounds, kind)
    if all(isinstance(x, (float, np.floating)) for x in flat) and len({type(x) for x in flat}) <= 1:
        return ids_of_numbers(name, np.array(flat), bounds, kind)
    texts = [text_of_id(name, x, row_of(i, bounds), kind) for i, x in enumerate(flat)]
    return ids_of_texts(name, TextBuffers.of(texts), bounds, kind)


def flattened(rows: Sequence[Any]) -> tuple[list[Any], Int64Array | None]:
    """Returns the values of a list of values, or of lists of values, without missing ones, and their offsets."""
    nested = any(is_list(row) for row in rows)
    flat: list[Any] = []
    offsets = np.zeros(len(rows) + 1, np.int64)
    for i, row in enumerate(rows):
        flat.extend(x for x in (row if is_list(row) else [row]) if not is_missing(x))
        offsets[i + 1] = len(flat)
    return flat, offsets if nested or len(flat) != len(rows) else None


def text_of_id(name: str, value: Any, row: int, kind: IdKind) -> bytes:
    """Returns a text that has the id of a value.

    Raises:
        DataError: the value is not an id of this kind; names the feature, the row and the remedy.
    """
    if isinstance(value, bytes):
        return value
    if isinstance(value, (bool, np.bool_, float, np.floating)):
        number = np.asarray(value)
        if kind == "text":
            raise _no_text(name, number, row)
        if number.dtype.kind == "f" and np.abs(number) >= _exact_below(number):
            raise _inexact(name, number, row)
        return str(value).encode()
    if isinstance(value, (str, int, np.integer)):
        return str(value).encode()
    raise DataError(
        f"Feature {name!r} has {type(value).__name__} {value!r} at row {row}; ids are whole numbers, texts or floats: "
        "convert it.",
        feature=name,
        row=row,
        value=repr(value),
    )


def offsets_of_present(present: BoolArray, offsets: Int64Array | None) -> Int64Array:
    """Offsets after all values that are not marked in `present` [n] are removed."""
    counts = np.zeros(len(present) + 1, np.int64)
    np.cumsum(present, out=counts[1:])
    remaining: Int64Array = counts if offsets is None else counts[offsets]
    return remaining


def row_of(position: int, offsets: Int64Array | None) -> int:
    """The sample that the id at `position` belongs to."""
    return position if offsets is None else int(np.searchsorted(offsets, position, "right")) - 1


def is_list(x: Any) -> bool:
    """Whether `x` holds several values of a sample."""
    return isinstance(x, (list, tuple, set, np.ndarray))


def is_missing(x: Any) -> bool:
    """Whether `x` is a missing value: None, NaN, NaT, pandas.NA."""
    if isinstance(x, np.datetime64):
        return bool(np.isnat(x))
    return x is None or type(x).__name__ in ("NAType", "NaTType") or (isinstance(x, (float, np.floating)) and x != x)


def _no_number(name: str, value: str, row: int) -> DataError:
    return DataError(
        f'Feature {name!r} has {value!r} at row {row}, but is of the kind "number": whole numbers from 0 to 2**64 - 1. '
        'Correct the value, or declare the feature with kind="auto" or kind="text".',
        feature=name,
        row=row,
        value=value,
    )


def _no_text(name: str, value: Any, row: int) -> DataError:
    return DataError(
        f'Feature {name!r} has the {value.dtype} {value} at row {row}, but is of the kind "text", and such a value has '
        'several spellings (5.0 may be "5" or "5.0"). Write the column as texts or whole numbers, or declare the '
        'feature with kind="auto".',
        feature=name,
        row=row,
        value=str(value),
    )


def _exact_below(values: Any) -> int:
    """Bound below which every whole number has its own float."""
    return 1 << (int(np.finfo(values.dtype).nmant) + 1)


def _inexact(name: str, value: Any, row: int) -> DataError:
    if np.isinf(value):
        return DataError(
            f"Feature {name!r} is {value} at row {row}, which is not an id; correct the value, or leave it empty.",
            feature=name,
            row=row,
            value=str(value),
        )
    return DataError(
        f"Feature {name!r} has the {value.dtype} {value} at row {row}: from {_exact_below(value)} on {value.dtype} "
        "cannot tell neighbouring whole numbers apart, so ids may have changed. Write the column as whole numbers "
        "(with gaps: a nullable integer type) or as texts.",
        feature=name,
        row=row,
        value=str(value),
    )
