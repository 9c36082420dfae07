"""Guesses which parts of the times in a column are ids."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from persia.cli.init.guessed_columns import ColumnGuess, ColumnValues
from persia.data.column_values import times_of_text

__all__ = ["guess_time"]

_HOUR, _DAY = 3_600, 86_400
_TWO_WEEKS, _TWO_YEARS = 14 * _DAY, 730 * _DAY


def guess_time(column: str, values: ColumnValues, unit: str = "") -> ColumnGuess:
    """Returns the guess about a column of times.

    Args:
        column: its name.
        values: its values: timestamps, dates, texts of these, or numbers since 1970.
        unit: unit of numbers.
    """
    seconds = _seconds(values, unit)
    reason = f"times since 1970 in {unit}" if unit else "dates or times"
    parts = []
    if len(np.unique(seconds % _DAY // _HOUR)) > 1:
        parts.append(("hour", "its hours differ"))
    span = int(seconds.max() - seconds.min())
    if span >= _TWO_WEEKS:
        parts.append(("weekday", f"{span // _DAY:,} days"))
    if span >= _TWO_YEARS:
        parts.append(("month", f"{span // _DAY:,} days"))
    return ColumnGuess(column, "time", reason, parts=dict(parts), unit=unit, missing=values.missing / values.rows)


def _seconds(values: ColumnValues, unit: str) -> NDArray[np.int64]:
    """Returns the times that are present, in seconds since 1970."""
    import pyarrow as pa

    if unit:
        assert values.numbers is not None
        per = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}[unit]
        return (values.numbers[~np.isnan(values.numbers)] // per).astype(np.int64)
    times: Any = values.array
    if pa.types.is_string(times.type):
        times = times_of_text("", times)
    seconds = times.drop_null().cast(pa.timestamp("s", getattr(times.type, "tz", None)), safe=False)
    integers: NDArray[np.int64] = seconds.cast(pa.int64()).to_numpy(zero_copy_only=False)
    return integers
