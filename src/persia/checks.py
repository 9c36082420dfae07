"""Checks of options; each error names the option, and says which values it takes."""

from __future__ import annotations

import math

from persia.errors import ConfigError

__all__ = [
    "MAX_COUNT",
    "MAX_SECONDS",
    "MAX_SEED",
    "MAX_STEPS",
    "MAX_THREADS",
    "check_integer",
    "check_number",
    "check_seconds",
]

MAX_COUNT = (1 << 31) - 1
"""Largest number of things of a kind."""
MAX_THREADS = 1024
"""Largest number of threads of a process; of far more the first allocation fails, or the machine stands still."""
MAX_STEPS = (1 << 63) - 1
"""Largest number of steps: checkpoints and messages have whole numbers of 64 bits."""
MAX_SEED = (1 << 64) - 1
"""Largest seed."""
MAX_SECONDS = 1e9
"""Longest time, 31 years: waits of threads and sockets take no infinite one."""


def check_integer(name: str, value: object, low: int, high: float = MAX_COUNT) -> None:
    """Raises ConfigError unless `value` is a whole number from `low` to `high`."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(f"{name} = {value!r} is not a whole number from {low} to {high}; correct it.", field=name)


def check_number(
    name: str,
    value: object,
    low: float,
    high: float = math.inf,
    *,
    open_low: bool = False,
    open_high: bool = False,
) -> None:
    """Raises ConfigError unless `value` is a finite number between `low` and `high`, without those that are open."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and -math.inf < value < math.inf:
        inside = (low < value if open_low else low <= value) and (value < high if open_high else value <= high)
        if inside and _is_float(value):
            return
    interval = f"{'(' if open_low else '['}{low:g}, {high:g}{')' if open_high or math.isinf(high) else ']'}"
    raise ConfigError(f"{name} = {value!r} is not a number in {interval}; correct it.", field=name)


def check_seconds(name: str, value: object) -> None:
    """Raises ConfigError unless `value` is a time above 0, of at most `MAX_SECONDS`."""
    check_number(name, value, 0, MAX_SECONDS, open_low=True)


def _is_float(value: float) -> bool:
    """Returns whether a float can hold the number, which a larger int exceeds."""
    try:
        float(value)
    except OverflowError:
        return False
    return True
