"""Converts columns and hive keys to days, for `Batch.day`."""

from __future__ import annotations

from datetime import date
from typing import Any, Literal, TypeAlias

from persia.data.column_values import times_of_text
from persia.errors import DataError

__all__ = ["PER_DAY", "DayUnit", "day_of_column", "day_of_text"]

DayUnit: TypeAlias = Literal["day", "s", "ms", "us", "ns"]
"""Unit of a whole number in a day column."""

PER_DAY = {"day": 1, "s": 86_400, "ms": 86_400_000, "us": 86_400_000_000, "ns": 86_400_000_000_000}


def day_of_text(key: str, text: str, per_day: int) -> int:
    """Parses the number or the ISO date (as days since 1970) in a hive key."""
    try:
        return (
            int(text) // per_day if text.lstrip("-").isdecimal() else (date.fromisoformat(text) - date(1970, 1, 1)).days
        )
    except ValueError as error:
        raise DataError(f"Hive key {key}={text} is neither a number nor an ISO date; rename it.", column=key) from error


def day_of_column(name: str, column: Any, unit: DayUnit) -> Any:
    """Converts an arrow column of whole numbers, dates (days since 1970), timestamps, or texts of these to days."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if isinstance(column, list):
        raise DataError(f"Day column {name!r} has no days; give whole numbers, dates or timestamps.", column=name)
    if pa.types.is_string(column.type) or pa.types.is_binary(column.type) or pa.types.is_large_string(column.type):
        column = times_of_text(name, column)
    kind = column.type
    if pa.types.is_date32(kind):
        column, unit = column.cast(pa.int32()), "day"
    elif pa.types.is_date64(kind):
        column, unit = column.cast(pa.int64()), "ms"
    elif pa.types.is_timestamp(kind):
        column, unit = column.cast(pa.int64()), kind.unit
    elif not pa.types.is_integer(kind):
        raise DataError(f"Day column {name!r} is {kind}; give whole numbers, dates or timestamps.", column=name)
    if column.null_count:
        row = int(pc.index(pc.is_null(column), True).as_py())
        message = f"Day column {name!r} has a missing value at row {row}; fill it in, or leave the row out."
        raise DataError(message, column=name, row=row)
    return column.to_numpy(zero_copy_only=False) // PER_DAY[unit]
