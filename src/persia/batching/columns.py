"""Converts columns of any kind to the flat arrays of a batch, for `Batch.from_columns`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from persia.batching.computed_ids import add_computed
from persia.batching.dense_columns import RawNumbers, dense_column, read_numbers, write_dense
from persia.batching.derived_ids import SharedColumns, derived_ids, filled
from persia.batching.frames import as_mapping, from_frame, is_arrow
from persia.batching.id_column import IdColumn
from persia.batching.id_columns import id_column, jagged, list_entries
from persia.batching.label_columns import group_column, label_column, weight_column
from persia.batching.numbers import as_array, is_pair
from persia.batching.times import magnitudes, seconds_of_list, seconds_of_timestamps
from persia.batching.validation import check_aligned, check_complete, check_finite, check_id_weights, check_labels
from persia.errors import DataError
from persia.schema import IdFeature, Quotient, Schema
from persia.telemetry.logs import get_logger
from persia.types import Floats, Ids, Int32Array, Int64Array

__all__ = ["from_columns"]

LOG = get_logger("persia.data")

_INT32 = np.iinfo(np.int32)


class Columns(NamedTuple):
    """The fields of a `Batch`, in its order."""

    id_features: dict[str, IdColumn]
    dense: Floats
    labels: Floats
    day: Int32Array | None
    weights: Floats | None
    groups: Ids | None


def from_columns(
    schema: Schema, columns: Mapping[str, Any], day: Any = None, *, require_labels: bool = True
) -> Columns:
    """Converts columns to the fields of a batch; see `Batch.from_columns`."""
    schema.check_fitted()
    columns = as_mapping(columns)
    length = _Length()
    ids: dict[str, IdColumn] = {}
    shared: SharedColumns | None = None
    aligned = schema.aligned()
    divided = {f.of: f for f in schema.id_features if isinstance(f.mapping, Quotient)}
    for feature in schema.id_features:
        if feature.computed:
            continue
        derived = feature.derived
        name = feature.column if derived else feature.name
        source = from_frame(name, _get(columns, name, "feature"))
        if derived:
            lists = feature.name in divided or feature.name in aligned
            shared = SharedColumns() if shared is None else shared
            source, column = derived_ids(feature, source, lists=lists, shared=shared)
        elif feature.age_since is None:
            column = id_column(name, source, feature.kind)
        else:
            column = _ages(feature, source, _get(columns, feature.age_since, f"age_since of {feature.name!r}"))
        if feature.name in divided and feature.reads_ids:
            _check_undivided(feature, divided[feature.name], source, column)
        if feature.name in aligned:
            check_complete(feature.name, column, list_entries(source))
        if feature.fill is not None:
            column = filled(feature, column)
        if column.weights is not None:
            check_id_weights(feature, column)
        ids[feature.name] = column
        length.check(name, len(column))
    add_computed(schema, ids)
    check_aligned(schema, ids)
    numbers = None if shared is None else shared.numbers
    plain: dict[str, Floats] = {}
    ruled: dict[str, RawNumbers] = {}
    for dense in schema.dense_features:
        if isinstance(dense, str):
            plain[dense] = values = dense_column(dense, _get(columns, dense, "dense feature"))
            length.check(dense, len(values))
        else:
            ruled[dense.name] = raw = read_numbers(dense, _get(columns, dense.name, "dense feature"), numbers)
            length.check(dense.name, len(raw.values))
    has_labels = require_labels or all(name in columns for name in schema.label_names)
    targets = schema.targets if has_labels else ()
    label_columns = {each.name: label_column(each, _get(columns, each.name, "label")) for each in targets}
    for name, values in label_columns.items():
        length.check(name, len(values))
    for name, values in plain.items():
        check_finite(name, values, "Dense feature")
    for label in targets:
        check_labels(label, label_columns[label.name])
    weights = _optional(schema.sample_weight, columns, length, require_labels, "sample_weight", weight_column)
    groups = _optional(schema.group, columns, length, require_labels, "group", group_column)
    if not length.rows:
        raise DataError("The batch is empty: its columns have no rows; leave it out.")
    days = _days(day, length)
    return Columns(
        {f.name: ids[f.name] for f in schema.id_features},
        _dense_matrix(schema, plain, ruled, length.rows) if ruled else _matrix(list(plain.values()), length.rows),
        _matrix(list(label_columns.values()), length.rows),
        days,
        weights,
        groups,
    )


class _Length:
    """Requires that all columns have the length of the first."""

    def __init__(self) -> None:
        self.rows = 0
        self.first = ""

    def check(self, name: str, rows: int) -> None:
        if not self.first:
            self.first, self.rows = name, rows
        if rows != self.rows:
            raise DataError(
                f"Column {name!r} has {rows} rows, but {self.first!r} has {self.rows}; all columns of a batch must "
                "have the same length.",
                column=name,
                row=min(rows, self.rows),
            )


def _get(columns: Mapping[str, Any], name: str, kind: str) -> Any:
    if name not in columns:
        known = ", ".join(map(repr, columns)) or "none"
        raise DataError(
            f"Column {name!r} ({kind} of the schema) is missing; rename or add it (columns: {known}).", column=name
        )
    return columns[name]


def _optional(
    name: str | None,
    columns: Mapping[str, Any],
    length: _Length,
    required: bool,
    use: str,
    convert: Callable[[str, Any], NDArray[Any]],
) -> Any:
    """Converts a column that is not an input of the model, if the schema names it and it is there or required."""
    if name is None or (not required and name not in columns):
        return None
    values = convert(name, _get(columns, name, use))
    length.check(name, len(values))
    return values


def _matrix(columns: list[Floats], rows: int) -> Floats:
    """Returns columns `[rows]`, one after another."""
    matrix = np.empty((rows, len(columns)), np.float32)
    for at, values in enumerate(columns):
        matrix[:, at] = values
    return matrix


def _dense_matrix(schema: Schema, plain: dict[str, Floats], ruled: dict[str, RawNumbers], rows: int) -> Floats:
    """Returns the values of all non-ID-type features, float32 `[rows, dense_width]`."""
    matrix = np.empty((rows, schema.dense_width), np.float32)
    at = 0
    written = []
    for feature in schema.dense_features:
        if isinstance(feature, str):
            matrix[:, at] = plain[feature]
            at += 1
        else:
            written.append((feature, ruled[feature.name], at))
            at += feature.width
    write_dense(written, matrix)
    return matrix


# --- ids --------------------------------------------------------------------------------------------------------


def _check_undivided(feature: IdFeature, divided: IdFeature, values: Any, column: IdColumn) -> None:
    """Raises DataError if a value of the kind "auto" is hashed, so that the hash would be divided, not the value."""
    if feature.kind != "auto":
        return
    try:
        numbers = id_column(feature.name, values, "number")
    except DataError as error:
        if "value" not in error.fields:
            raise
        row, value = error.fields["row"], error.fields["value"]
    else:
        fewer = np.diff(_bounds(numbers)) != np.diff(_bounds(column))
        if not fewer.any():
            return
        row, value = int(fewer.argmax()), "NA"  # Or another marker of a missing number.
    raise DataError(
        f"Feature {feature.name!r} has {value!r} at row {row}, which is hashed as a text, but {divided.name!r} divides "
        f"its ids ({divided.mapping}). Give whole numbers from 0 on, map by HashTo, or divide the hashes of all values "
        'with kind="text".',
        feature=feature.name,
        row=row,
        value=value,
    )


def _bounds(column: IdColumn) -> Int64Array:
    """Returns the offsets of a column, also if it has one id in each row."""
    return np.arange(len(column.values) + 1) if column.offsets is None else column.offsets


def _ages(feature: IdFeature, times: Any, since: Any) -> IdColumn:
    """Returns the magnitudes of the ages of events as ids; see `IdFeature.age_since`."""
    assert feature.age_since is not None
    event, event_is = _times(feature.name, times)
    now, now_is = _times(feature.age_since, since)
    if now.offsets is not None or len(now) != len(event):
        raise DataError(
            f"Column {feature.age_since!r} (age_since of {feature.name!r}) lacks a time in some row, or has several; "
            f"give one time for each of {len(event)} samples.",
            column=feature.age_since,
        )
    if event_is != now_is and len(event.values):
        raise DataError(
            f"Column {feature.name!r} has {event_is}, but {feature.age_since!r} (its age_since) has {now_is}; give "
            "both as timestamps, or both as whole numbers in one unit.",
            column=feature.name,
        )
    samples = now.values if event.offsets is None else np.repeat(now.values, np.diff(event.offsets))
    age = np.where(samples > event.values, samples - event.values, np.uint64(0))
    return IdColumn(magnitudes(age), event.offsets)


def _times(name: str, column: Any) -> tuple[IdColumn, str]:
    """Returns times as numbers that can be subtracted, and what the column holds; timestamps are given in seconds.

    Raises:
        DataError: a value is neither a timestamp nor a non-negative whole number.
    """
    column = from_frame(name, column)
    if is_pair(column):
        flat, kind = _times(name, column[0])
        return jagged(name, flat, column[1]), kind
    seconds: IdColumn | None = None
    if is_arrow(column):
        from persia.batching.arrow_columns import arrow_seconds

        seconds = arrow_seconds(column)
    elif isinstance(column, (list, tuple)):
        seconds = seconds_of_list(name, column)
    elif not isinstance(column, IdColumn):
        column = as_array(name, column)
        if column.dtype.kind == "M":
            offsets = None if column.ndim == 1 else np.arange(len(column) + 1, dtype=np.int64) * column.shape[1]
            seconds = seconds_of_timestamps(column.reshape(-1), offsets)
        elif column.dtype.kind == "O":
            seconds = seconds_of_list(name, column.tolist())
    if seconds is not None:
        return seconds, "timestamps"
    try:
        return id_column(name, column, "number"), "whole numbers"
    except DataError as error:
        if "value" not in error.fields:
            raise
        raise DataError(
            f"Column {name!r} has {error.fields['value']!r} at row {error.fields['row']}, which is not a time; give "
            "timestamps, or whole numbers from 0 on in one unit.",
            **{**error.fields, "feature": name},
        ) from error


def _days(day: Any, length: _Length) -> Int32Array | None:
    if day is None:
        return None
    if isinstance(day, (int, np.integer)):
        array = np.full(length.rows, int(day))
    elif is_arrow(day):
        from persia.batching.arrow_columns import arrow_floats

        array, missing = arrow_floats("day", day)
        if missing is not None and missing.any():
            row = int(missing.argmax())
            raise DataError(f"The day is missing at row {row}; give a whole number there.", column="day", row=row)
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
