"""The slow, readable twin of :mod:`persia.batching.derived_ids`: one value at a time, in plain Python."""

from __future__ import annotations

import math
import re
from datetime import UTC, date, datetime, timedelta, timezone
from fractions import Fraction
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np

from persia.schema import Buckets, IdFeature, TimePart, Tokens
from support.twins.batching import xxh64

__all__ = ["bucket", "ids_of_row", "seconds_of", "time_part", "words"]

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
UNITS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
MISSING = ["NA", "N/A", "n/a", "#N/A", "<NA>", "NULL", "Null", "null", "NaN", "nan", "NAN", "None", "none", r"\N", ""]
ISO = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)(?:[T ](\d\d)(?::(\d\d)(?::(\d\d)(?:\.\d{1,9})?)?)?(Z|[+-]\d\d(?::?\d\d)?)?)?", re.ASCII
)
DAY_FIRST = re.compile(r"(\d{1,2})\.(\d{1,2})\.(\d{4})(?:,? +(\d{1,2}):(\d\d)(?::(\d\d)(?:\.\d{1,6})?)?)?", re.ASCII)
DECIMAL = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)


def _is_missing(value: Any) -> bool:
    if isinstance(value, (str, bytes)):
        text = value.decode(errors="replace") if isinstance(value, bytes) else value
        return text.strip(" \t") in MISSING
    return value is None or value != value


def bucket(buckets: Buckets, value: Any) -> int | None:
    """Returns the bucket of a number, or of a text of a number; None if it is missing."""
    if _is_missing(value):
        return None
    number = float(str(value) if isinstance(value, np.floating) else value)
    if buckets.width is not None:
        floor = math.floor(number / buckets.width)
        return 2 * floor if floor >= 0 else -2 * floor - 1
    edges = buckets.edges or buckets.fitted
    assert edges is not None
    return sum(edge <= number for edge in edges)


def seconds_of(value: Any, unit: str = "s") -> int | None:
    """Returns whole seconds since 1970 in UTC, rounded down; None if the value is missing."""
    if _is_missing(value):
        return None
    if isinstance(value, np.datetime64):
        return int(value.astype("datetime64[ns]").astype(int)) // 10**9
    if isinstance(value, datetime):
        return math.floor(((value if value.tzinfo else value.replace(tzinfo=UTC)) - EPOCH) / timedelta(seconds=1))
    if isinstance(value, date):
        return (value - EPOCH.date()).days * 86_400
    if not isinstance(value, str):
        return math.floor(value) // UNITS[unit]
    text = value.strip(" \t")
    if DECIMAL.fullmatch(text):
        return math.floor(Fraction(text)) // UNITS[unit]
    if found := DAY_FIRST.fullmatch(text):
        day, month, year, *clock = (int(part or 0) for part in found.groups())
        return seconds_of(datetime(year, month, day, *clock))
    found = ISO.fullmatch(text)
    if found is None:
        raise ValueError(value)
    numbers = [int(part or 0) for part in found.groups()[:6]]
    return seconds_of(datetime(*numbers, tzinfo=_zone(found[7])))  # type: ignore[arg-type, misc]


def _zone(text: str | None) -> timezone:
    if text is None or text == "Z":
        return UTC
    digits = text[1:].replace(":", "").ljust(4, "0")
    offset = timedelta(hours=int(digits[:2]), minutes=int(digits[2:]))
    return timezone(-offset if text[0] == "-" else offset)


def time_part(part: TimePart, value: Any) -> int | None:
    """Returns a part of a time; None if it is missing."""
    seconds = seconds_of(value, part.unit)
    if seconds is None:
        return None
    local = (EPOCH + timedelta(seconds=seconds)).astimezone(ZoneInfo(part.zone or "UTC"))
    return {
        "minute": local.minute,
        "hour": local.hour,
        "weekday": local.weekday(),
        "hour_of_week": local.weekday() * 24 + local.hour,
        "day": local.day,
        "week": local.isocalendar().week,
        "month": local.month,
        "year": local.year,
    }[part.part]


OUTSIDE = """
0080-00A9 00AB-00B4 00B6-00B9 00BB-00BF 00D7 00F7 037E 0387 055A-055F 0589-058A 05BE 05C0 05C3 05F3-05F4 060C-060D
061B-061F 066A-066D 06D4 0964-0965 1361-1368 1680 2000-200B 200E-206F 20A0-20CF 2190-2BFF 2E00-2E7F 3000-3004
3008-3020 3030 D800-DFFF FE00-FE1F FE30-FE6F FEFF FF00-FF0F FF1A-FF20 FF3B-FF3E FF40 FF5B-FF65 FFE0-FFFF 1F000-1FAFF
E0000-E0FFF
"""
_BLOCKS = "".join("-".join(rf"\U{int(end, 16):08x}" for end in block.split("-")) for block in OUTSIDE.split())
_INSIDE = rf"[A-Za-z0-9_\u200c\u200d]|[^\x00-\x7f{_BLOCKS}]"
WORD = re.compile(rf"(?![\u200c\u200d])(?:{_INSIDE})+")


def words(tokens: Tokens, value: str | bytes | int) -> list[int]:
    """Returns the ids of the words of a text, and of sequences of words."""
    text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    found = WORD.findall(text.lower() if tokens.lower else text)
    ids = []
    for first in range(len(found)):
        for length in tokens.ngrams:
            if first + length <= len(found):
                ids.append(xxh64(" ".join(found[first : first + length]).encode()))
    return ids


def ids_of_row(feature: IdFeature, value: Any) -> list[int]:
    """Returns the ids of a sample of a feature with `bucketize`, `time` or `tokens`.

    Args:
        feature: the feature.
        value: the value of the sample, or a list of its values.
    """
    ids: list[int] = []
    for each in value if isinstance(value, list) else [value]:
        if feature.tokens is not None:
            ids += [] if each is None else words(feature.tokens, each)
            continue
        if feature.time is not None:
            id_ = time_part(feature.time, each)
        else:
            assert feature.bucketize is not None
            id_ = bucket(feature.bucketize, each)
        ids += [] if id_ is None else [id_]
    if not ids and feature.fill is not None:
        ids = [int(feature.fill)]
    return ids
