"""Finds out whether the numbers of a text file have a decimal comma, or separators of thousands."""

from __future__ import annotations

from typing import Any

from persia.cli.init.columns import MISSING_TEXTS, NUMBER_WORDS, words_of
from persia.data.numerals import Numerals

__all__ = ["guess_numerals", "normalized_columns"]

_WRITINGS = (Numerals(",", "."), Numerals(",", " "), Numerals(".", ","), Numerals(".", "'"))
_KNOWN_MISSING = "^\\s*(?:NA|N/A|n/a|#N/A|<NA>|NULL|Null|null|NaN|nan|NAN|None|none|\\\\N)?\\s*$"


def guess_numerals(columns: dict[str, Any]) -> Numerals:
    """Returns the writing of numbers in a text file.

    Args:
        columns: pyarrow array of texts by column.
    """
    best, most = Numerals(), 0
    for numerals in _WRITINGS:
        found = [name for name, column in columns.items() if _is_written(name, column, numerals)]
        if len(found) > most:
            grouped = any(_any(columns[name], rf"^\s*[+-]?{numerals.groups}") for name in found)
            best, most = numerals if grouped else Numerals(numerals.decimal), len(found)
    return best


def normalized_columns(columns: dict[str, Any], numerals: Numerals) -> dict[str, Any]:
    """Returns the columns with numbers as the reader takes them."""
    read = {}
    for name, column in columns.items():
        numbers = _all(column, numerals.pattern) and (not _any(column, ",") or _is_written(name, column, numerals))
        read[name] = numerals.normalized(column) if numbers else column
    return read


def _is_written(name: str, column: Any, numerals: Numerals) -> bool:
    """Whether a column has numbers that can be read in this writing only, and that are no lists of ids."""
    if not _all(column, numerals.pattern):
        return False
    if numerals.decimal == ".":
        # 229,453 may be a list of two ids.
        named = bool(set(words_of(name)) & NUMBER_WORDS)
        return _any(column, rf"^\s*[+-]?{numerals.groups}" + (r"(?:\.|\s*$)" if named else r"\."))
    if not _any(column, ",") or not _any(column, rf"^\s*[+-]?{numerals.groups},|,\d{{1,2}}\s*$|,\d{{4}}"):
        return False  # All commas stand before three digits.
    # Pairs of ids have parts of any length, and no leading zeros.
    lengths = sum(_any(column, rf",\d{{{count}}}\s*$") for count in range(1, 20))
    return lengths == 1 or _any(column, r",0\d")


def _all(column: Any, pattern: str) -> bool:
    """Whether all values match, but for those that stand for a missing number."""
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
