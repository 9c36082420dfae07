"""Converts the times of events to seconds, and their ages to magnitudes; see `IdFeature.age_since`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, date, datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from persia.batching.id_column import IdColumn
from persia.batching.ids import flattened, offsets_of_present, row_of
from persia.errors import DataError
from persia.types import Ids, Int64Array

__all__ = ["magnitudes", "seconds_of_list", "seconds_of_timestamps"]

_LEAST = np.array([(1 << magnitude) - 1 for magnitude in range(1, 65)], np.uint64)
"""Least age of each magnitude from 1 on."""

_YEAR_1970 = np.uint64(1 << 63)
"""Second 0: ids are not negative, but seconds before 1970 are."""


def magnitudes(ages: Ids) -> Ids:
    """Returns floor(log2(1 + age)), exactly: logarithms of floats round up below powers of two from 2^49 on."""
    result: Ids = np.searchsorted(_LEAST, ages, side="right").astype(np.uint64)
    return result


def seconds_of_timestamps(values: NDArray[np.datetime64], offsets: Int64Array | None) -> IdColumn:
    """Returns whole seconds, rounded down, as numbers that rise with time; NaT values are left out.

    Args:
        values: datetime64 `[n]` of any unit, in UTC.
        offsets: int64 `[batch + 1]`; None for one time in each sample.
    """
    present = ~np.isnat(values)
    if not present.all():
        values, offsets = values[present], offsets_of_present(present, offsets)
    seconds = np.ascontiguousarray(values.astype("datetime64[s]")).view(np.uint64)
    return IdColumn(seconds + _YEAR_1970, offsets)  # Wraps around.


def seconds_of_list(name: str, rows: Sequence[Any]) -> IdColumn | None:
    """Returns the seconds of a list of timestamps or dates, or of lists of these; None if it begins with another value.

    Raises:
        DataError: another value is among the timestamps.
    """
    flat, offsets = flattened(rows)
    if not flat or not isinstance(flat[0], (date, np.datetime64)):
        return None
    seconds = np.empty(len(flat), "datetime64[s]")
    for at, value in enumerate(flat):
        if not isinstance(value, (date, np.datetime64)):
            row = row_of(at, offsets)
            raise DataError(
                f"Column {name!r} has {type(value).__name__} {value!r} at row {row} among timestamps; give all times "
                "of a column as timestamps, or all as whole numbers.",
                column=name,
                row=row,
                value=repr(value),
            )
        if isinstance(value, datetime) and value.tzinfo is not None:
            value = value.astimezone(UTC).replace(tzinfo=None)
        seconds[at] = np.datetime64(value, "s")
    return seconds_of_timestamps(seconds, offsets)
