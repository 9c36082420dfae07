"""Reads the weights of ids, for features that declare `IdFeature.weights`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from persia.batching.derived_ids import split_texts
from persia.batching.frames import as_mapping, from_frame, is_arrow
from persia.batching.id_column import IdColumn
from persia.batching.id_columns import id_column, list_entries
from persia.batching.ids import is_list, is_missing, row_of
from persia.batching.numbers import as_array, is_pair, number_column
from persia.batching.validation import check_id_weights, check_offsets, counts_of
from persia.errors import DataError
from persia.schema import IdFeature, Schema
from persia.types import BoolArray, Int64Array

__all__ = ["with_id_weights", "with_weights"]


class _Lists(NamedTuple):
    """The entries of all samples of a column, missing ones included.

    Attributes:
        flat: a column with the entries.
        counts: int64 `[batch]`, the entries of each sample.
    """

    flat: Any
    counts: Int64Array


def with_id_weights(
    schema: Schema, columns: Mapping[str, Any], id_features: Mapping[str, IdColumn]
) -> dict[str, IdColumn]:
    """Returns ID-type features with the weights that the schema declares, unless they have weights already.

    Args:
        schema: the schema that they were made with.
        columns: the columns that they were made of; see `Batch.from_columns`.
        id_features: ids by feature.

    Raises:
        DataError: a column of weights is missing, or does not fit its ids; see `with_weights`.
    """
    columns = as_mapping(columns)
    result = dict(id_features)
    for feature in schema.id_features:
        if feature.weights is not None and result[feature.name].weights is None:
            if feature.weights not in columns:
                known = ", ".join(map(repr, columns))
                raise DataError(
                    f"Column {feature.weights!r} (weights of {feature.name!r}) is missing; rename or add it (columns: "
                    f"{known}).",
                    column=feature.weights,
                )
            source = from_frame(feature.name, columns[feature.column])
            result[feature.name] = with_weights(feature, result[feature.name], source, columns[feature.weights])
    return result


def with_weights(feature: IdFeature, column: IdColumn, source: Any, weights: Any) -> IdColumn:
    """Returns the ids of a feature with their weights.

    Args:
        feature: a feature with weights.
        column: its ids, which lack missing values.
        source: the column that they were made of.
        weights: column with one number for each entry of `source`; those of missing ids are left out.

    Raises:
        DataError: a sample has another number of weights than of ids; a weight is missing, not a finite number, or
            negative where it is divided by; names column, row and remedy.
    """
    values, counts = _numbers(feature, weights)
    if len(counts) != len(column):
        raise DataError(
            f"Column {feature.weights!r} (weights of {feature.name!r}) has {len(counts)} rows, but {feature.name!r} "
            f"has {len(column)}; all columns of a batch must have the same length.",
            column=feature.weights,
            row=min(len(counts), len(column)),
        )
    if feature.split is not None:
        source = split_texts(feature.name, source, feature.split)
    entries = counts_of(source) if isinstance(source, IdColumn) else list_entries(source)
    if entries is None:
        entries = np.ones(len(column), np.int64)
    missing = np.isnan(values)
    if feature.fill is not None or missing.any() or len(column.values) != len(values) or (counts != entries).any():
        values = _of_present(feature, column, source, values, counts)
    with np.errstate(over="ignore"):
        weighted = IdColumn(column.values, column.offsets, values.astype(np.float32))
    check_id_weights(feature, weighted)
    return weighted


def _of_present(feature: IdFeature, column: IdColumn, source: Any, values: Any, counts: Int64Array) -> Any:
    """Returns the weights of the ids that are not missing, or that `fill` has filled in."""
    present, entries = _present(feature, source)
    if feature.fill is not None:  # A sample whose ids are missing has one entry, if a weight says so.
        filled = (entries == 0) & (counts == 1) & (counts_of(column) == 1)
        present, entries = np.insert(present, np.cumsum(entries)[filled], False), entries + filled
    given = ~np.isnan(values)
    # A sample without ids and without weights, however it says so: None, an empty list, an empty text.
    absent = (_sums(present, entries) == 0) & (_sums(given, counts) == 0)
    different = (counts != entries) & ~absent
    if different.any():
        row = int(different.argmax())
        raise DataError(
            f"Column {feature.weights!r} has {counts[row]} weights at row {row}, but {feature.name!r} has "
            f"{entries[row]} ids there; give one weight for each id.",
            column=feature.weights,
            row=row,
        )
    values, given = values[np.repeat(~absent, counts)], given[np.repeat(~absent, counts)]
    present = present[np.repeat(~absent, entries)]
    if feature.fill is None:
        return values[present]
    # An id that is filled in has weight 1, unless its sample has one entry, with a weight.
    entries = np.where(absent, 0, entries)
    alone = (entries == 1) & (_sums(present, entries) == 0)
    retained = present | np.repeat(alone, entries)
    entries = _sums(retained, entries)
    added = counts_of(column) - entries
    return np.insert(values[retained], np.repeat(np.cumsum(entries), added), 1.0)


def _present(feature: IdFeature, source: Any) -> tuple[BoolArray, Int64Array]:
    """Returns whether each entry of a column of ids is an id, and the number of entries of each sample."""
    if isinstance(source, IdColumn):
        return np.ones(len(source.values), np.bool_), counts_of(source)
    flat, counts = _lists(feature.name, source)
    ids = id_column(feature.name, flat, feature.kind)
    return counts_of(ids) > 0, counts


def _numbers(feature: IdFeature, column: Any) -> tuple[Any, Int64Array]:
    """Returns weights as numbers, NaN if missing, and the number of them in each sample."""
    name = feature.weights
    assert name is not None
    column = from_frame(name, column)
    if feature.split is not None:
        column = split_texts(name, column, feature.split)
    flat, counts = _lists(name, column)
    try:
        return number_column(name, flat, np.nan).astype(np.float64, copy=False), counts
    except DataError as error:
        if "row" not in error.fields:
            raise
        row = row_of(error.fields["row"], np.concatenate(([0], np.cumsum(counts))))
        raise DataError(
            f"Column {name!r} (weights of {feature.name!r}) has {error.fields.get('value')!r} at row {row}; give "
            "numbers, one for each id.",
            column=name,
            row=row,
        ) from error


def _lists(name: str, column: Any) -> _Lists:
    """Returns the entries of a column of lists, or of single values."""
    if is_arrow(column):
        from persia.batching.arrow_columns import arrow_entries, arrow_flat

        counts = arrow_entries(column)
        flat = arrow_flat(column)
        return _Lists(flat, np.ones(len(flat), np.int64) if counts is None else counts)
    if is_pair(column):
        bounds = as_array(name, column[1])
        flat = column[0] if is_arrow(column[0]) else as_array(name, column[0])
        check_offsets(name, bounds, len(flat))
        return _Lists(flat, np.diff(bounds).astype(np.int64))
    if not isinstance(column, (list, tuple)):
        array = as_array(name, column)
        if array.dtype.kind not in "OUST":
            width = 1 if array.ndim == 1 else array.shape[1]
            return _Lists(array.reshape(-1), np.full(len(array), width, np.int64))
        column = array.tolist()
    if not any(map(is_list, column)):
        return _Lists(column, np.ones(len(column), np.int64))
    rows = [list(row) if is_list(row) else [] if is_missing(row) else [row] for row in column]
    return _Lists([value for row in rows for value in row], np.array([len(row) for row in rows], np.int64))


def _sums(flags: BoolArray, counts: Int64Array) -> Int64Array:
    """Returns how many flags of each sample are set."""
    before = np.concatenate(([0], np.cumsum(flags, dtype=np.int64)))
    ends = np.cumsum(counts)
    sums: Int64Array = before[ends] - before[ends - counts]
    return sums
