"""Checks that a batch matches its schema; every error names the feature, the row and the remedy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from persia.batching.id_column import IdColumn
from persia.errors import DataError
from persia.schema import IdFeature, Label, Poisson, Schema, Tweedie
from persia.types import Floats, Ids, Int32Array, Int64Array

__all__ = [
    "check_aligned",
    "check_complete",
    "check_finite",
    "check_id_weights",
    "check_labels",
    "check_offsets",
    "check_weights",
    "counts_of",
    "validate",
]


def check_offsets(name: str, offsets: Any, values: int) -> None:
    """Raises DataError unless `offsets` [batch + 1] rises from 0 to `values`."""
    if offsets.ndim != 1 or len(offsets) == 0:
        raise DataError(
            f"Offsets of feature {name!r} have shape {list(offsets.shape)}; they must be [batch + 1].",
            feature=name,
        )
    if offsets[0] != 0:
        raise DataError(
            f"Offsets of feature {name!r} start at {offsets[0]}; they must start at 0 (subtract the first one).",
            feature=name,
            row=0,
        )
    falls = offsets[1:] < offsets[:-1]
    if falls.any():
        row = int(falls.argmax())
        raise DataError(
            f"Offsets of feature {name!r} fall from {offsets[row]} to {offsets[row + 1]} at row {row}; they must "
            "never decrease.",
            feature=name,
            row=row,
        )
    if offsets[-1] != values:
        raise DataError(
            f"Offsets of feature {name!r} end at {offsets[-1]}, but there are {values} ids; the last offset must be "
            "the number of ids.",
            feature=name,
            row=len(offsets) - 2,
        )


def check_aligned(schema: Schema, columns: Mapping[str, IdColumn]) -> None:
    """Raises DataError unless aligned features have the same number of ids in each sample."""
    for feature in schema.id_features:
        if feature.aligned_with is None:
            continue
        own, other = counts_of(columns[feature.name]), counts_of(columns[feature.aligned_with])
        if len(own) == len(other) and (own != other).any():  # The number of rows is checked elsewhere.
            row = int((own != other).argmax())
            raise DataError(
                f"Feature {feature.name!r} has {own[row]} ids at row {row}, but {feature.aligned_with!r}, with which "
                f"it is aligned, has {other[row]}; give both an entry for each event.",
                feature=feature.name,
                row=row,
            )


def check_complete(name: str, column: IdColumn, entries: Int64Array | None) -> None:
    """Raises DataError if a value is missing within a list, which would shift later values to earlier events.

    Args:
        name: name of an aligned feature.
        column: ids of the feature, without missing values.
        entries: `[batch]` number of entries of each list before missing ones were removed; None without lists.
    """
    if entries is None:
        return
    missing = counts_of(column) != entries
    if missing.any():
        row = int(missing.argmax())
        raise DataError(
            f"Feature {name!r}, which is aligned, has a missing value in its list at row {row}; fill it in with a "
            "reserved value, such as 0, or leave the event out of all aligned lists.",
            feature=name,
            row=row,
        )


def counts_of(column: IdColumn) -> Int64Array:
    """Returns the number of ids of each sample."""
    return np.ones(len(column.values), np.int64) if column.offsets is None else np.diff(column.offsets)


def check_id_weights(feature: IdFeature, column: IdColumn) -> None:
    """Raises DataError unless a feature takes the weights of a column: finite, and >= 0 where they are divided by."""
    weights = column.weights
    if weights is None:
        return
    if feature.weights is None:
        raise DataError(
            f"Feature {feature.name!r} has weights of its ids, which the schema does not declare; leave them out, or "
            f"declare IdFeature({feature.name!r}, weights=...), the column that has them.",
            feature=feature.name,
        )
    valid, remedy = np.isfinite(weights), "give a finite number for each id (float32 is the range)"
    if valid.all() and feature.pooling != "sum":
        valid, remedy = weights >= 0, f"{feature.pooling!r} divides by them: give numbers from 0 on, or use 'sum'"
    if not valid.all():
        at = int(valid.argmin())
        row = at if column.offsets is None else int(np.searchsorted(column.offsets, at, "right")) - 1
        raise DataError(
            f"Column {feature.weights!r}, the weights of {feature.name!r}, has {weights[at]} at row {row}; {remedy}.",
            column=feature.weights,
            feature=feature.name,
            row=row,
        )


def check_finite(name: str, values: Any, kind: str) -> None:
    """Raises DataError at the first NaN or infinity of a column [batch]."""
    finite = np.isfinite(values)
    if not finite.all():
        row = int(finite.argmin())
        raise DataError(
            f"{kind} {name!r} is {values[row]} at row {row}; fill in or drop such rows (float32 is the range).",
            column=name,
            row=row,
        )


def check_labels(label: Label, values: Any) -> None:
    """Raises DataError unless the values [batch] of a label are of its kind. NaN is a missing value."""
    name = label.name
    missing = np.isnan(values)
    complete = not missing.any()
    if not complete and label.missing == "error":
        row = int(missing.argmax())
        raise DataError(
            f"Label {name!r} is nan at row {row}, a missing value; leave the row out, or declare the label with "
            "missing='mask'.",
            column=name,
            row=row,
        )
    if not complete:
        values = np.where(missing, np.float32(0), values)
    check_finite(name, values, "Label")
    match label.kind:
        case "binary":
            outside, remedy = (values < 0) | (values > 1), "outside [0, 1]; rescale or threshold it"
        case "regression":
            if not isinstance(label.loss, (Poisson, Tweedie)):
                return
            outside = values < 0
            remedy = f"negative, which {type(label.loss).__name__} does not take; leave the row out, use Huber"
        case "count":
            outside, remedy = values < 0, "negative; a count is 0 or more"
        case _:
            count = len(label.class_names)
            outside = (values < 0) | (values >= count) | (values != np.floor(values))
            remedy = f"not the number of a class, 0 to {count - 1}"
    if outside.any():
        row = int(outside.argmax())
        raise DataError(
            f"Label {name!r} is {values[row]} at row {row}, {remedy}, or declare its kind.", column=name, row=row
        )


def check_weights(name: str, values: Any) -> None:
    """Raises DataError unless weights are finite and not negative."""
    check_finite(name, values, "Weight")
    negative = values < 0
    if negative.any():
        row = int(negative.argmax())
        raise DataError(
            f"Weight {name!r} is {values[row]} at row {row}; weights are 0 or more: correct it, or leave the row out.",
            column=name,
            row=row,
        )


def validate(
    id_features: Mapping[str, IdColumn],
    dense: Floats,
    labels: Floats,
    day: Int32Array | None,
    weights: Floats | None,
    groups: Ids | None,
    schema: Schema,
    *,
    require_labels: bool = True,
) -> None:
    """Checks the fields of a batch; see `Batch.validate`."""
    rows = len(labels)
    if rows == 0:
        raise DataError("The batch is empty; leave it out.")
    names = [f.name for f in schema.id_features]
    for name in id_features:
        if name not in names:
            raise DataError(
                f"The batch has a feature {name!r} that the schema lacks; remove it or declare it "
                f"(the schema has {', '.join(names)}).",
                feature=name,
            )
    for feature in schema.id_features:
        name = feature.name
        if name not in id_features:
            raise DataError(
                f"The batch lacks feature {name!r} of the schema; add it, or build the batch with Batch.from_columns.",
                feature=name,
            )
        _check_column(name, id_features[name], rows)
        if id_features[name].weights is not None:
            check_id_weights(feature, id_features[name])
    check_aligned(schema, id_features)
    _check_matrix("dense", dense, rows, schema.dense_width)
    if dense.size and not np.isfinite(dense).all():
        for i, name in enumerate(schema.dense_values):
            check_finite(name, dense[:, i], "Dense feature")
    if require_labels or labels.shape != (rows, 0):
        _check_matrix("labels", labels, rows, len(schema.label_names))
        if not (schema.binary and ((labels >= 0) & (labels <= 1)).all()):
            for i, label in enumerate(schema.targets):
                check_labels(label, labels[:, i])
    if day is not None and (day.dtype != np.int32 or day.shape != (rows,)):
        raise DataError(f"Batch.day is {day.dtype}{list(day.shape)}; it must be int32[{rows}].", column="day")
    _check_vector("weights", weights, np.float32, rows)
    if weights is not None:
        check_weights("Batch.weights", weights)
    _check_vector("groups", groups, np.uint64, rows)
    if groups is None and schema.group is not None and any(label.needs_groups for label in schema.targets):
        raise DataError(
            f"The batch has no groups, which a loss of the schema compares; build it with Batch.from_columns and the "
            f"column {schema.group!r}.",
            column=schema.group,
        )


def _check_column(name: str, column: IdColumn, rows: int) -> None:
    if not isinstance(column, IdColumn):
        raise DataError(
            f"Feature {name!r} is a {type(column).__name__}; give an IdColumn, or build the batch with "
            "Batch.from_columns.",
            feature=name,
        )
    values, offsets = column.values, column.offsets
    if (
        not isinstance(values, np.ndarray)
        or values.dtype != np.uint64
        or values.ndim != 1
        or not values.flags.c_contiguous
    ):
        raise DataError(
            f"Ids of feature {name!r} are {_describe(values)}; they must be a contiguous uint64 array [n].",
            feature=name,
        )
    if offsets is not None:
        if not isinstance(offsets, np.ndarray) or offsets.dtype != np.int64 or not offsets.flags.c_contiguous:
            raise DataError(
                f"Offsets of feature {name!r} are {_describe(offsets)}; they must be a contiguous int64 array.",
                feature=name,
            )
        check_offsets(name, offsets, len(values))
    _check_vector(f"id_features[{name!r}].weights", column.weights, np.float32, len(values))
    if len(column) != rows:
        raise DataError(
            f"Feature {name!r} has {len(column)} rows, but the batch has {rows}; all must have the same number.",
            feature=name,
        )


def _check_matrix(name: str, array: Any, rows: int, columns: int) -> None:
    if not isinstance(array, np.ndarray) or array.dtype != np.float32 or array.shape != (rows, columns):
        raise DataError(f"Batch.{name} is {_describe(array)}; it must be float32[{rows}, {columns}].", column=name)


def _check_vector(name: str, array: Any, dtype: type, rows: int) -> None:
    if array is not None and (not isinstance(array, np.ndarray) or array.dtype != dtype or array.shape != (rows,)):
        raise DataError(f"Batch.{name} is {_describe(array)}; it must be {np.dtype(dtype)}[{rows}].", column=name)


def _describe(array: Any) -> str:
    return f"{array.dtype}{list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
