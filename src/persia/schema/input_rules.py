"""Rules of a reader that turn values of raw columns into those that a model was trained with."""

from __future__ import annotations

import math

import msgspec

from persia.checks import check_kind, check_number
from persia.errors import ConfigError

__all__ = ["NO_RULES", "InputRules", "input_rules_of"]


class InputRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Rules of a reader for missing values and lists. They travel with the schema, so that a server applies them, too.

    Args:
        fill: number in place of a missing value, by dense feature.
        lists: separator of the ids within a text, by ID-type feature.
        null_values: texts that mean a missing value, in all columns, besides the empty one. Numbers that these texts
            name do so, too.

    Raises:
        ConfigError: a number is not finite, or a text is empty.
    """

    fill: dict[str, float] = {}
    lists: dict[str, str] = {}
    null_values: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, value in self.fill.items():
            check_number(f"fill of {name!r}", value, -math.inf, field="fill")
        for name, separator in self.lists.items():
            check_kind("lists", separator, str, "a text by feature")
            if not separator:
                raise ConfigError(f"The separator of lists in {name!r} is empty; give a text.", field="lists")


NO_RULES = InputRules()
"""The rules of data whose values stay as they are."""


def input_rules_of(data: object) -> InputRules | None:
    """Returns the rules that a source of batches declares as its `input_rules`; None if it declares none."""
    rules = getattr(data, "input_rules", None)
    return rules if isinstance(rules, InputRules) else None
