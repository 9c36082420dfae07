"""Detects whether the numbers in texts have a decimal comma, thousands separators, or units."""

from __future__ import annotations

import re
from typing import Any

from persia.batching.numerals import Numerals
from persia.cli.init.column_names import NUMBER_WORDS, words_of
from persia.cli.init.guessed_columns import MISSING_TEXTS

__all__ = ["guess_numerals", "guess_units", "normalized_columns"]

_WRITINGS = (Numerals(",", "."), Numerals(",", " "), Numerals(".", ","), Numerals(".", "'"))
_KNOWN_MISSING = "^\\s*(?:NA|N/A|n/a|#N/A|<NA>|NULL|Null|null|NaN|nan|NAN|None|none|\\\\N)?\\s*$"
_SPACE = "(?:\\s|\u00a0|\u202f)*"
_DIGITS = "[0-9](?:[0-9.,'_ ]|\u00a0|\u202f)*"
_UNITS = (
    "US$", "R$", "A$", "C$", "$", "€", "£", "¥", "₹", "₽", "₩", "₺", "₴", "₪", "₫", "฿", "%", "USD", "EUR", "GBP",
    "CHF", "JPY", "CNY", "INR", "BRL", "PLN", "SEK", "NOK", "DKK", "CZK", "HUF", "kr.", "kr", "zł", "Kč", "Ft",
)  # fmt: skip
_SAMPLED_ROWS = 1_000


def guess_units(columns: dict[str, Any]) -> dict[str, str]:
    """Returns the unit of each column of amounts, such as $12.30, 12,30 € and 17 %.

    Args:
        columns: pyarrow array of texts by column.
    """
    units = {}
    for name, column in columns.items():
        head = [text for text in column.slice(0, _SAMPLED_ROWS).to_pylist() if text is not None]
        unit = next((unit for unit in _UNITS if any(unit in text for text in head)), None)
        if unit is not None and _all(column, _amounts(unit)):
            units[name] = unit
    return units


def _amounts(unit: str) -> str:
    name = re.escape(unit)
    after = f"(?:{name})" if unit == "%" else f"(?:{name})?"  # 0.17 may be 17 %.
    sign = f"[+-]?{_SPACE}"
    return rf"^{_SPACE}(?:{sign}{name}{_SPACE}{sign}{_DIGITS}|{sign}{_DIGITS}{_SPACE}{after}){_SPACE}$"


def guess_numerals(columns: dict[str, Any], units: dict[str, str]) -> Numerals:
    """Returns the writing of numbers in texts.

    Args:
        columns: pyarrow array of texts by column.
        units: unit by column.
    """
    columns = {name: _bare(column, units.get(name)) for name, column in columns.items()}
    best, most_columns = Numerals(), 0
    for numerals in _WRITINGS:
        matching = [name for name, column in columns.items() if _is_written(name, column, numerals, name in units)]
        if len(matching) > most_columns:
            grouped = any(_any(columns[name], rf"^\s*[+-]?{numerals.groups}") for name in matching)
            best, most_columns = numerals if grouped else Numerals(numerals.decimal), len(matching)
    return best


def normalized_columns(columns: dict[str, Any], numerals: Numerals, units: dict[str, str]) -> dict[str, Any]:
    """Returns the columns, with numbers converted to the writing that the reader accepts."""
    read = {}
    for name, column in columns.items():
        bare = _bare(column, units.get(name))
        numbers = _all(bare, numerals.pattern) and (
            not _any(bare, ",") or _is_written(name, bare, numerals, name in units)
        )
        read[name] = numerals.normalized(column, units.get(name, "")) if numbers else column
    return read


def _bare(column: Any, unit: str | None) -> Any:
    import pyarrow.compute as pc

    if unit is None:
        return column
    return pc.utf8_trim(pc.replace_substring(column, unit, ""), characters=" \t\u00a0\u202f")


def _is_written(name: str, column: Any, numerals: Numerals, amount: bool) -> bool:
    """Whether a column has numbers that can be read only in this writing, and that are not lists of ids."""
    if not _all(column, numerals.pattern):
        return False
    if numerals.decimal == ".":
        # 229,453 may be a list of two ids.
        named = amount or bool(set(words_of(name)) & NUMBER_WORDS)
        return _any(column, rf"^\s*[+-]?{numerals.groups}" + (r"(?:\.|\s*$)" if named else r"\."))
    if not _any(column, ",") or not _any(column, rf"^\s*[+-]?{numerals.groups},|,\d{{1,2}}\s*$|,\d{{4}}"):
        return False  # All commas stand before three digits.
    if amount:
        return True
    # Pairs of ids have parts of any length, and no leading zeros.
    lengths = sum(_any(column, rf",\d{{{count}}}\s*$") for count in range(1, 20))
    return lengths == 1 or _any(column, r",0\d")


def _all(column: Any, pattern: str) -> bool:
    """Whether all values match, except texts that stand for a missing number."""
    import pyarrow.compute as pc

    missing = pc.is_in(pc.utf8_trim_whitespace(column), value_set=_texts(MISSING_TEXTS))
    missing = pc.or_(missing, pc.match_substring_regex(column, _KNOWN_MISSING))
    matching = pc.match_substring_regex(column, pattern)
    return bool(pc.all(pc.or_(missing, matching)).as_py()) and bool(pc.any(matching).as_py())


def _any(column: Any, pattern: str) -> bool:
    import pyarrow.compute as pc

    return bool(pc.any(pc.match_substring_regex(column, pattern)).as_py())


def _texts(texts: tuple[str, ...]) -> Any:
    import pyarrow as pa

    return pa.array(texts)
