"""Rules of a reader that convert values of raw columns to the values on which a model was trained."""

from __future__ import annotations

import math

import msgspec

from persia.checks import check_choice, check_kind, check_number
from persia.errors import ConfigError

__all__ = ["NO_RULES", "InputRules", "WrittenNumbers", "input_rules_of"]


class WrittenNumbers(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """How the numbers of a column are written in texts.

    Args:
        decimal: "." or ",", before the fraction.
        thousands: separator of groups of three digits; empty if there is none.
        unit: text before or after each number, which is removed; empty if there is none. With "%", a text without it
            is an error, as it may be a fraction.
    """

    decimal: str = "."
    thousands: str = ""
    unit: str = ""

    def __post_init__(self) -> None:
        check_choice("WrittenNumbers.decimal", self.decimal, (".", ","))
        check_choice("WrittenNumbers.thousands", self.thousands, ("", ".", ",", "'", "_", " "))
        check_kind("WrittenNumbers.unit", self.unit, str, "a string")


class InputRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Rules of a reader for missing values and lists. Stored with the schema, so that a server applies them, too.

    Args:
        fill: number in place of a missing value, by dense feature.
        lists: separator of the ids within a string, by ID-type feature.
        null_values: strings that mean a missing value in all columns, in addition to the empty string. The numbers
            that these strings denote are missing values, too.
        numbers: how numbers are written in texts, by column, if not as Python writes them: $12.30, 1.234,50 or 17 %.

    Raises:
        ConfigError: a number is not finite, or a string is empty.
    """

    fill: dict[str, float] = {}
    lists: dict[str, str] = {}
    null_values: tuple[str, ...] = ()
    numbers: dict[str, WrittenNumbers] = {}

    def __post_init__(self) -> None:
        for name, value in self.fill.items():
            check_number(f"fill of {name!r}", value, -math.inf, field="fill")
        for name, separator in self.lists.items():
            check_kind("lists", separator, str, "a string by feature")
            if not separator:
                raise ConfigError(f"The separator of lists in {name!r} is empty; set a string.", field="lists")


NO_RULES = InputRules()
"""Rules that leave all values unchanged."""


def input_rules_of(data: object) -> InputRules | None:
    """Returns the rules that a source of batches declares as its `input_rules`; None if it declares none."""
    rules = getattr(data, "input_rules", None)
    return rules if isinstance(rules, InputRules) else None
