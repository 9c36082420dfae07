"""Converts columns to the values of non-ID-type features: conversion to numbers, then the rules of `DenseFeature`."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from persia.batching.frames import from_frame, is_arrow
from persia.batching.ids import is_list, is_missing
from persia.batching.native import features_core, native
from persia.batching.numbers import (
    SharedNumbers,
    as_array,
    is_pair,
    list_numbers,
    number_column,
    numbers_and_missing,
)
from persia.batching.texts import MISSING
from persia.batching.validation import check_finite, check_offsets
from persia.errors import DataError
from persia.schema import DenseFeature
from persia.telemetry.logs import get_logger
from persia.types import BoolArray, Floats, Int64Array

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["RawNumbers", "dense_column", "raw_numbers", "read_numbers", "transformed", "write_dense"]

LOG = get_logger("persia.data")

_EXACT = 1 << 24
"""Up to here float32 represents every whole number."""
_ROUNDED: set[str] = set()
"""Dense features whose loss of digits has been logged."""
_BETWEEN = re.compile(r"[\[\](),;|\s]+")
"""What separates the numbers of a vector that is written as a text."""


class RawNumbers(NamedTuple):
    """The numbers of a feature before its rules.

    Attributes:
        values: `[batch, values]`, or `[batch]`; any number where the sample is missing.
        missing: bool `[batch]`: whether the sample has no value; None if all have one.
    """

    values: NDArray[Any]
    missing: BoolArray | None


def dense_column(name: str, column: Any) -> Floats:
    """A feature without rules as float32 [batch]. Logs a warning once if float32 changes a number by 0.5 or more."""
    numbers = number_column(name, column)
    with np.errstate(over="ignore"):
        values: Floats = numbers.astype(np.float32, copy=False)
    if name in _ROUNDED or not _may_round(numbers) or not len(values):
        return values
    row = _rounded_row(numbers, values)
    if row is not None:
        _ROUNDED.add(name)
        LOG.warning(
            "Dense feature %r has %s, which becomes %.0f: float32 has about 7 digits. If it is an id or a code, "
            "declare an ID-type feature. If it is a time or an amount, subtract an offset, or divide it.",
            name,
            numbers[row] if numbers.dtype.kind in "iu" else f"{numbers[row]:.15g}",
            values[row],
        )
    return values


def write_dense(features: Sequence[tuple[DenseFeature, RawNumbers, int]], matrix: Floats) -> None:
    """Writes the values of features with rules, which are computed in float64 and rounded once.

    Args:
        features: each feature, fitted if its rules need it, its numbers, and its first column of the matrix.
        matrix: float32 `[batch, width]`, contiguous.

    Raises:
        DataError: a value is missing without `fill`, is not finite, or would be rounded; names row and remedy.

    Blocks until done, without the GIL. Thread-safe.
    """
    columns = [
        (
            _direct(raw.values),
            raw.missing,
            feature.values,
            _fill(feature),
            feature.missing_indicator,
            at,
            _rules(feature),
        )
        for feature, raw, at in features
    ]
    if features_core.dense_columns(columns, matrix) < 0:
        return
    for feature, raw, _ in features:
        _refuse(feature, raw)
    raise AssertionError("dense_columns")


def _direct(values: NDArray[Any]) -> NDArray[Any]:
    """Returns numbers in a form that the core reads."""
    return native(values, values.dtype.char if values.dtype.char in "dfliq" else "d")


def _fill(feature: DenseFeature) -> float | None:
    if feature.fill != "mean":
        return feature.fill
    assert feature.fitted is not None
    return feature.fitted.mean


def _refuse(feature: DenseFeature, raw: RawNumbers) -> None:
    """Raises DataError at the first value of a feature that is refused."""
    values, missing = raw_numbers_of(feature, raw)
    if missing is not None:
        fill = _fill(feature)
        if fill is None:
            row = int(missing.argmax())
            raise DataError(
                f"Dense feature {feature.name!r} has a missing value at row {row}; give a number there, or declare a "
                f"value in its place: DenseFeature({feature.name!r}, fill=0).",
                column=feature.name,
                row=row,
            )
        values[missing] = fill
    with np.errstate(over="ignore"):
        _check_result(feature, transformed(feature, values).astype(np.float32))


def transformed(feature: DenseFeature, values: NDArray[np.float64], *, scale: bool = True) -> NDArray[np.float64]:
    """Applies `clip`, `log` and `scale` in place.

    Args:
        feature: the feature.
        values: float64 `[batch, values]`, contiguous, without missing ones.
        scale: whether to apply `scale`, too, which fitting does not.

    Raises:
        DataError: a number is infinite, or a whole number that float32 cannot hold is not rescaled.
    """
    if not np.isfinite(values).all():
        _check_rows(feature.name, values)
    features_core.transform(_rules(feature, scale=scale), values)
    if scale and feature.scale is None and not feature.log:
        _refuse_rounding(feature, values)
    return values


def _rules(feature: DenseFeature, *, scale: bool = True) -> tuple[Any, ...]:
    """Returns the rules after `fill` as the core takes them."""
    if not scale or feature.scale is None:
        return feature.clip, feature.log, None
    if feature.scale == "quantile":
        assert feature.fitted is not None
        return feature.clip, feature.log, _array(feature.fitted.quantiles)
    return feature.clip, feature.log, _centre_and_width(feature)


@functools.lru_cache(maxsize=1024)
def _array(quantiles: tuple[float, ...]) -> NDArray[np.float64]:
    return np.array(quantiles, np.float64)


def _centre_and_width(feature: DenseFeature) -> tuple[float, float]:
    if isinstance(feature.scale, tuple):
        return feature.scale
    fitted = feature.fitted
    assert fitted is not None
    assert fitted.centre is not None
    assert fitted.width is not None
    return fitted.centre, fitted.width


def _may_round(numbers: NDArray[Any]) -> bool:
    return numbers.dtype.itemsize >= 4 and numbers.dtype != np.float32


def _rounded_row(numbers: NDArray[Any], values: Floats) -> int | None:
    """Returns the first row that float32 changes by 0.5 or more; None if there is none, or values are not finite."""
    if max(values.max(), -values.min()) < _EXACT or not np.isfinite(values).all():
        return None
    inexact = np.abs(values - numbers.astype(np.float64)) >= 0.5
    return int(inexact.argmax()) if inexact.any() else None


def _refuse_rounding(feature: DenseFeature, values: NDArray[np.float64]) -> None:
    """Raises DataError if float32 changes a number by 0.5 or more."""
    if not values.size or max(values.max(), -values.min()) < _EXACT:
        return
    with np.errstate(over="ignore"):
        rounded = values.astype(np.float32)
    position = _rounded_row(values.reshape(-1), rounded.reshape(-1))
    if position is None:
        return
    row, value = position // values.shape[1], values.reshape(-1)[position]
    low, high = float(values.min()), float(values.max())
    raise DataError(
        f"Dense feature {feature.name!r} has {value:.15g} at row {row}, which float32 would round to "
        f"{rounded.reshape(-1)[position]:.0f}. Subtract a centre and divide by a width first, such as "
        f"DenseFeature({feature.name!r}, scale=({low:.15g}, {high - low or 1.0:.6g})), or declare an ID-type feature "
        "if it is an id.",
        column=feature.name,
        row=row,
        value=float(value),
    )


def _check_result(feature: DenseFeature, values: Floats) -> None:
    finite = np.isfinite(values)
    if not finite.all():
        row = int(finite.all(axis=1).argmin())
        raise DataError(
            f"Dense feature {feature.name!r} is {values[row][~finite[row]][0]} at row {row} after its rules, beyond "
            "the range of float32; give its scale a larger width, set clip, or leave the row out.",
            column=feature.name,
            row=row,
        )


def _check_rows(name: str, values: NDArray[Any]) -> None:
    for column in values.T:
        check_finite(name, column, "Dense feature")


# --- numbers of any form ----------------------------------------------------------------------------------------


def read_numbers(feature: DenseFeature, column: Any, shared: SharedNumbers | None = None) -> RawNumbers:
    """The numbers of a feature in the type of the column, which they may share memory with.

    Args:
        feature: the feature.
        column: a column of any kind.
        shared: numbers of columns of texts that were converted for other features.

    Returns:
        values `[batch]`, or `[batch, values]` for a vector; NaN is missing, too, if it is `[batch]`.

    Raises:
        DataError: a value is not a number, or a sample has another number of values than the feature.
    """
    if feature.size != 1:
        return _vectors(feature, column)
    converted = None if shared is None else shared.get(feature.name)
    if converted is not None:
        return RawNumbers(converted[0], None)  # Missing numbers of texts are NaN.
    return RawNumbers(*numbers_and_missing(feature.name, column))


def raw_numbers(feature: DenseFeature, column: Any, shared: SharedNumbers | None = None) -> RawNumbers:
    """The numbers of a feature before its rules; NaN and the markers of `text_numbers` are missing.

    Returns:
        values, float64 `[batch, values]`, an array of the caller's own.

    Raises:
        DataError: a value is not a number, or a sample has another number of values than the feature.
    """
    return raw_numbers_of(feature, read_numbers(feature, column, shared))


def raw_numbers_of(feature: DenseFeature, raw: RawNumbers) -> RawNumbers:
    """Converts the result of `read_numbers` to that of `raw_numbers`."""
    values, missing = np.empty((len(raw.values), feature.values)), raw.missing
    values[...] = raw.values.reshape(values.shape)  # Not `np.array`, which keeps the mark of a byte order.
    if feature.size == 1 and raw.values.dtype.kind == "f":
        nan = np.isnan(values[:, 0])
        missing = nan if missing is None else missing | nan
    return RawNumbers(values, missing if missing is not None and missing.any() else None)


class _Jagged(NamedTuple):
    """Numbers of lists.

    Attributes:
        flat: `[n]`, NaN for missing ones.
        offsets: int64 `[batch + 1]`.
        missing: bool `[batch]`: whether the list itself is missing.
    """

    flat: NDArray[Any]
    offsets: Int64Array
    missing: BoolArray


def _vectors(feature: DenseFeature, column: Any) -> RawNumbers:
    name, size = feature.name, feature.values
    column = from_frame(name, column)
    if is_arrow(column):
        from persia.batching.arrow_vectors import arrow_vectors

        flat, offsets, missing = arrow_vectors(name, column)
        with _in_rows(offsets):
            jagged = _Jagged(_flat_numbers(name, flat), offsets, missing)
    elif is_pair(column):
        offsets = as_array(name, column[1]).astype(np.int64)
        flat = as_array(name, column[0])
        check_offsets(name, offsets, len(flat))
        with _in_rows(offsets):
            jagged = _Jagged(_flat_numbers(name, flat), offsets, np.zeros(len(offsets) - 1, np.bool_))
    elif isinstance(column, (list, tuple)):
        jagged = _of_rows(name, column)
    else:
        array = as_array(name, column)
        if array.dtype.kind in "OUST":
            jagged = _of_rows(name, array.tolist())
        elif array.ndim < 2:
            raise DataError(
                f"Dense feature {name!r} has shape {list(array.shape)}; its size is {feature.size}: give [batch, "
                f"{size}], or a list of {size} numbers for each row.",
                column=name,
            )
        else:
            rows = array.reshape(len(array), -1)
            offsets = np.arange(len(rows) + 1, dtype=np.int64) * rows.shape[1]
            jagged = _Jagged(rows.reshape(-1), offsets, np.zeros(len(rows), np.bool_))
    return _rectangular(feature, jagged)


def _rectangular(feature: DenseFeature, jagged: _Jagged) -> RawNumbers:
    """Requires that each present row has all of its values."""
    name, size = feature.name, feature.values
    flat, offsets, missing = jagged
    counts = np.diff(offsets)
    wrong = (counts != size) & ~missing
    if wrong.any():
        row = int(wrong.argmax())
        raise DataError(
            f"Dense feature {name!r} has {counts[row]} values at row {row}, but its size is {feature.size}; correct "
            "the row, or DenseFeature.size.",
            column=name,
            row=row,
        )
    numbers = np.array(flat, np.float64)
    nan = np.isnan(numbers)
    if nan.any():
        position = int(nan.argmax())
        row = int(np.searchsorted(offsets, position, "right")) - 1
        raise DataError(
            f"Dense feature {name!r} has a missing value at row {row} (position {position - offsets[row]}); give all "
            f"{size} values, or none and a fill: DenseFeature({name!r}, size={feature.size}, fill=0).",
            column=name,
            row=row,
        )
    if not missing.any():
        return RawNumbers(numbers.reshape(-1, size), None)
    values = np.zeros((len(missing), size))
    values[~missing] = numbers.reshape(-1, size)
    return RawNumbers(values, missing)


def _flat_numbers(name: str, flat: Any) -> NDArray[Any]:
    """Returns numbers [n] with NaN for missing ones."""
    array, missing = numbers_and_missing(name, flat)
    return array if missing is None or not missing.any() else np.where(missing, np.nan, array)


def _of_rows(name: str, column: Sequence[Any]) -> _Jagged:
    """Numbers of a list of lists, of nested lists, or of texts of these; None is a missing row."""
    rows: list[Sequence[Any]] = []
    missing = np.zeros(len(column), np.bool_)
    for number, value in enumerate(column):
        if isinstance(value, (str, bytes)):
            value = _parts(value) or None
        if is_missing(value):
            missing[number], value = True, ()
        elif not is_list(value):
            raise DataError(
                f"Dense feature {name!r} has the single value {value!r} at row {number}; give a list of numbers.",
                column=name,
                row=number,
                value=repr(value),
            )
        elif isinstance(value, np.ndarray) and value.dtype.kind in "buif":
            value = value.reshape(-1).tolist()
        while any(map(is_list, value)):
            value = list(itertools.chain.from_iterable(each if is_list(each) else (each,) for each in value))
        rows.append(value)
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    flat = list(itertools.chain.from_iterable(rows))
    with _in_rows(offsets):
        numbers, absent = list_numbers(name, flat)
    return _Jagged(numbers if absent is None else np.where(absent, np.nan, numbers), offsets, missing)


def _parts(text: str | bytes) -> list[str]:
    """Returns the numbers in a text such as "[1, 2]" or "1;2" as texts; none for a missing one."""
    text = text.decode(errors="replace") if isinstance(text, bytes) else text
    parts = _BETWEEN.sub(" ", text).split()
    return [] if len(parts) == 1 and parts[0] in MISSING else parts


@contextmanager
def _in_rows(offsets: Int64Array) -> Iterator[None]:
    """Converts the position of a number in an error to its row."""
    try:
        yield
    except DataError as error:
        if "row" not in error.fields:
            raise
        position = error.fields["row"]
        row = int(np.searchsorted(offsets, position, "right")) - 1
        message = error.message.replace(f"at row {position}", f"at row {row} (position {position - offsets[row]})")
        raise DataError(message, **{**error.fields, "row": row}) from error
