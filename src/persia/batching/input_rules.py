"""Applies a reader's rules to columns of files and requests: for missing values, lists, and how numbers are written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from persia.batching.derived_ids import split_texts
from persia.batching.frames import as_mapping, from_frame, is_arrow
from persia.batching.id_column import IdColumn
from persia.batching.numbers import as_array, is_pair, number_column
from persia.batching.numerals import with_plain_numbers
from persia.schema import NO_RULES, InputRules

__all__ = ["apply_rules"]


def apply_rules(rules: InputRules, columns: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns columns for `Batch.from_columns` with missing values filled in, texts split, and numbers written plainly.

    Columns that are already lists or ids are unchanged, except for missing numbers.

    Args:
        rules: rules of a reader. Names that are not among the columns are ignored.
        columns: as for `Batch.from_columns`.

    Raises:
        DataError: a column to fill in has a value that is not a number, or a percentage has no sign.
    """
    columns = as_mapping(columns)
    if rules == NO_RULES:
        return columns
    result = dict(columns)
    if rules.null_values:
        nulls = _Nulls(rules.null_values)
        for name, column in columns.items():
            result[name] = nulls.removed(name, from_frame(name, column))
    for name, written in rules.numbers.items():
        if name in result:
            result[name] = with_plain_numbers(name, from_frame(name, result[name]), written)
    for name, separator in rules.lists.items():
        if name in result:
            result[name] = split_texts(name, result[name], separator)
    for name, value in rules.fill.items():
        if name in result:
            result[name] = number_column(name, result[name], value)
    return result


class _Nulls:
    """Values that mark missing ones.

    Args:
        texts: the markers; numbers that equal one of them are markers too.
    """

    def __init__(self, texts: tuple[str, ...]) -> None:
        self._texts = texts
        self._numbers = [number for number in map(_number, texts) if number is not None]

    def removed(self, name: str, column: Any) -> Any:
        """Returns a column with these values replaced by None; values within lists are unchanged."""
        if is_arrow(column):
            from persia.batching.arrow_columns import arrow_without

            return arrow_without(column, self._texts, self._numbers)
        if isinstance(column, IdColumn) or is_pair(column):
            return column
        values = _listed(name, column)
        if values is not None:
            return [None if self._has(value) else value for value in values]
        array = as_array(name, column)
        missing = np.zeros(len(array), np.bool_)
        if array.ndim == 1 and array.dtype.kind in "iuf":
            for number in self._numbers:
                missing |= array == number
        return [None if gone else value for value, gone in zip(array, missing, strict=True)] if missing.any() else array

    def _has(self, value: Any) -> bool:
        if isinstance(value, (str, bytes)):
            return (value.decode(errors="replace") if isinstance(value, bytes) else value) in self._texts
        numeric = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
        return numeric and value in self._numbers


def _number(text: str) -> int | float | None:
    kinds: tuple[Callable[[str], int | float], ...] = (int, float)
    for kind in kinds:
        try:
            return kind(text)
        except ValueError:
            continue
    return None


def _listed(name: str, column: Any) -> Sequence[Any] | None:
    """Returns the values of a list, or of an array of objects or texts; None for an array of numbers."""
    if isinstance(column, (list, tuple)):
        return column
    array = as_array(name, column)
    values: list[Any] | None = array.tolist() if array.dtype.kind in "OUST" else None
    return values
