"""Normalizes numbers that are written with a decimal comma, thousands separators, or a unit."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from persia.errors import ConfigError

__all__ = ["Numerals"]


_SPACE = "(?:\\s|\u00a0|\u202f)"


class Numerals(NamedTuple):
    """Writing of numbers in texts.

    Attributes:
        decimal: `"."` or `","`, before the fraction.
        thousands: one of `.`, `,`, `'`, `_` and space between groups of three digits; empty if there is none. A space
            is any of U+0020, U+00A0 and U+202F, as spreadsheet programs write them.
    """

    decimal: str = "."
    thousands: str = ""

    def check(self) -> Numerals:
        """Returns itself.

        Raises:
            ConfigError: a separator is invalid, or both are the same.
        """
        if self.decimal not in (".", ","):
            raise ConfigError(f"Invalid decimal = {self.decimal!r}; expected '.' or ','.", field="decimal")
        if self.thousands not in ("", ".", ",", "'", "_", " "):
            raise ConfigError(
                f"Invalid thousands = {self.thousands!r}; expected one of: '', '.', ',', \"'\", '_', ' '.",
                field="thousands",
            )
        if self.decimal == self.thousands:
            raise ConfigError(
                f"decimal and thousands are both {self.decimal!r}; give the separator before the fraction as decimal.",
                field="thousands",
            )
        return self

    @property
    def plain(self) -> bool:
        """Whether numbers are written as Python writes them."""
        return self == Numerals()

    @property
    def separator(self) -> str:
        """Regular expression of the separator of thousands."""
        return "(?: |\u00a0|\u202f)" if self.thousands == " " else re.escape(self.thousands)

    @property
    def groups(self) -> str:
        """Regular expression of a whole number with separators of thousands."""
        return rf"[0-9]{{1,3}}(?:{self.separator}[0-9]{{3}})+"

    @property
    def unsigned(self) -> str:
        """Regular expression of a number in this writing, without a sign."""
        groups = f"{self.groups}|" if self.thousands else ""
        return rf"(?:{groups}[0-9]+)(?:{re.escape(self.decimal)}[0-9]+)?"

    @property
    def pattern(self) -> str:
        """Regular expression of a number in this writing, with spaces around it."""
        return rf"^\s*[+-]?{self.unsigned}\s*$"

    def amounts(self, unit: str) -> str:
        """Regular expression of a number in this writing, with optional spaces and unit around it."""
        name, s, number = re.escape(unit), f"{_SPACE}*", self.unsigned
        return rf"^{s}(?:[+-]?{s}{name}{s}[+-]?{number}|[+-]?{number}{s}(?:{name})?){s}$"

    def normalized(self, column: Any, unit: str = "") -> Any:
        """Rewrites numbers in a pyarrow column of texts or bytes as Python writes them; other values are unchanged.

        Args:
            column: the texts.
            unit: text before or after numbers to remove.
        """
        import pyarrow as pa
        import pyarrow.compute as pc

        if (self.plain and not unit) or not (pa.types.is_string(column.type) or pa.types.is_binary(column.type)):
            return column
        numbers = pc.match_substring_regex(column, self.amounts(unit) if unit else self.pattern)
        digits = column
        if unit:
            digits = pc.replace_substring_regex(pc.replace_substring(column, unit, ""), _SPACE, "")
        if self.thousands:
            digits = pc.replace_substring_regex(digits, self.separator, "")
        return pc.if_else(numbers, pc.replace_substring(digits, self.decimal, "."), column)
