"""Guesses how each column of a sample enters a model: as a number, an id, a list of ids, a time, or not at all."""

from __future__ import annotations

import re
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from persia.batching.numbers import number_column
from persia.data.column_values import times_of_text
from persia.errors import DataError

__all__ = ["MISSING_TEXTS", "NUMBER_WORDS", "ColumnGuess", "ColumnValues", "guess_column", "plain_values", "words_of"]

Role = Literal["number", "id", "list", "time", "unused"]

MISSING_TEXTS = (
    "?", "-", "--", ".", "missing", "Missing", "unknown", "Unknown", "n.a.", "N.A.", "k.A.", "k. A.", "#NV", "#N/V",
)  # fmt: skip
"""Texts that stand for a missing number in many files, in addition to the texts that every reader recognizes."""

MAX_LIST = 100
_ID_WORDS = {
    "id", "ids", "uid", "pid", "gid", "uuid", "guid", "sku", "isbn", "asin", "code", "zip", "zipcode", "postcode",
    "key", "hash", "user", "item", "product", "article", "movie", "song", "ad", "campaign", "site", "app", "device",
    "category", "cat", "brand", "city", "country", "region", "state", "store", "shop", "group", "class", "pclass",
    "type", "os",
}  # fmt: skip
_ID_LAST_WORDS = {
    "account", "client", "customer", "guest", "hotel", "member", "merchant", "no", "nr", "number", "seller", "session",
    "supplier", "vendor", "visitor",
}  # fmt: skip
"""Words that name ids at the end of a name: `customer` and `customer number`, but not `customer visits`."""
NUMBER_WORDS = {
    "age", "amount", "avg", "average", "balance", "budget", "charges", "count", "cost", "days", "distance", "duration",
    "fare", "gain", "height", "hours", "income", "length", "loss", "mean", "minutes", "months", "num", "number",
    "percent", "pct", "price", "qty", "quantity", "rate", "ratio", "salary", "score", "size", "sum", "tenure", "total",
    "usage", "value", "views", "weight", "width", "years",
}  # fmt: skip
"""Words in the names of quantities."""
_TIME_WORDS = {"time", "timestamp", "datetime", "date", "ts", "day", "created", "updated", "at", "ms"}
_FEW = 20
"""Whole numbers with at most this many different values are treated as codes."""

_SLASHED = r"^\s*(?:\d{1,2}/\d{1,2}/\d{2,4}|\d{4}/\d{1,2}/\d{1,2})\b"

_UNIX = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
_FROM, _TO = 788_918_400, 2_208_988_800  # 1995 and 2040, in seconds since 1970.
_LONGEST_LOG = 20 * 365 * 86_400


class ColumnValues(NamedTuple):
    """The values of a column, converted to one of a few types.

    Attributes:
        array: pyarrow array `[rows]` of texts, numbers, booleans, times or lists.
        numbers: float64 `[rows]`, NaN where missing; None unless all values are numbers.
        nulls: texts of the column that stand for a missing number.
        rows: number of rows.
        missing: number of missing values.
        distinct: number of different values that are not missing.
    """

    array: Any
    numbers: NDArray[np.float64] | None
    nulls: tuple[str, ...]
    rows: int
    missing: int
    distinct: int


class ColumnGuess(NamedTuple):
    """The guessed use of a column.

    Attributes:
        column: name in the file.
        role: the use.
        reason: the reason of the guess.
        sure: whether the user need not be asked.
        text: whether values are hashed as texts, even if they consist of digits.
        separator: text between the ids of a list within a field.
        max_length: number of ids of a list that count; None for all.
        scale: of a number x, centre and width of sign(x) log(1 + |x|).
        fill: replacement of a missing number.
        missing: whether numbers are missing.
        nulls: texts that stand for a missing number.
        table: column whose embeddings are shared.
        distinct: number of different values.
    """

    column: str
    role: Role
    reason: str
    sure: bool = True
    text: bool = False
    separator: str = ""
    max_length: int | None = None
    scale: tuple[float, float] = (0.0, 1.0)
    fill: float = 0.0
    missing: bool = False
    nulls: tuple[str, ...] = ()
    table: str = ""
    distinct: int = 0


