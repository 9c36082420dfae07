"""Parts of times, such as hour and weekday, in a time zone; see `TimePart`."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import numpy as np

from persia.schema.derivations import Part
from persia.types import Ids, Int64Array

__all__ = ["LEAST_SECOND", "MOST_SECOND", "time_parts"]

DAY = 86_400
_QUARTER = 900
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

LEAST_SECOND = int((datetime(1, 1, 2, tzinfo=UTC) - _EPOCH).total_seconds())
"""A day after the first second that `datetime` can represent, so that every zone has a local time for it."""
MOST_SECOND = int((datetime(9999, 12, 30, tzinfo=UTC) - _EPOCH).total_seconds())

_FIRST, _LAST = 0, int((datetime(2070, 1, 1, tzinfo=UTC) - _EPOCH).total_seconds())
"""Bounds of the changes of offsets that are computed in advance. Other times are converted one by one."""


def time_parts(seconds: Int64Array, part: Part, zone: str | None) -> Ids:
    """Returns a part of each time.

    Args:
        seconds: int64 `[n]` since 1970 in UTC, from `LEAST_SECOND` to `MOST_SECOND`.
        part: see `TimePart`.
        zone: time zone; None for UTC.

    Returns:
        uint64 `[n]`.
    """
    if zone is not None:
        seconds = seconds + _offsets(zone).at(seconds)
    parts: Ids = _PARTS[part](seconds).astype(np.uint64)
    return parts


def _days(seconds: Int64Array) -> Int64Array:
    return seconds // DAY


def _weekday(seconds: Int64Array) -> Int64Array:
    return (_days(seconds) + 3) % 7  # 1970-01-01 was a Thursday.


def _hour(seconds: Int64Array) -> Int64Array:
    return seconds // 3600 % 24


def _year_of_days(days: Int64Array) -> Int64Array:
    years: Int64Array = days.view("datetime64[D]").astype("datetime64[Y]").astype(np.int64) + 1970
    return years


def _month(seconds: Int64Array) -> Int64Array:
    months: Int64Array = _days(seconds).view("datetime64[D]").astype("datetime64[M]").astype(np.int64) % 12 + 1
    return months


def _day(seconds: Int64Array) -> Int64Array:
    dates = _days(seconds).view("datetime64[D]")
    days: Int64Array = (dates - dates.astype("datetime64[M]")).astype(np.int64) + 1
    return days


def _week(seconds: Int64Array) -> Int64Array:
    """Returns ISO weeks: the week belongs to the year of its Thursday."""
    days = _days(seconds)
    thursdays = (days - (days + 3) % 7 + 3).view("datetime64[D]")
    weeks: Int64Array = (thursdays - thursdays.astype("datetime64[Y]")).astype(np.int64) // 7 + 1
    return weeks


_PARTS: Mapping[Part, Callable[[Int64Array], Int64Array]] = {
    "minute": lambda seconds: seconds // 60 % 60,
    "hour": _hour,
    "weekday": _weekday,
    "hour_of_week": lambda seconds: _weekday(seconds) * 24 + _hour(seconds),
    "day": _day,
    "week": _week,
    "month": _month,
    "year": lambda seconds: _year_of_days(_days(seconds)),
}


@functools.lru_cache(maxsize=64)
def _offsets(zone: str) -> _Offsets:
    return _Offsets(ZoneInfo(zone))


class _Offsets:
    """The offsets of a time zone from UTC. Thread-safe.

    zoneinfo answers for one time at a time, so the changes of the offset are found once, and each batch is looked up in
    them.

    Args:
        zone: the time zone.
    """

    def __init__(self, zone: ZoneInfo) -> None:
        self._zone = zone
        self._lock = threading.Lock()
        self._changes: tuple[Int64Array, Int64Array] | None = None

    def at(self, seconds: Int64Array) -> Int64Array:
        """Returns the offsets at some times, int64 `[n]` seconds east of UTC.

        Args:
            seconds: int64 `[n]` since 1970 in UTC.
        """
        with self._lock:
            if self._changes is None:
                self._changes = self._found()
        starts, offsets = self._changes
        result: Int64Array = offsets[np.maximum(np.searchsorted(starts, seconds, side="right") - 1, 0)]
        outside = (seconds < _FIRST) | (seconds >= _LAST)
        if outside.any():
            distinct, inverse = np.unique(seconds[outside], return_inverse=True)
            result[outside] = np.array([self._offset(second) for second in distinct.tolist()], np.int64)[inverse]
        return result

    def _found(self) -> tuple[Int64Array, Int64Array]:
        """Returns the first second of each offset from `_FIRST` on, and the offsets."""
        starts, offsets = [_FIRST], [self._offset(_FIRST)]
        days = range(_FIRST, _LAST, DAY)
        after = [self._offset(day) for day in days]
        for day, first, last in zip(days, after, [*after[1:], self._offset(_LAST)], strict=False):
            if first == last:
                continue
            known = first  # Twice within a day is rare, but happens in some zones.
            for quarter in range(day, day + DAY, _QUARTER):
                end = self._offset(quarter + _QUARTER)
                if end != known:
                    starts.append(self._change(quarter, quarter + _QUARTER, known))
                    offsets.append(end)
                    known = end
        return np.array(starts, np.int64), np.array(offsets, np.int64)

    def _change(self, low: int, high: int, before: int) -> int:
        """Returns the first second in (low, high] whose offset is not `before`."""
        while high - low > 1:
            middle = (low + high) // 2
            if self._offset(middle) == before:
                low = middle
            else:
                high = middle
        return high

    def _offset(self, second: int) -> int:
        offset = (_EPOCH + timedelta(seconds=second)).astimezone(self._zone).utcoffset()
        assert offset is not None
        return offset // timedelta(seconds=1)
