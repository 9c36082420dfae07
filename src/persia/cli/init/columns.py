"""Guesses how each column of a sample enters a model: as a number, an id, ids of a text, a time, or not at all."""

from __future__ import annotations

from typing import Any

from persia.cli.init.guessed_columns import ColumnGuess, ColumnValues, is_list
from persia.cli.init.number_guess import guess_number
from persia.cli.init.text_guess import guess_list, guess_text
from persia.cli.init.time_guess import guess_time

__all__ = ["guess_column"]


def guess_column(column: str, values: ColumnValues, *, csv: bool) -> ColumnGuess:
    """Guesses the use of a column that is not the label.

    Args:
        column: its name.
        values: its values.
        csv: whether the file is delimited text, in which a field may hold several ids.
    """
    import pyarrow as pa

    kind = values.array.type
    if is_list(kind):
        return guess_list(column, values)
    if values.missing == values.rows:
        return ColumnGuess(column, "unused", "has no value")
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return guess_time(column, values)
    if values.numbers is not None and not _has_leading_zeros(values.array):
        return guess_number(column, values)
    if not pa.types.is_string(kind):
        return ColumnGuess(column, "unused", f"holds {kind}, which no reader converts")
    return guess_text(column, values, csv)


def _has_leading_zeros(array: Any) -> bool:
    """Whether texts such as 007 occur, which are codes."""
    import pyarrow as pa
    import pyarrow.compute as pc

    return pa.types.is_string(array.type) and bool(pc.any(pc.match_substring_regex(array, r"^\s*0\d+\s*$")).as_py())