def words_of(name: str) -> list[str]:
    """Splits the name of a column into lower-case words; the same for `userId`, `user_id` and `User ID`."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name)
    return [word.lower() for word in re.split(r"[^A-Za-z0-9]+", spaced) if word]


def plain_values(array: Any) -> ColumnValues:
    """Converts a column; counts missing and different values."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_large_string(array.type) or str(array.type) == "string_view":
        array = array.cast(pa.string())
    rows = len(array)
    if pa.types.is_nested(array.type) or _is_list(array.type):
        return ColumnValues(array, None, (), rows, array.null_count, 0)
    numbers, nulls = _numbers(array)
    if numbers is not None:
        missing = int(np.isnan(numbers).sum())
    else:
        missing = array.null_count
    distinct = pc.count_distinct(array.filter(pa.array(~np.isnan(numbers))) if numbers is not None else array).as_py()
    return ColumnValues(array, numbers, nulls, rows, missing, distinct)


def guess_column(column: str, values: ColumnValues, *, csv: bool) -> ColumnGuess:
    """Guesses the use of a column that is not the label.

    Args:
        column: its name.
        values: its values.
        csv: whether the file is delimited text, in which a field may hold several ids.
    """
    import pyarrow as pa

    kind = values.array.type
    if _is_list(kind):
        return _guess_list(column, values)
    if values.missing == values.rows:
        return ColumnGuess(column, "unused", "has no value")
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return ColumnGuess(column, "time", "dates or times")
    if values.numbers is not None and not _has_leading_zeros(values.array):
        return _guess_number(column, values)
    if not pa.types.is_string(kind):
        return ColumnGuess(column, "unused", f"holds {kind}, which no reader converts")
    return _guess_text(column, values, csv)


def _is_list(kind: Any) -> bool:
    import pyarrow as pa

    return any(test(kind) for test in (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list))


def _has_leading_zeros(array: Any) -> bool:
    """Whether texts such as 007 occur, which are codes."""
    import pyarrow as pa
    import pyarrow.compute as pc

    return pa.types.is_string(array.type) and bool(pc.any(pc.match_substring_regex(array, r"^\s*0\d+\s*$")).as_py())


