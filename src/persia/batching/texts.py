"""Converts texts to ids and numbers, each by its own value alone; every loop runs natively, without the GIL."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from persia.batching.native import as_data_error, core, native
from persia.errors import DataError
from persia.schema import IdKind
from persia.types import BoolArray, Ids, Int32Array, Int64Array

__all__ = [
    "MISSING",
    "TextBuffers",
    "TextIds",
    "TextNumbers",
    "TextTimes",
    "decimal_doubles",
    "numbers_of_texts",
    "split_ids",
    "text_ids",
    "text_numbers",
    "text_times",
    "text_words",
]

_AMOUNT = re.compile(r"\s*[+-]?\s*(?:([^\d\s.,'+-]{1,4})\s*[+-]?\d[\d.,'\s]*|\d[\d.,'\s]*?\s*([^\d\s.,'+-]{1,4}))\s*")
MISSING = (
    "NA", "N/A", "n/a", "#N/A", "<NA>", "NULL", "Null", "null", "NaN", "nan", "NAN", "None", "none", "\\N",
)  # fmt: skip
"""Texts that mean a missing number."""
_KINDS: dict[IdKind, int] = {"auto": 0, "number": 1, "text": 2}


@dataclass(frozen=True, slots=True)
class TextBuffers:
    """Texts in the layout of Arrow.

    Attributes:
        data: uint8, the bytes of all texts.
        offsets: int32 or int64 `[n + 1]`: text i is `data[offsets[i]:offsets[i + 1]]`. A slice of a longer array need
            not start at 0.
        validity: uint8 bitmap, least significant bit first; a text without its bit is null. None: all are valid.
        validity_start: bit of the first text.
    """

    data: NDArray[np.uint8]
    offsets: Int32Array | Int64Array
    validity: NDArray[np.uint8] | None = None
    validity_start: int = 0

    @classmethod
    def of(cls, texts: Sequence[bytes]) -> TextBuffers:
        """The buffers of a list of texts; copies."""
        offsets = np.zeros(len(texts) + 1, np.int64)
        np.cumsum([len(text) for text in texts], out=offsets[1:])
        return cls(np.frombuffer(b"".join(texts), np.uint8), offsets)

    @classmethod
    def of_fixed(cls, texts: NDArray[np.bytes_]) -> TextBuffers:
        """The buffers of an array of type "S" `[n]`; copies."""
        letters = np.ascontiguousarray(texts).view(np.uint8).reshape(len(texts), texts.dtype.itemsize)
        offsets = np.zeros(len(texts) + 1, np.int64)
        np.cumsum(np.char.str_len(texts), out=offsets[1:])
        inside = np.arange(letters.shape[1]) < np.diff(offsets)[:, None]
        return cls(letters[inside], offsets)

    def __len__(self) -> int:
        return max(len(self.offsets) - 1, 0)

    def text(self, position: int) -> str:
        """Text `position`, for messages."""
        return bytes(self.data[self.offsets[position] : self.offsets[position + 1]]).decode(errors="backslashreplace")


class TextIds(NamedTuple):
    """Ids of texts.

    Attributes:
        ids: uint64 `[n]`; 0 for a missing id.
        present: bool `[n]`: whether the text is neither null nor empty.
        bad: position of the first text that is not an id, or -1; `ids` and `present` are only set up to it.
    """

    ids: Ids
    present: BoolArray
    bad: int


class TextNumbers(NamedTuple):
    """Numbers in texts.

    Attributes:
        numbers: float64 `[n]`; NaN for a missing number.
        present: bool `[n]`: whether there is a number; False for a null, an empty text or a marker of a missing value.
        bad: position of the first text that is neither a number nor missing, or -1; the arrays are set up to it.
    """

    numbers: NDArray[np.float64]
    present: BoolArray
    bad: int


class TextTimes(NamedTuple):
    """Times in texts.

    Attributes:
        seconds: int64 `[n]` since 1970 in UTC, rounded down; 0 for a missing time.
        present: bool `[n]`: whether there is a time; False for a null, an empty text or a marker of a missing value.
        bad: position of the first text that is neither a time nor missing, or -1; the arrays are set up to it.
    """

    seconds: Int64Array
    present: BoolArray
    bad: int


def _checked(texts: TextBuffers) -> int:
    """Checks the buffers; returns the number of texts."""
    for name, array, sizes in (("data", texts.data, (1,)), ("offsets", texts.offsets, (4, 8))):
        kind = "u" if name == "data" else "i"
        if not isinstance(array, np.ndarray) or array.dtype.kind != kind or array.dtype.itemsize not in sizes:
            raise DataError(f"{name}: unsupported dtype {getattr(array, 'dtype', type(array))}; see TextBuffers.")
    if not len(texts.offsets):
        raise DataError("offsets: got none; there must be one more than texts.")
    if texts.validity_start < 0:
        raise DataError(f"validity_start = {texts.validity_start}; it must not be negative.")
    return len(texts)


def _arguments(texts: TextBuffers) -> tuple[Any, ...]:
    return texts.data, texts.offsets, texts.validity, texts.validity_start


def text_ids(texts: TextBuffers, kind: IdKind = "auto") -> TextIds:
    """The ids of texts.

    With "auto", a canonical whole number below 2^64 is the id: "0", or digits without leading zeros, optionally
    followed by a point and zeros; surrounding spaces are ignored. "true" and "false" (also True, TRUE, ...) are 1 and
    0. The id of any other text is its XXH64; a negative or larger whole number is hashed without the zeros after the
    point. "number" takes only canonical whole numbers and booleans; markers of missing values (see `text_numbers`)
    have no id. "text" hashes every text. An empty or null text has no id.

    Args:
        texts: `[n]`.
        kind: see `IdFeature`.

    Raises:
        DataError: dtypes, offsets or the bitmap are invalid.

    Blocks until done, without the GIL. Thread-safe.
    """
    count = _checked(texts)
    ids, present = np.empty(count, np.uint64), np.empty(count, np.uint8)
    with as_data_error:
        bad = core.text_ids(*_arguments(texts), _KINDS[kind], ids, present)
    return TextIds(ids, present.view(np.bool_), bad)


def split_ids(texts: TextBuffers, separator: str, kind: IdKind = "auto") -> tuple[Ids, Int64Array, int]:
    """The ids of the parts of texts; see `text_ids`. An empty part has no id, neither has a null.

    Args:
        texts: `[n]`.
        separator: what separates the parts, which is not empty.
        kind: see `IdFeature`.

    Returns:
        ids, uint64 `[m]`; offsets, int64 `[n + 1]`; and the position of the first text with a part that is not an id,
        or -1; the arrays are only set up to it.

    Raises:
        DataError: dtypes, offsets or the bitmap are invalid.

    Blocks until done, without the GIL. Thread-safe.
    """
    count = _checked(texts)
    with as_data_error:
        ids, offsets, bad = core.split_ids(*_arguments(texts), count, _KINDS[kind], separator)
    return ids, offsets, bad


def text_numbers(texts: TextBuffers) -> TextNumbers:
    r"""The numbers in texts: decimal, with an optional exponent; "true" and "false" (also True, TRUE, ...) are 1 and 0.

    Missing: a null, an empty text, and NA, N/A, n/a, #N/A, <NA>, NULL, Null, null, NaN, nan, NAN, None, none, \N.

    Args:
        texts: `[n]`.

    Raises:
        DataError: dtypes, offsets or the bitmap are invalid.

    Blocks until done, without the GIL. Thread-safe.
    """
    count = _checked(texts)
    numbers, present = np.empty(count, np.float64), np.empty(count, np.uint8)
    with as_data_error:
        bad = core.text_numbers(*_arguments(texts), numbers, present)
    return TextNumbers(numbers, present.view(np.bool_), bad)


def text_times(texts: TextBuffers, per_second: int = 1) -> TextTimes:
    """The times in texts.

    A text is an ISO date, perhaps with a time and an offset from UTC (2024-05-01, 2024-05-01T12:30:00.5+02:00), a date
    with the day first and points, perhaps with a time (1.5.2024 12:30), or a decimal number of units since 1970.
    Without an offset a time is in UTC. Missing: as in `text_numbers`.

    Args:
        texts: `[n]`.
        per_second: number of units in a second.

    Raises:
        DataError: dtypes, offsets or the bitmap are invalid.

    Blocks until done, without the GIL. Thread-safe.
    """
    count = _checked(texts)
    seconds, present = np.empty(count, np.int64), np.empty(count, np.uint8)
    with as_data_error:
        bad = core.text_times(*_arguments(texts), per_second, seconds, present)
    return TextTimes(seconds, present.view(np.bool_), bad)


def text_words(texts: TextBuffers, lengths: Sequence[int], *, lower: bool) -> tuple[Ids, Int64Array]:
    """The ids of the words of texts, and of sequences of words; see `Tokens`.

    Args:
        texts: `[n]` in UTF-8. Bytes that are not UTF-8 are outside words.
        lengths: numbers of words of the sequences.
        lower: whether to convert texts to lower case first, as `str.lower` does.

    Returns:
        ids, uint64 `[m]`, by first word, then in the order of `lengths`; and offsets, int64 `[n + 1]`.

    Raises:
        DataError: dtypes, offsets or the bitmap are invalid.

    Blocks until done. Holds the GIL only to convert texts that are not ASCII to lower case. Thread-safe.
    """
    count = _checked(texts)
    with as_data_error:
        lowered = b""
        if lower:
            others: bytes = core.non_ascii_texts(*_arguments(texts), count)
            lowered = others.decode(errors="replace").lower().encode()
        ids, offsets = core.text_words(*_arguments(texts), count, bytes(lengths), lower, lowered)
    return ids, offsets


def decimal_doubles(floats: NDArray[np.float32]) -> NDArray[np.float64]:
    """Converts float32 `[n]` to the float64 nearest to their shortest decimal texts: 0.1 stays 0.1."""
    doubles = np.empty(len(floats), np.float64)
    core.decimal_doubles(native(floats, "f"), doubles)
    return doubles


def numbers_of_texts(name: str, texts: TextBuffers) -> tuple[NDArray[np.float64], BoolArray]:
    """The numbers in texts, and a mask of the missing ones.

    Raises:
        DataError: a text is not a number; names the row and the accepted forms.
    """
    result = text_numbers(texts)
    if result.bad >= 0:
        value = texts.text(result.bad)
        hint = " (a decimal comma?)" if value.replace(",", ".", 1).replace(".", "", 1).strip("-").isdecimal() else ""
        if unit := _AMOUNT.fullmatch(value):
            hint = f" (an amount in {unit[1] or unit[2]}? The reader's option units takes it)"
        raise DataError(
            f"Column {name!r} has {value!r} at row {result.bad}{hint}; it takes decimal numbers such as 1, -0.5 and "
            "1e3, true and false. Correct the value, leave the row out, or declare the column as an ID-type feature.",
            column=name,
            row=result.bad,
            value=value,
        )
    return result.numbers, ~result.present
