"""Guesses whether texts are ids, lists of ids, times, or words."""

from __future__ import annotations

from typing import Any

from persia.cli.init.column_names import TEXT_WORDS, words_of
from persia.cli.init.guessed_columns import ColumnGuess, ColumnValues
from persia.cli.init.number_guess import FEW
from persia.cli.init.time_guess import guess_time
from persia.data.column_values import times_of_text
from persia.errors import DataError

__all__ = ["MAX_LIST", "guess_list", "guess_text"]

MAX_LIST = 100
_SLASHED = r"^\s*(?:\d{1,2}/\d{1,2}/\d{2,4}|\d{4}/\d{1,2}/\d{1,2})\b"
_PAIR_ROWS, _PAIR_WORDS = 5_000, 12
"""Pairs of words are ids, too, in at least this number of rows, of at most this number of words on average."""


def guess_text(column: str, values: ColumnValues, csv: bool) -> ColumnGuess:
    """Guesses the use of a column of texts.

    Args:
        column: its name.
        values: its values.
        csv: whether the file is delimited text.
    """
    import pyarrow.compute as pc

    texts = values.array.drop_null()
    missing = values.missing / values.rows
    if values.distinct == 1:
        return ColumnGuess(column, "unused", f"is {texts[0].as_py()!r} in every row")
    if _are_times(texts):
        return guess_time(column, values)
    if pc.all(pc.match_substring_regex(texts, _SLASHED)).as_py():
        return ColumnGuess(column, "unused", "dates with slashes, whose order varies; write 2024-05-31")
    if pc.all(pc.match_substring_regex(texts, r"^\s*[\[{].*[\]}]\s*$")).as_py():
        remedy = "write its values as 1|2|3, or Parquet" if csv else "write a list column"
        return ColumnGuess(column, "unused", f"holds lists or records in brackets; {remedy}")
    separator = _separator(texts, values.distinct)
    if separator:
        longest = pc.max(pc.list_value_length(pc.split_pattern(texts, separator))).as_py()
        reason = f"several values in a field, separated by {separator!r}"
        return ColumnGuess(
            column, "list", reason, text=True, separator=separator, missing=missing,
            max_length=MAX_LIST if longest > MAX_LIST else None,
        )  # fmt: skip
    if _are_written(column, texts, values.distinct):
        return _words(column, texts, missing)
    if values.distinct == len(texts) and values.rows > 2 * FEW:
        return ColumnGuess(column, "unused", "differs in every row")
    reason = f"{values.distinct:,} different texts"
    return ColumnGuess(column, "id", reason, text=True, distinct=values.distinct, missing=missing)


def guess_list(column: str, values: ColumnValues) -> ColumnGuess:
    """Guesses the use of a column of lists."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = values.array.type.value_type
    if not (pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        return ColumnGuess(column, "unused", f"holds lists of {kind}; ids are whole numbers or texts")
    longest = pc.max(pc.list_value_length(values.array)).as_py() or 0
    if not longest:
        return ColumnGuess(column, "unused", "has only empty lists")
    text = not pa.types.is_integer(kind)
    return ColumnGuess(
        column,
        "list",
        f"lists of up to {longest:,} {'texts' if text else 'ids'}",
        text=text,
        max_length=MAX_LIST if longest > MAX_LIST else None,
    )


def _are_times(texts: Any) -> bool:
    import pyarrow as pa

    try:
        return bool(pa.types.is_timestamp(times_of_text("", texts).type))
    except DataError:
        return False


def _separator(texts: Any, distinct: int) -> str:
    """Returns the text between several values in a field; empty if fields hold one value, or are written texts."""
    import pyarrow.compute as pc

    for separator in ("|", ";", ",", " "):
        share = pc.mean(pc.match_substring(texts, separator)).as_py()
        if share < 0.05:
            continue
        bare = separator
        if bare != " " and not pc.any(pc.match_substring_regex(texts, rf"[{bare}](?:[^ ]|  |$)")).as_py():
            separator += " "  # In `a; b` the space belongs to no value.
        parts = pc.list_flatten(pc.split_pattern(texts, separator))
        if bare == " " and _are_written("", texts, distinct):
            return " " if pc.mean(pc.utf8_is_digit(parts)).as_py() > 0.9 else ""
        short = pc.mean(pc.utf8_length(parts)).as_py() <= 40 and pc.mean(pc.count_substring(parts, " ")).as_py() < 2
        if bare in "|;" and short:
            return separator
        if pc.count_distinct(parts).as_py() < 0.5 * distinct and not _has_spaces(parts):
            return separator
    return ""


def _are_written(column: str, texts: Any, distinct: int) -> bool:
    """Whether most texts differ and have several words, or are named like texts and have more than one."""
    import pyarrow.compute as pc

    words = pc.mean(_word_counts(texts)).as_py()
    named = bool(set(words_of(column)) & TEXT_WORDS) and distinct > FEW
    return bool(distinct > 0.5 * len(texts) and words >= 3) or bool(named and words >= 1.5)


def _words(column: str, texts: Any, missing: float) -> ColumnGuess:
    """Returns the guess about texts whose words are ids."""
    import pyarrow.compute as pc

    counts = _word_counts(texts)
    mean, longest = pc.mean(counts).as_py(), pc.max(counts).as_py()
    pairs = len(texts) >= _PAIR_ROWS and mean <= _PAIR_WORDS
    reason = f"texts of about {mean:.0f} words" + (", and pairs of words" if pairs else "")
    most = longest * (2 if pairs else 1)
    return ColumnGuess(
        column, "text", reason, ngrams=(1, 2) if pairs else (1,), missing=missing,
        max_length=MAX_LIST if most > MAX_LIST else None,
    )  # fmt: skip


def _word_counts(texts: Any) -> Any:
    import pyarrow.compute as pc

    return pc.add(pc.count_substring_regex(pc.utf8_trim_whitespace(texts), r"\S\s"), 1)


def _has_spaces(texts: Any) -> bool:
    import pyarrow.compute as pc

    return bool(pc.any(pc.match_substring(texts, " ")).as_py())