def _numbers(array: Any) -> tuple[NDArray[np.float64] | None, tuple[str, ...]]:
    """Returns a column as numbers, and its texts that stand for missing ones; None if it has other values."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = array.type
    if pa.types.is_null(kind):
        return np.full(len(array), np.nan), ()
    if pa.types.is_decimal(kind):
        array = array.cast(pa.float64())
    elif not any(
        is_type(kind)
        for is_type in (pa.types.is_string, pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)
    ):
        return None, ()
    nulls: list[str] = []
    while True:
        try:
            numbers = number_column("", array, fill=float("nan")).astype(np.float64)
        except DataError as error:
            text = error.fields.get("value")
            if not isinstance(text, str) or text.strip() not in MISSING_TEXTS or text in nulls:
                return None, ()
            nulls.append(text)
            array = pc.if_else(pc.equal(array, text), None, array)
            continue
        return (None, ()) if nulls and np.isnan(numbers).all() else (numbers, tuple(nulls))


def _guess_number(column: str, values: ColumnValues) -> ColumnGuess:
    assert values.numbers is not None
    numbers = values.numbers[~np.isnan(values.numbers)]
    words = words_of(column)
    whole = bool(np.all(numbers == np.floor(numbers)) and np.all(np.isfinite(numbers)))
    if not np.all(np.isfinite(numbers)):
        return ColumnGuess(column, "unused", "has infinite values")
    if values.distinct == 1:
        return ColumnGuess(column, "unused", f"is {numbers[0]:g} in every row")
    if whole and _looks_like_time(words, numbers, values.distinct):
        return ColumnGuess(column, "time", "times since 1970")
    if whole and values.distinct == values.rows and values.rows > 2 * _FEW:
        steps = np.diff(numbers)
        if "id" in words or np.all(steps > 0) or np.all(steps < 0):
            return ColumnGuess(column, "unused", "differs in every row")
    role: Role = "number"
    sure = True
    reason = "numbers"
    if whole:
        span = numbers.max() - numbers.min() + 1
        if _names_an_id(words):
            role, reason = "id", "whole numbers with the name of an id"
        elif set(words) & NUMBER_WORDS:
            reason = "whole numbers with the name of a quantity"
        elif values.distinct <= _FEW:
            role, reason = "id", f"only {values.distinct} different whole numbers"
        elif numbers.min() >= 0 and values.distinct >= 0.5 * span:
            role, reason, sure = "id", "whole numbers that fill their range, as codes do", False
        else:
            reason, sure = "whole numbers", not words or "column" in words or values.distinct < values.rows // 100
    if role == "id":
        return ColumnGuess(column, role, reason, sure, distinct=values.distinct)
    logs = np.sign(numbers) * np.log1p(np.abs(numbers))
    scale = (float(logs.mean()), float(logs.std()) or 1.0)
    return ColumnGuess(
        column,
        role,
        reason,
        sure,
        scale=scale,
        fill=float(np.median(numbers)),
        missing=values.missing > 0,
        nulls=values.nulls,
        distinct=values.distinct,
    )


def _names_an_id(words: list[str]) -> bool:
    """Whether whole numbers of a column of this name identify something."""
    if not words:
        return False
    if words[-1] in _ID_LAST_WORDS:
        return words not in (["no"], ["nr"], ["number"]) and not set(words[:-1]) & NUMBER_WORDS
    return (words[-1] in _ID_WORDS or words[0] in _ID_WORDS) and not set(words) & NUMBER_WORDS


def _looks_like_time(words: list[str], numbers: NDArray[np.float64], distinct: int) -> bool:
    named = bool(set(words) & _TIME_WORDS)
    if distinct <= _FEW and not named:
        return False
    low, high = float(numbers.min()), float(numbers.max())
    for unit in _UNIX.values():
        if low >= _FROM * unit and high <= _TO * unit:
            return named or ("column" in words and high - low <= _LONGEST_LOG * unit)
    return False


def _guess_text(column: str, values: ColumnValues, csv: bool) -> ColumnGuess:
    import pyarrow.compute as pc

    texts = values.array.drop_null()
    if values.distinct == 1:
        return ColumnGuess(column, "unused", f"is {texts[0].as_py()!r} in every row")
    if _are_times(texts):
        return ColumnGuess(column, "time", "dates or times")
    if pc.all(pc.match_substring_regex(texts, _SLASHED)).as_py():
        return ColumnGuess(column, "unused", "dates with slashes, whose order varies; write 2024-05-31")
    if pc.all(pc.match_substring_regex(texts, r"^\s*[\[{].*[\]}]\s*$")).as_py():
        remedy = "write its values as 1|2|3, or Parquet" if csv else "write a list column"
        return ColumnGuess(column, "unused", f"holds lists or records in brackets; {remedy}")
    if csv:
        separator = _separator(texts, values.distinct)
        if separator:
            longest = pc.max(pc.list_value_length(pc.split_pattern(texts, separator))).as_py()
            reason = f"several values in a field, separated by {separator!r}"
            if separator == " ":
                reason = "texts of several words"
            return ColumnGuess(
                column, "list", reason, text=True, separator=separator,
                max_length=MAX_LIST if longest > MAX_LIST else None,
            )  # fmt: skip
    if values.distinct == len(texts) and values.rows > 2 * _FEW:
        return ColumnGuess(column, "unused", "differs in every row")
    return ColumnGuess(column, "id", f"{values.distinct:,} different texts", text=True, distinct=values.distinct)


def _are_times(texts: Any) -> bool:
    import pyarrow as pa

    try:
        return bool(pa.types.is_timestamp(times_of_text("", texts).type))
    except DataError:
        return False


def _separator(texts: Any, distinct: int) -> str:
    """Returns the text between several values in a field; empty if fields hold one value."""
    import pyarrow.compute as pc

    for separator in ("|", ";", ",", " "):
        share = pc.mean(pc.match_substring(texts, separator)).as_py()
        if share < 0.05:
            continue
        bare = separator
        if bare != " " and not pc.any(pc.match_substring_regex(texts, rf"[{bare}](?:[^ ]|  |$)")).as_py():
            separator += " "  # In `a; b` the space belongs to no value.
        parts = pc.list_flatten(pc.split_pattern(texts, separator))
        words = len(parts) / len(texts)
        if bare in "|;" and pc.mean(pc.utf8_length(parts)).as_py() <= 40:
            return separator
        if bare == " " and distinct > 0.5 * len(texts) and words >= 3:
            return separator
        if pc.count_distinct(parts).as_py() < 0.5 * distinct and not _has_spaces(parts):
            return separator
    return ""


def _has_spaces(texts: Any) -> bool:
    import pyarrow.compute as pc

    return bool(pc.any(pc.match_substring(texts, " ")).as_py())


def _guess_list(column: str, values: ColumnValues) -> ColumnGuess:
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
