"""The values of a column of a sample, and what is guessed about them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from persia.batching.numbers import number_column
from persia.errors import DataError

__all__ = ["MISSING_TEXTS", "ColumnGuess", "ColumnValues", "is_list", "plain_values"]

Role = Literal["number", "id", "list", "text", "time", "weights", "sample_weight", "group", "unused"]

MISSING_TEXTS = (
    "?", "-", "--", ".", "missing", "Missing", "unknown", "Unknown", "n.a.", "N.A.", "k.A.", "k. A.", "#NV", "#N/V",
)  # fmt: skip
"""Texts that stand for a missing number in many files, in addition to the texts that every reader recognizes."""


class ColumnValues(NamedTuple):
    """The values of a column, converted to one of a few types.

    Attributes:
        array: pyarrow array `[rows]` of texts, numbers, booleans, times or lists.
        numbers: float64 `[rows]`, NaN where missing; None unless all values are numbers.
        nulls: texts of the column that stand for a missing number.
        rows: number of rows.
        missing: number of missing values.
        distinct: number of different values that are not missing.
    """

    array: Any
    numbers: NDArray[np.float64] | None
    nulls: tuple[str, ...]
    rows: int
    missing: int
    distinct: int


class ColumnGuess(NamedTuple):
    """The guessed use of a column.

    Attributes:
        column: name in the file.
        role: the use. "text": its words are ids; "weights": of the ids of a list; "sample_weight", "group": of samples.
        reason: the reason of the guess.
        sure: whether the user need not be asked.
        text: whether values are hashed as texts, even if they consist of digits.
        separator: text between the ids of a list within a field.
        max_length: number of ids of a list that count; None for all.
        log: whether a number enters by its logarithm.
        buckets: number of buckets that a number also enters by; 0 for none.
        bucket_reason: the reason of the buckets.
        missing: share of missing values.
        nulls: texts that stand for a missing number.
        table: column whose embeddings are shared.
        weights: column with the weights of the ids of a list.
        parts: parts of a time that are ids, and why.
        unit: unit of numbers that are times.
        ngrams: lengths of the sequences of words of a text.
        distinct: number of different values.
    """

    column: str
    role: Role
    reason: str
    sure: bool = True
    text: bool = False
    separator: str = ""
    max_length: int | None = None
    log: bool = False
    buckets: int = 0
    bucket_reason: str = ""
    missing: float = 0.0
    nulls: tuple[str, ...] = ()
    table: str = ""
    weights: str = ""
    parts: Mapping[str, str] = MappingProxyType({})
    unit: str = ""
    ngrams: tuple[int, ...] = ()
    distinct: int = 0


def plain_values(array: Any) -> ColumnValues:
    """Converts a column; counts missing and different values."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_large_string(array.type) or str(array.type) == "string_view":
        array = array.cast(pa.string())
    rows = len(array)
    if pa.types.is_nested(array.type) or is_list(array.type):
        return ColumnValues(array, None, (), rows, array.null_count, 0)
    numbers, nulls = _numbers(array)
    if numbers is not None:
        missing = int(np.isnan(numbers).sum())
    else:
        missing = array.null_count
    distinct = pc.count_distinct(array.filter(pa.array(~np.isnan(numbers))) if numbers is not None else array).as_py()
    return ColumnValues(array, numbers, nulls, rows, missing, distinct)


def is_list(kind: Any) -> bool:
    """Whether an arrow type holds lists."""
    import pyarrow as pa

    return any(test(kind) for test in (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list))


def _numbers(array: Any) -> tuple[NDArray[np.float64] | None, tuple[str, ...]]:
    """Returns a column as numbers, and its texts that stand for missing ones; None if it has other values."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = array.type
    if pa.types.is_null(kind):
        return np.full(len(array), np.nan), ()
    if pa.types.is_decimal(kind):
        array = array.cast(pa.float64())
    elif not any(
        is_type(kind)
        for is_type in (pa.types.is_string, pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)
    ):
        return None, ()
    nulls: list[str] = []
    while True:
        try:
            numbers = number_column("", array, fill=float("nan")).astype(np.float64)
        except DataError as error:
            text = error.fields.get("value")
            if not isinstance(text, str) or text.strip() not in MISSING_TEXTS or text in nulls:
                return None, ()
            nulls.append(text)
            array = pc.if_else(pc.equal(array, text), None, array)
            continue
        return (None, ()) if nulls and np.isnan(numbers).all() else (numbers, tuple(nulls))
