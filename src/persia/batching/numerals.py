"""Normalizes numbers that are written with a decimal comma, thousands separators, or a unit."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np

from persia.batching.frames import is_arrow
from persia.batching.id_column import IdColumn
from persia.batching.numbers import as_array, is_pair
from persia.errors import ConfigError, DataError
from persia.schema import WrittenNumbers

__all__ = ["Numerals", "with_plain_numbers"]


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

    def bare_row(self, column: Any) -> int:
        """Returns the first row of a pyarrow column of texts that has a number without a unit; -1 for none."""
        import pyarrow.compute as pc

        return int(pc.index(pc.match_substring_regex(column, self.pattern), True).as_py())


def with_plain_numbers(name: str, column: Any, written: WrittenNumbers) -> Any:
    """Returns a column of any kind whose texts of numbers are written as Python writes them.

    Numbers stay as they are, and so do lists and texts that are no numbers.

    Args:
        name: its name, for errors.
        column: the column, see `Batch.from_columns`.
        written: how its numbers are written.

    Raises:
        DataError: the unit is "%", and a text has none, so that it may be a fraction; names the row.
    """
    import pyarrow as pa

    numerals = Numerals(written.decimal, written.thousands)
    if isinstance(column, IdColumn) or is_pair(column):
        return column
    if is_arrow(column):
        if isinstance(column, pa.ChunkedArray):
            column = column.combine_chunks()
        if isinstance(column, pa.DictionaryArray):
            column = column.dictionary_decode()
        if pa.types.is_large_string(column.type) or str(column.type) == "string_view":
            column = column.cast(pa.string())
        elif pa.types.is_large_binary(column.type) or str(column.type) == "binary_view":
            column = column.cast(pa.binary())
        if not (pa.types.is_string(column.type) or pa.types.is_binary(column.type)):
            return column
        return _plain(name, column, numerals, written.unit, None)
    values = column if isinstance(column, (list, tuple)) else as_array(name, column)
    if isinstance(values, np.ndarray):
        if values.dtype.kind not in "OUST":
            return values
        values = values.tolist()
    rows = [row for row, value in enumerate(values) if isinstance(value, (str, bytes))]
    texts = [values[row].decode(errors="replace") if isinstance(values[row], bytes) else values[row] for row in rows]
    plain = list(values)
    converted = _plain(name, pa.array(texts, pa.string()), numerals, written.unit, rows).to_pylist()
    for row, value in zip(rows, converted, strict=True):
        plain[row] = value
    return plain


def _plain(name: str, column: Any, numerals: Numerals, unit: str, rows: list[int] | None) -> Any:
    """Returns a pyarrow column of texts with plain numbers; `rows` are its rows, None for all."""
    at = numerals.bare_row(column) if unit == "%" else -1
    if at >= 0:
        value = column[at].as_py()
        value = value.decode(errors="replace") if isinstance(value, bytes) else value
        row = at if rows is None else rows[at]
        raise DataError(
            f"Column {name!r} has {value!r} at row {row}, without the % of its unit, so that it may be a fraction; add "
            "the sign, or give a number in place of the text. A column without signs needs no unit.",
            column=name,
            row=row,
            value=value,
        )
    return numerals.normalized(column, unit)
