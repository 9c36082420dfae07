"""Checks of options; each error names the option and its valid values."""

from __future__ import annotations

import difflib
import ipaddress
import math
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from persia.errors import ConfigError

__all__ = [
    "MAX_COUNT",
    "MAX_SECONDS",
    "MAX_SEED",
    "MAX_STEPS",
    "MAX_THREADS",
    "check_choice",
    "check_flag",
    "check_integer",
    "check_kind",
    "check_number",
    "check_seconds",
    "described",
    "did_you_mean",
    "is_loopback",
    "plain",
    "plain_fields",
    "plain_paths",
    "unknown_option",
    "without_userinfo",
]

MAX_COUNT = (1 << 31) - 1
"""Largest count."""
MAX_THREADS = 1024
"""Largest number of threads of a process; with far more, allocations fail or the machine stops responding."""
MAX_STEPS = (1 << 63) - 1
"""Largest number of steps, as checkpoints and messages have 64-bit integers."""
MAX_SEED = (1 << 64) - 1
"""Largest seed."""
MAX_SECONDS = 1e9
"""Longest time, 31 years, as waits of threads and sockets cannot be infinite."""


def plain(value: Any) -> Any:
    """Returns the Python value of a NumPy scalar; any other value unchanged."""
    return value.item() if isinstance(value, np.generic) else value


def plain_fields(record: msgspec.Struct) -> None:
    """Replaces NumPy scalars in the fields of a record by Python values, as checkpoints and messages require."""
    for name in record.__struct_fields__:
        value = getattr(record, name)
        if isinstance(value, np.generic):
            msgspec.structs.force_setattr(record, name, plain(value))


def plain_paths(record: msgspec.Struct, *names: str) -> None:
    """Replaces path objects in these fields of a record by texts, as checkpoints and messages require."""
    for name in names:
        value = getattr(record, name)
        if isinstance(value, os.PathLike):
            msgspec.structs.force_setattr(record, name, os.fspath(value))


def check_integer(name: str, value: object, low: int, high: float = MAX_COUNT, *, field: str | None = None) -> None:
    """Raises ConfigError unless `value` is a whole number from `low` to `high`; its `field` is `name` by default."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(
            f"Invalid {name} = {value!r}; expected a whole number from {low} to {high}.", field=field or name
        )


def check_number(
    name: str,
    value: object,
    low: float,
    high: float = math.inf,
    *,
    open_low: bool = False,
    open_high: bool = False,
    field: str | None = None,
) -> None:
    """Raises ConfigError unless `value` is a finite number between `low` and `high`.

    Args:
        name: name of the option, for the message.
        value: value of the option.
        low: least number.
        high: largest number.
        open_low: whether `low` itself is refused.
        open_high: whether `high` itself is refused.
        field: field of the error; `name` by default.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool) and -math.inf < value < math.inf:
        inside = (low < value if open_low else low <= value) and (value < high if open_high else value <= high)
        if inside and _is_float(value):
            return
    opening, closing = "(" if open_low or math.isinf(low) else "[", ")" if open_high or math.isinf(high) else "]"
    raise ConfigError(
        f"Invalid {name} = {value!r}; expected a number in {opening}{low:g}, {high:g}{closing}.",
        field=field or name,
    )


def check_seconds(name: str, value: object, *, field: str | None = None) -> None:
    """Raises ConfigError unless `value` is a time above 0 and at most `MAX_SECONDS`. See `check_number`."""
    check_number(name, value, 0, MAX_SECONDS, open_low=True, field=field)


def check_flag(name: str, value: object, *, field: str | None = None) -> None:
    """Raises ConfigError unless `value` is a boolean. A text such as "no" would count as True."""
    if not isinstance(value, bool):
        raise ConfigError(f"Invalid {name} = {value!r}; expected True or False.", field=field or name)


def check_choice(name: str, value: object, choices: Sequence[str], *, field: str | None = None) -> None:
    """Raises ConfigError unless `value` is one of these texts; its `field` is `name` by default."""
    if value not in choices:
        raise ConfigError(
            f"Invalid {name} = {value!r}; expected one of: {', '.join(choices)}.{did_you_mean(value, choices)}",
            field=field or name,
        )


def unknown_option(option: str, name: str, known: Iterable[str], field: str) -> ConfigError:
    """Returns the error of an option that does not exist.

    Args:
        option: the option as the message shows it.
        name: name of the option.
        known: names of all options.
        field: field of the error.
    """
    known = list(known)
    return ConfigError(
        f"Unknown option {option}; expected one of: {', '.join(known)}.{did_you_mean(name, known)}", field=field
    )


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Returns " Did you mean ...?" for a misspelt name; empty if no known name is similar."""
    by_letters = {each.lower().replace("-", "_"): each for each in known}
    close = difflib.get_close_matches(str(name).lower().replace("-", "_"), by_letters, n=1)
    return f" Did you mean {by_letters[close[0]]!r}?" if close else ""


def check_kind(name: str, value: object, kinds: Any, expected: str) -> None:
    """Raises ConfigError unless `value` is an instance of `kinds`, which `expected` describes."""
    if not isinstance(value, kinds):
        raise ConfigError(f"Invalid {name} = {described(value)}; expected {expected}.", field=name)


def described(value: object) -> str:
    """Returns a short description of a value, as the repr of optimizers, modules and clusters takes lines."""
    if value is None or isinstance(value, (str, int, float)):
        return repr(value)
    kind = value if isinstance(value, type) else type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"the class {name}" if isinstance(value, type) else f"<{name}>"


def _is_float(value: float) -> bool:
    """Returns whether a float can hold the number, which a larger int exceeds."""
    try:
        float(value)
    except OverflowError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Returns whether an address or host name can be reached only from this host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def without_userinfo(text: str) -> str:
    """Returns a URL, or a message with URLs, without user names and passwords."""
    return re.sub(r"(?<=://)[^/?#\s]*@", "", text)
