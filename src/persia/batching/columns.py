"""From columns of any kind to the flat arrays of a batch: the work behind `Batch.from_columns`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from persia.batching import ThreadPool, hash_cross, hash_strings, hash_values
from persia.batching.batch import Batch, IdColumn
from persia.batching.validation import check_finite, check_labels, check_offsets
from persia.errors import DataError
from persia.schema import IdFeature, Schema
from persia.types import BoolArray, Floats, Ids, Int32Array, Int64Array

__all__ = ["from_columns"]

_INT32 = np.iinfo(np.int32)


def from_columns(schema: Schema, columns: Mapping[str, Any], day: Any = None, *, require_labels: bool = True) -> Batch:
    """See `Batch.from_columns`."""
    length = _Length()
    ids: dict[str, IdColumn] = {}
    for feature in schema.id_features:
        if not feature.cross:
            ids[feature.name] = id_column(feature.name, _get(columns, feature.name, "feature"))
            length.check(feature.name, len(ids[feature.name]))
    for feature in schema.id_features:
        if feature.cross:
            ids[feature.name] = _cross(feature, [ids[part] for part in feature.cross])
    dense_columns = {n: float_column(n, _get(columns, n, "dense feature")) for n in schema.dense_features}
    has_labels = require_labels or all(name in columns for name in schema.labels)
    label_columns = {n: float_column(n, _get(columns, n, "label")) for n in schema.labels} if has_labels else {}
    for name, values in {**dense_columns, **label_columns}.items():
        length.check(name, len(values))
    for name, values in dense_columns.items():
        check_finite(name, values, "Dense feature")
    for name, values in label_columns.items():
        check_labels(name, values)
    if not length.rows:
        raise DataError("The batch is empty: its columns have no rows; leave it out.")
    days = _days(day, length)
    return Batch(
        {f.name: ids[f.name] for f in schema.id_features},
        _matrix(list(dense_columns.values()), length.rows),
        _matrix(list(label_columns.values()), length.rows),
        days,
    )


class _Length:
    """All columns have the length of the first."""

    def __init__(self) -> None:
        self.rows = 0
        self.first = ""

    def check(self, name: str, rows: int) -> None:
        if not self.first:
            self.first, self.rows = name, rows
        if rows != self.rows:
            raise DataError(
                f"Column {name!r} has {rows} rows, but {self.first!r} has {self.rows}; all columns of a batch must "
                "have the same.",
                column=name,
                row=min(rows, self.rows),
            )


def _get(columns: Mapping[str, Any], name: str, kind: str) -> Any:
    if name not in columns:
        known = ", ".join(map(repr, columns)) or "none"
        raise DataError(
            f"Column {name!r} ({kind} of the schema) is missing; rename or add it (there are: {known}).", column=name
        )
    return columns[name]


def _matrix(columns: list[Floats], rows: int) -> Floats:
    matrix = np.empty((rows, len(columns)), np.float32)
    for i, values in enumerate(columns):
        matrix[:, i] = values
    return matrix


# --- ids --------------------------------------------------------------------------------------------------------


def id_column(name: str, column: Any) -> IdColumn:
    """Ids of a feature from a column of any kind; hashed where they are no whole numbers."""
    if isinstance(column, IdColumn):
        column = column.values if column.offsets is None else (column.values, column.offsets)
    if is_arrow(column):
        from persia.batching.arrow_columns import arrow_ids

        return arrow_ids(name, column)
    if isinstance(column, tuple) and len(column) == 2 and all(map(_is_array_like, column)):
        return _jagged(name, *column)
    if isinstance(column, (list, tuple)):
        return _list_ids(name, column)
    array = as_array(name, column)
    if array.dtype.kind in "OUS" and array.ndim >= 1:
        return _list_ids(name, array.tolist())
    if array.ndim == 2:
        offsets = np.arange(len(array) + 1, dtype=np.int64) * array.shape[1]
        return number_ids(name, array.reshape(-1), offsets)
    if array.ndim != 1:
        raise DataError(
            f"Feature {name!r} has shape {list(array.shape)}; give [batch], [batch, k], or (values, offsets).",
            feature=name,
        )
    return number_ids(name, array, None)


def _jagged(name: str, values: Any, offsets: Any) -> IdColumn:
    flat = id_column(name, values)
    bounds = as_array(name, offsets)
    if bounds.dtype.kind not in "iu":
        raise DataError(f"Offsets of feature {name!r} are {bounds.dtype}; they must be whole numbers.", feature=name)
    count = len(flat)
    check_offsets(name, bounds, count)
    bounds = bounds.astype(np.int64, copy=False)
    # A missing value of the pair is one id less in its list.
    return IdColumn(flat.values, bounds if flat.offsets is None else flat.offsets[bounds])


def number_ids(name: str, values: NDArray[Any], offsets: Int64Array | None) -> IdColumn:
    """Ids from numbers [n]: whole ones as they are, others by hash of their float64; NaN is a missing id."""
    kind = values.dtype.kind
    if kind in "ub":
        return IdColumn(np.ascontiguousarray(values, dtype=np.uint64), offsets)
    if kind == "i":
        if values.size and values.min() < 0:
            at = int((values < 0).argmax())
            raise _negative(name, int(values[at]), row_of(at, offsets))
        return IdColumn(np.ascontiguousarray(values, dtype=np.int64).view(np.uint64), offsets)
    if kind == "f":
        present = ~np.isnan(values)
        if not present.all():
            values, offsets = values[present], offsets_of_present(present, offsets)
        return IdColumn(hash_values(values.astype(np.float64), ThreadPool(1)), offsets)
    raise DataError(
        f"Feature {name!r} is {values.dtype}; ids are whole numbers, texts or floats: convert the column.",
        feature=name,
    )


def offsets_of_present(present: BoolArray, offsets: Int64Array | None) -> Int64Array:
    """Offsets after only the values marked `present` [n] have been kept."""
    counts = np.zeros(len(present) + 1, np.int64)
    np.cumsum(present, out=counts[1:])
    kept: Int64Array = counts if offsets is None else counts[offsets]
    return kept


def row_of(position: int, offsets: Int64Array | None) -> int:
    """The sample that the id at `position` belongs to."""
    return position if offsets is None else int(np.searchsorted(offsets, position, "right")) - 1


def _list_ids(name: str, rows: Sequence[Any]) -> IdColumn:
    nested = any(_is_list(row) for row in rows)
    flat: list[Any] = []
    offsets = np.zeros(len(rows) + 1, np.int64)
    for i, row in enumerate(rows):
        flat.extend(x for x in (row if _is_list(row) else [row]) if not _is_missing(x))
        offsets[i + 1] = len(flat)
    bounds = offsets if nested or len(flat) != len(rows) else None
    kinds = {_kind(x) for x in flat}
    if kinds <= {"whole number"}:
        for i, x in enumerate(flat):
            if x < 0:
                raise _negative(name, int(x), row_of(i, offsets))
            if x > 0xFFFFFFFFFFFFFFFF:
                raise DataError(
                    f"Feature {name!r} has id {x} at row {row_of(i, offsets)}, above 2**64 - 1; give it as text, "
                    "which is hashed.",
                    feature=name,
                    row=row_of(i, offsets),
                )
        return IdColumn(np.array(flat, np.uint64), bounds)
    if kinds == {"text"}:
        return IdColumn(hash_texts([x.encode() if isinstance(x, str) else x for x in flat]), bounds)
    if kinds == {"float"}:
        return number_ids(name, np.array(flat, np.float64), bounds)
    first = _kind(flat[0])
    at = next((i for i, x in enumerate(flat) if _kind(x) != first), 0)
    raise DataError(
        f"Feature {name!r} has {type(flat[at]).__name__} {flat[at]!r} at row {row_of(at, offsets)}; a feature has "
        "whole numbers only, texts only, or floats only.",
        feature=name,
        row=row_of(at, offsets),
    )


def hash_texts(texts: list[bytes]) -> Ids:
    """xxhash64 of each text."""
    offsets = np.zeros(len(texts) + 1, np.int64)
    np.cumsum([len(t) for t in texts], out=offsets[1:])
    return hash_buffers(np.frombuffer(b"".join(texts), np.uint8), offsets)


def hash_buffers(data: NDArray[np.uint8], offsets: Int32Array | Int64Array) -> Ids:
    """xxhash64 of each text of an array in the layout of arrow."""
    # One thread, the caller: from_columns runs in data loader workers, where there is a process for each core.
    return hash_strings(data, offsets, ThreadPool(1))


def _kind(x: Any) -> str:
    if isinstance(x, (str, bytes)):
        return "text"
    if isinstance(x, (int, np.integer, np.bool_)):
        return "whole number"
    return "float" if isinstance(x, (float, np.floating)) else type(x).__name__


def _is_list(x: Any) -> bool:
    return isinstance(x, (list, tuple, set, np.ndarray))


def _is_missing(x: Any) -> bool:
    return x is None or (isinstance(x, (float, np.floating)) and bool(np.isnan(x)))


def _negative(name: str, value: int, row: int) -> DataError:
    return DataError(
        f"Feature {name!r} has the negative id {value} at row {row}; ids are 0 to 2**64 - 1: shift them, replace "
        "a placeholder by a missing value, or give texts.",
        feature=name,
        row=row,
    )


def _cross(feature: IdFeature, parts: list[IdColumn]) -> IdColumn:
    rows = len(parts[0])
    present = np.ones(rows, np.bool_)
    for name, part in zip(feature.cross, parts, strict=True):
        if part.offsets is not None:
            lengths = np.diff(part.offsets)
            if (lengths > 1).any():
                row = int((lengths > 1).argmax())
                raise DataError(
                    f"Feature {feature.name!r} crosses {name!r}, which has {lengths[row]} ids at row {row}; only "
                    "single-valued features can be crossed.",
                    feature=feature.name,
                    row=row,
                )
            present &= lengths == 1
    if present.all():
        return IdColumn(hash_cross([part.values for part in parts], ThreadPool(1)))
    kept = [p.values[present] if p.offsets is None else p.values[p.offsets[:-1][present]] for p in parts]
    return IdColumn(hash_cross(kept, ThreadPool(1)), offsets_of_present(present, None))


# --- numbers ----------------------------------------------------------------------------------------------------


def float_column(name: str, column: Any) -> Floats:
    """A dense or label column as float32 [batch]; a missing value is an error."""
    if is_arrow(column):
        from persia.batching.arrow_columns import arrow_floats

        array = arrow_floats(name, column)
    elif isinstance(column, (list, tuple)):
        array = _list_floats(name, column)
    else:
        array = as_array(name, column)
        if array.dtype.kind == "O" and array.ndim == 1:
            array = _list_floats(name, array.tolist())
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1:
        raise DataError(
            f"Column {name!r} has shape {list(array.shape)}; dense features and labels are columns of shape [batch].",
            column=name,
        )
    if array.dtype.kind not in "buif":
        raise DataError(f"Column {name!r} is {array.dtype}; it must be numeric: convert it.", column=name)
    with np.errstate(over="ignore"):
        return array.astype(np.float32, copy=False)


def _list_floats(name: str, column: Sequence[Any]) -> NDArray[Any]:
    for row, x in enumerate(column):
        if x is None:
            raise missing_number(name, row)
        if _kind(x) not in ("whole number", "float"):
            raise DataError(
                f"Column {name!r} has {type(x).__name__} {x!r} at row {row}; it must be numeric.", column=name, row=row
            )
    return np.array([float(x) for x in column], np.float64)


def missing_number(name: str, row: int) -> DataError:
    """The error for a null in a numeric column."""
    return DataError(f"Column {name!r} has a missing value at row {row}; fill it in.", column=name, row=row)


def _days(day: Any, length: _Length) -> Int32Array | None:
    if day is None:
        return None
    if isinstance(day, (int, np.integer)):
        array = np.full(length.rows, int(day))
    elif is_arrow(day):
        from persia.batching.arrow_columns import arrow_floats

        array = arrow_floats("day", day)
    else:
        array = as_array("day", day)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise DataError(
            f"The day is {array.dtype}{list(array.shape)}; give whole numbers of shape [batch].", column="day"
        )
    length.check("day", len(array))
    if array.min() < _INT32.min or array.max() > _INT32.max:
        raise DataError("The day does not fit int32; count periods, not seconds.", column="day")
    return array.astype(np.int32, copy=False)


# --- any array --------------------------------------------------------------------------------------------------


def is_arrow(column: Any) -> bool:
    """Whether it is a pyarrow array, without importing pyarrow."""
    return type(column).__module__.split(".")[0] == "pyarrow"


def _is_array_like(x: Any) -> bool:
    return _is_list(x) or is_arrow(x) or (hasattr(x, "__array__") and not isinstance(x, np.generic))


def as_array(name: str, column: Any) -> NDArray[Any]:
    """A numpy array from a list, or from what offers `__array__` (torch tensors of any device, pandas series)."""
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
