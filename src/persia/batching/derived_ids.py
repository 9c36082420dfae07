"""Derives ids from raw columns: buckets of numbers, parts of times, words of texts, parts of texts.

Each id depends on its own value alone, whatever the type of the column: the same value gives the same id from a file, a
frame and a request. tests/support/twins/derived.py has a slow, readable twin.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from persia.batching.frames import from_frame, is_arrow
from persia.batching.id_column import IdColumn
from persia.batching.id_columns import id_column
from persia.batching.ids import flattened, offsets_of_present, row_of
from persia.batching.native import features_core, native
from persia.batching.numbers import SharedNumbers, as_array, is_pair
from persia.batching.texts import TextBuffers, decimal_doubles, split_ids, text_numbers, text_times, text_words
from persia.batching.time_parts import LEAST_SECOND, MOST_SECOND, time_parts
from persia.batching.validation import check_offsets
from persia.errors import DataError
from persia.schema import Buckets, IdFeature, TimePart, Tokens
from persia.types import BoolArray, Ids, Int64Array

__all__ = ["SharedColumns", "bucket_numbers", "derived_ids", "filled", "raw_column", "split_count", "split_texts"]

_PER_SECOND = {"s": 1, "ms": 1000, "us": 1_000_000, "ns": 1_000_000_000}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SECOND = timedelta(seconds=1)
_EXACT = 1 << 53
"""Below it float64 represents every whole number."""


_Times: TypeAlias = tuple[Int64Array, BoolArray]


class Raw(NamedTuple):
    """The values of a column in one of three forms.

    Attributes:
        values: numbers or times `[n]`, texts, or a list of values of any kind, none of them missing.
        present: bool `[n]`: whether a value is there; None if all are.
        offsets: int64 `[batch + 1]`; None if each sample has one value.
    """

    values: NDArray[Any] | TextBuffers | list[Any]
    present: BoolArray | None
    offsets: Int64Array | None


class SharedColumns:
    """Conversions of the columns of one batch that several features read, by column.

    Attributes:
        numbers: numbers of arrow columns of texts, for non-ID-type features, too.
    """

    def __init__(self) -> None:
        self.numbers: SharedNumbers = {}
        self.raw: dict[str, Raw] = {}
        self.seconds: dict[tuple[str, int], _Times] = {}


def derived_ids(
    feature: IdFeature, column: Any, *, lists: bool = True, shared: SharedColumns | None = None
) -> tuple[Any, IdColumn]:
    """Returns the column after `split`, and the ids of a feature with `bucketize`, `time`, `tokens` or `split`.

    Args:
        feature: the feature; `fill` is not applied.
        column: column of any kind, see `Batch.from_columns`.
        lists: whether the caller needs the column after `split`; if not, the column may be returned unsplit.
        shared: conversions for other features of the same columns; None if there are none.

    Raises:
        DataError: a value is not a number, a time or a text; names column, row and remedy.
    """
    if feature.split is not None:
        column = from_frame(feature.name, column)
        split_ids = None if lists else _split_ids(feature, feature.split, column)
        if split_ids is not None:
            return column, split_ids
        column = split_texts(feature.name, column, feature.split)
        return column, id_column(feature.name, column, feature.kind)
    if isinstance(column, IdColumn):
        raise DataError(
            f"Column {feature.column!r} has ids, but feature {feature.name!r} derives its ids; give the raw values.",
            column=feature.column,
        )
    shared = shared or SharedColumns()
    raw = shared.raw.get(feature.column)
    if raw is None:
        raw = shared.raw[feature.column] = raw_column(feature.column, column)
    if feature.tokens is not None:
        return column, _words(feature, feature.tokens, raw)
    if feature.time is not None:
        key = feature.column, _PER_SECOND[feature.time.unit]
        times = shared.seconds.get(key)
        if times is None:
            times = shared.seconds[key] = _seconds(feature, feature.time, raw)
        seconds, present = times
        complete = bool(present.all())
        ids = time_parts(seconds if complete else seconds[present], feature.time.part, feature.time.zone)
    else:
        assert feature.bucketize is not None
        numbers, present = _shared_numbers(feature, raw, column, shared.numbers)
        complete = bool(present.all())
        ids = _buckets(feature, feature.bucketize, numbers, None if complete else present, raw.offsets)
    return column, IdColumn(ids, raw.offsets if complete else offsets_of_present(present, raw.offsets))


def _split_ids(feature: IdFeature, separator: str, column: Any) -> IdColumn | None:
    """Returns the ids of the parts of texts without making the parts; None unless it is an arrow column of texts."""
    if not is_arrow(column):
        return None
    from persia.batching.arrow_columns import arrow_texts

    texts = arrow_texts(column)
    if texts is None:
        return None
    ids, offsets, bad = split_ids(texts, separator, feature.kind)
    return IdColumn(ids, offsets) if bad < 0 else None  # The slow way names the part.


def filled(feature: IdFeature, column: IdColumn) -> IdColumn:
    """Returns a column in which each sample without ids has the id of `feature.fill`, with weight 1."""
    if column.offsets is None:
        return column
    lengths = np.diff(column.offsets)
    empty = lengths == 0
    if not empty.any():
        return column
    places = column.offsets[:-1][empty]
    kind = feature.kind if feature.reads_ids else "number"
    values = np.insert(column.values, places, id_column(feature.name, [feature.fill], kind).values)
    weights = None if column.weights is None else np.insert(column.weights, places, np.float32(1))
    if lengths.max() <= 1:
        return IdColumn(values, None, weights)
    offsets = np.zeros(len(column.offsets), np.int64)
    np.cumsum(np.maximum(lengths, 1), out=offsets[1:])
    return IdColumn(values, offsets, weights)


# --- raw columns ------------------------------------------------------------------------------------------------


def raw_column(name: str, column: Any) -> Raw:
    """Returns the values of a column of any kind."""
    column = from_frame(name, column)
    if is_arrow(column):
        from persia.batching.arrow_columns import arrow_values

        return Raw(*arrow_values(column))
    if is_pair(column):
        flat, bounds = raw_column(name, column[0]), as_array(name, column[1])
        if bounds.dtype.kind not in "iu":
            raise DataError(f"Offsets of column {name!r} are {bounds.dtype}; they must be whole numbers.", column=name)
        count = len(flat.values) if flat.offsets is None else len(flat.offsets) - 1
        check_offsets(name, bounds, count)
        bounds = bounds.astype(np.int64, copy=False)
        return flat._replace(offsets=bounds if flat.offsets is None else flat.offsets[bounds])
    if not isinstance(column, (list, tuple)):
        array = as_array(name, column)
        if array.dtype.kind not in "OUST":
            if array.ndim not in (1, 2):
                raise DataError(
                    f"Column {name!r} has shape {list(array.shape)}; give [batch] or [batch, k].", column=name
                )
            offsets = None if array.ndim == 1 else np.arange(len(array) + 1, dtype=np.int64) * array.shape[1]
            return Raw(array.reshape(-1), None, offsets)
        column = array.tolist()
    values, offsets = flattened(column)
    return Raw(values, None, offsets)


def _present(raw: Raw) -> BoolArray:
    return np.ones(len(raw.values), np.bool_) if raw.present is None else raw.present


def _error(feature: IdFeature, value: Any, position: int, offsets: Int64Array | None, takes: str) -> DataError:
    row = row_of(position, offsets)
    return DataError(
        f"Column {feature.column!r} has {value!r} at row {row}, but feature {feature.name!r} needs {takes}. Correct "
        "the value, or leave it empty.",
        column=feature.column,
        feature=feature.name,
        row=row,
        value=str(value),
    )


def _as_texts(values: Sequence[Any]) -> TextBuffers:
    return TextBuffers.of([x if isinstance(x, bytes) else str(x).encode("utf-8", "surrogatepass") for x in values])


# --- buckets ----------------------------------------------------------------------------------------------------

_NUMBERS = "finite decimal numbers such as 1, -0.5 and 1e3 (bucketize)"


def _shared_numbers(
    feature: IdFeature, raw: Raw, column: Any, shared: SharedNumbers
) -> tuple[NDArray[np.float64], BoolArray]:
    """Returns `bucket_numbers` of a column, which are converted once if it is an arrow column of texts."""
    converted = shared.get(feature.column)
    if converted is not None:
        return converted
    numbers, present = bucket_numbers(feature, raw)
    # Non-ID-type features read decimals and lists in other ways.
    if (
        isinstance(raw.values, TextBuffers)
        and raw.offsets is None
        and is_arrow(column)
        and "decimal" not in str(column.type)
    ):
        shared[feature.column] = numbers, present
    return numbers, present


def bucket_numbers(feature: IdFeature, raw: Raw) -> tuple[NDArray[np.float64], BoolArray]:
    """Returns numbers as float64 `[n]`, and which of them are present.

    A float32 is read as the decimal number that it is printed as, so that 0.1 is the same number in every type.
    """
    values, present = raw.values, _present(raw)
    if isinstance(values, list):
        for at, value in enumerate(values):
            if not isinstance(value, (str, bytes, int, float, Decimal, np.number, np.bool_)):
                raise _error(feature, value, at, raw.offsets, _NUMBERS)
        plain = all(type(value) is float or (type(value) in (int, bool) and abs(value) < _EXACT) for value in values)
        values = np.array(values, np.float64) if plain else _as_texts(values)
    if isinstance(values, TextBuffers):
        result = text_numbers(values)
        if result.bad >= 0:
            raise _error(feature, values.text(result.bad), result.bad, raw.offsets, _NUMBERS)
        return result.numbers, result.present
    match values.dtype.kind, values.dtype.itemsize:
        case "f", 4:
            numbers = decimal_doubles(values)
        case "f", 2:
            numbers = np.array([float(str(value)) for value in values], np.float64)
        case (("f" | "i" | "u" | "b"), _):
            numbers = values.astype(np.float64, copy=False)
        case _:
            at = int(present.argmax()) if len(present) else 0
            raise _error(feature, values[at] if len(values) else values.dtype, at, raw.offsets, _NUMBERS)
    if np.isfinite(numbers).all():
        return numbers, present
    present = present & ~np.isnan(numbers)
    infinite = np.isinf(numbers) & present
    if infinite.any():
        at = int(infinite.argmax())
        raise _error(feature, float(numbers[at]), at, raw.offsets, _NUMBERS)
    return numbers, present


def _buckets(
    feature: IdFeature,
    buckets: Buckets,
    numbers: NDArray[np.float64],
    present: BoolArray | None,
    offsets: Int64Array | None,
) -> Ids:
    """Returns the bucket of each number that is present; None if all are."""
    values = numbers if present is None else numbers[present]
    if buckets.width is None:
        edges = buckets.fitted if buckets.edges is None else buckets.edges
        assert edges is not None, "Schema.check_fitted"
        indices: Ids = np.empty(len(values), np.uint64)
        features_core.buckets(native(values, "d"), _edges(edges), indices)
        return indices
    floors = np.floor(values / buckets.width)
    large = ~(np.abs(floors) < _EXACT)
    if large.any():
        at = int(large.argmax()) if present is None else int(np.flatnonzero(present)[large.argmax()])
        takes = f"numbers below 2**53 times the width of its buckets, {buckets.width:g}"
        raise _error(feature, float(numbers[at]), at, offsets, takes)
    whole = floors.astype(np.int64)
    return np.where(whole < 0, -2 * whole - 1, 2 * whole).astype(np.uint64)


@functools.lru_cache(maxsize=256)
def _edges(edges: tuple[float, ...]) -> NDArray[np.float64]:
    return np.array(edges, np.float64)


# --- times ------------------------------------------------------------------------------------------------------


def _seconds(feature: IdFeature, part: TimePart, raw: Raw) -> _Times:
    """Returns whole seconds since 1970 in UTC, rounded down, int64 `[n]`, and which of them are present."""
    values, present = raw.values, _present(raw)
    takes = (
        f"times from year 1 to 9999: timestamps, dates, texts such as 2024-05-01, 2024-05-01T12:30:00+02:00 and "
        f"01.05.2024 12:30, or numbers since 1970 in its unit, {part.unit!r}"
    )
    per_second = _PER_SECOND[part.unit]
    if isinstance(values, list):
        seconds, present = _seconds_of_list(
            values, per_second, lambda value, at: _error(feature, value, at, raw.offsets, takes)
        )
    elif isinstance(values, TextBuffers):
        result = text_times(values, per_second)
        if result.bad >= 0:
            raise _error(feature, values.text(result.bad), result.bad, raw.offsets, takes)
        seconds, present = result.seconds, result.present
    elif values.dtype.kind == "M":
        present = present & ~np.isnat(values)
        seconds = np.ascontiguousarray(values.astype("datetime64[s]")).view(np.int64)
    elif values.dtype.kind in "iuf":
        if values.dtype.kind == "f":
            present = present & ~np.isnan(values)
        bad = present & ~_is_exact(values)
        if bad.any():
            at = int(bad.argmax())
            raise _error(
                feature, values[at].item(), at, raw.offsets, f"{takes}, as whole numbers or float64 below 2**53"
            )
        whole = np.floor(np.where(present, values, 0)) if values.dtype.kind == "f" else values
        seconds = whole.astype(np.int64) if per_second == 1 else whole.astype(np.int64) // per_second
    else:
        at = int(present.argmax()) if len(present) else 0
        raise _error(feature, values[at] if len(values) else values.dtype, at, raw.offsets, takes)
    outside = present & ((seconds < LEAST_SECOND) | (seconds > MOST_SECOND))
    if outside.any():
        at = int(outside.argmax())
        value = values.text(at) if isinstance(values, TextBuffers) else values[at]
        raise _error(feature, value.item() if isinstance(value, np.number) else value, at, raw.offsets, takes)
    return seconds, present


def _is_exact(values: NDArray[Any]) -> BoolArray:
    """Returns whether numbers are finite and tell neighbouring whole numbers apart, and fit int64."""
    if values.dtype.kind == "f":
        exact: BoolArray = np.abs(values) < 2 ** (int(np.finfo(values.dtype).nmant) + 1)
        return exact
    return values < 2**63 if values.dtype == np.uint64 else np.ones(len(values), np.bool_)


def _seconds_of_list(
    values: Sequence[Any], per_second: int, error: Callable[..., DataError]
) -> tuple[Int64Array, BoolArray]:
    """Returns seconds of values of any kinds, and which are present."""
    seconds, present = np.zeros(len(values), np.int64), np.ones(len(values), np.bool_)
    texts: list[int] = []
    for at, value in enumerate(values):
        if isinstance(value, (str, bytes, Decimal)):
            texts.append(at)
        elif isinstance(value, datetime):
            aware = value if value.tzinfo is not None else value.replace(tzinfo=UTC)
            seconds[at] = (aware - _EPOCH) // _SECOND
        elif isinstance(value, date):
            seconds[at] = (datetime.combine(value, time(), UTC) - _EPOCH) // _SECOND
        elif isinstance(value, np.datetime64):
            seconds[at] = value.astype("datetime64[s]").astype(np.int64)
        elif isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool):
            exact = int(np.finfo(type(value)).nmant) + 1 if isinstance(value, (float, np.floating)) else 63
            if not abs(value) < 2**exact:
                raise error(value, at)
            seconds[at] = math.floor(value) // per_second
        else:
            raise error(value, at)
    if texts:
        result = text_times(_as_texts([values[at] for at in texts]), per_second)
        if result.bad >= 0:
            raise error(values[texts[result.bad]], texts[result.bad])
        seconds[texts], present[texts] = result.seconds, result.present
    return seconds, present


# --- texts ------------------------------------------------------------------------------------------------------


def _words(feature: IdFeature, tokens: Tokens, raw: Raw) -> IdColumn:
    values, offsets, present = raw.values, raw.offsets, raw.present
    takes = "texts (tokens)"
    if isinstance(values, list):
        for at, value in enumerate(values):
            if not isinstance(value, (str, bytes, int, np.integer)) or isinstance(value, bool):
                raise _error(feature, value, at, offsets, takes)
        values = _as_texts(values)
    elif not isinstance(values, TextBuffers):
        if present is not None:
            values, offsets = values[present], offsets_of_present(present, offsets)
        if values.dtype.kind == "f" and np.isnan(values).all():  # A column without any value has no type.
            values, offsets = values[:0], offsets_of_present(np.zeros(len(values), np.bool_), offsets)
        elif values.dtype.kind not in "iu":
            raise _error(feature, values[0] if len(values) else values.dtype, 0, offsets, takes)
        values = TextBuffers.of_fixed(values.astype("S32"))
    ids, bounds = text_words(values, tokens.ngrams, lower=tokens.lower)
    return IdColumn(ids, bounds if offsets is None else bounds[offsets])


def split_texts(name: str, column: Any, separator: str) -> Any:
    """Splits the texts of a column into lists of their parts; values of other kinds are unchanged."""
    column = from_frame(name, column)
    if is_arrow(column):
        from persia.batching.arrow_columns import arrow_lists

        return arrow_lists(column, separator)
    if isinstance(column, IdColumn) or is_pair(column):
        return column
    if not isinstance(column, (list, tuple)):
        column = as_array(name, column)
        if column.dtype.kind not in "OUST":
            return column
        column = column.tolist()
    return [_parts(value, separator) for value in column]


def split_count(column: Any, separator: str) -> int:
    """Counts the parts of the texts of a column, without splitting them; 0 for a column of other values."""
    if is_arrow(column):
        from persia.batching.arrow_columns import arrow_parts

        return arrow_parts(column, separator)
    if not isinstance(column, list):
        return 0
    return sum(value.count(separator) + 1 for value in column if isinstance(value, str))


def _parts(value: Any, separator: str) -> Any:
    if isinstance(value, bytes):
        return value.split(separator.encode())
    return value.split(separator) if isinstance(value, str) else value
