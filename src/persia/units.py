"""Quantities in files and on the command line: "12TB", "100Gbit/s", "1.5e9"."""

from __future__ import annotations

import math
import re

from persia.errors import ConfigError

__all__ = ["format_bytes", "format_count", "format_seconds", "parse_bandwidth", "parse_bytes", "parse_count"]

_BYTES = {
    "": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "PIB": 2**50,
}  # fmt: skip
MAX = 1 << 63
"""Above all quantities."""
_COUNTS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12}
_BITS = {"BIT/S": 1, "KBIT/S": 10**3, "MBIT/S": 10**6, "GBIT/S": 10**9, "TBIT/S": 10**12}
_QUANTITY = re.compile(r"\s*([0-9][0-9_,]*\.?[0-9]*(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z/]*)\s*")


def parse_bytes(value: object, field: str) -> int:
    """Reads bytes: a number, or text with a unit, such as "480GB" or "64GiB".

    Raises:
        ConfigError: the value is invalid.
    """
    return int(_parse(value, field, _BYTES, "bytes, such as 480GB or 64GiB"))


def parse_count(value: object, field: str) -> int:
    """Reads a number of rows or samples: a number, or text such as "1.2e9", "50M" or "1G".

    Raises:
        ConfigError: the value is invalid.
    """
    return int(_parse(value, field, _COUNTS, "a number, such as 1200000000, 1.2e9 or 50M"))


def parse_bandwidth(value: object, field: str) -> float:
    """Reads a network bandwidth in one direction, and returns bytes/s: "100Gbit/s", or "12GB/s".

    Raises:
        ConfigError: the value is invalid.
    """
    if isinstance(value, str) and value.strip().upper().endswith("BIT/S"):
        return _parse(value, field, _BITS, "a bandwidth, such as 100Gbit/s") / 8
    text = value.strip()[:-2] if isinstance(value, str) and value.strip().lower().endswith("/s") else value
    return _parse(text, field, _BYTES, "a bandwidth, such as 100Gbit/s")


def _parse(value: object, field: str, units: dict[str, int], expected: str) -> float:
    number = math.nan
    if isinstance(value, int | float) and not isinstance(value, bool) and value < MAX:
        number = float(value)
    elif isinstance(value, str) and (match := _QUANTITY.fullmatch(value)) and match[2].upper() in units:
        number = float(match[1].replace("_", "").replace(",", "")) * units[match[2].upper()]
    if not 0 <= number < MAX:
        raise ConfigError(f"Invalid {field} = {value!r}; expected {expected}.", field=field)
    return number


def format_bytes(count: float) -> str:
    """Formats bytes with a decimal unit, as hosts and disks are sold."""
    for unit, name in ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= unit:
            return f"{count / unit:,.{1 if count >= 10 * unit else 2}f} {name}"
    return f"{count:,.0f} B"


def format_count(count: float) -> str:
    """Formats a number of rows or samples."""
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if count >= unit:
            return f"{count / unit:,.4g} {name}"
    return f"{count:,.0f}"


def format_seconds(seconds: float) -> str:
    """Formats a duration."""
    if seconds >= 7200:
        return f"{seconds / 3600:,.1f} h"
    if seconds >= 120:
        return f"{seconds / 60:,.0f} min"
    return f"{seconds:,.2g} s" if seconds < 10 else f"{seconds:,.0f} s"
