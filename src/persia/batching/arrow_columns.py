"""Converts pyarrow columns to ids and numbers. The only file of this package that imports pyarrow with itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from persia.batching.id_column import IdColumn
from persia.batching.ids import ids_of_numbers, ids_of_texts, offsets_of_present
from persia.batching.texts import TextBuffers, numbers_of_texts, text_ids
from persia.batching.times import seconds_of_timestamps
from persia.errors import DataError
from persia.schema import IdKind
from persia.types import BoolArray, Int64Array

__all__ = [
    "arrow_entries",
    "arrow_flat",
    "arrow_floats",
    "arrow_ids",
    "arrow_lists",
    "arrow_parts",
    "arrow_seconds",
    "arrow_texts",
    "arrow_values",
    "arrow_without",
]


def arrow_ids(name: str, column: Any, kind: IdKind) -> IdColumn:
    """Ids from an arrow array of whole numbers, texts, floats, a dictionary, or lists of these."""
    array = _combine(column)
    if _is_list(array.type):
        return _scalars(name, array.flatten(), _list_offsets(array), kind)
    return _scalars(name, array, None, kind)


def arrow_seconds(column: Any) -> IdColumn | None:
    """Seconds of an arrow array of timestamps or dates, or lists of these; None for an array of another type."""
    array = _combine(column)
    flat, offsets = (array.flatten(), _list_offsets(array)) if _is_list(array.type) else (array, None)
    if not (pa.types.is_timestamp(flat.type) or pa.types.is_date(flat.type)):
        return None
    return seconds_of_timestamps(flat.to_numpy(zero_copy_only=False), offsets)


def arrow_values(column: Any) -> tuple[NDArray[Any] | TextBuffers, BoolArray | None, Int64Array | None]:
    """Returns the values of an arrow array, or of its lists: numbers, times or texts `[n]`.

    Also returns a mask of the present ones (None if complete or if the values tell), and offsets (None without lists).
    """
    array = _combine(column)
    offsets = None
    if _is_list(array.type):
        array, offsets = array.flatten(), _list_offsets(array)
    if pa.types.is_null(array.type):
        array = array.cast(pa.float64())
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_decimal(array.type):
        array = array.cast(pa.string())
    if _is_text(array.type):
        return _buffers(array), None, offsets
    present = _present(array) if array.null_count else None
    if present is not None and pa.types.is_boolean(array.type):
        array = array.cast(pa.uint8())
    if present is not None and (pa.types.is_integer(array.type) or pa.types.is_floating(array.type)):
        array = array.fill_null(0)
    return array.to_numpy(zero_copy_only=False), present, offsets


def arrow_entries(column: Any) -> Int64Array | None:
    """Number of entries in each list of an arrow array, including nulls; None if the array has no lists."""
    return np.diff(_list_offsets(_combine(column))) if _is_list(column.type) else None


def arrow_flat(column: Any) -> Any:
    """The entries of an arrow array of lists, including nulls, as one array; another array as it is."""
    array = _combine(column)
    return array.flatten() if _is_list(array.type) else array


def arrow_lists(column: Any, separator: str) -> Any:
    """Splits the texts of an arrow array into lists of their parts; returns an array of another type unchanged."""
    array = _plain_texts(column)
    return pc.split_pattern(array, separator) if _is_text(array.type) else column


def arrow_texts(column: Any) -> TextBuffers | None:
    """Returns the texts of an arrow array, also of a dictionary of texts; None for an array of another type."""
    array = _plain_texts(column)
    return _buffers(array) if _is_text(array.type) else None


def arrow_parts(column: Any, separator: str) -> int:
    """Returns the number of parts of all texts in an arrow array; 0 for an array of another type."""
    array = _plain_texts(column)
    if not _is_text(array.type):
        return 0
    return len(array) + (pc.sum(pc.count_substring(array, separator)).as_py() or 0)


def arrow_without(column: Any, texts: Sequence[str], numbers: Sequence[float]) -> Any:
    """Returns an arrow array in which these texts, or numbers, are null. Values within lists are unchanged."""
    array = _plain_texts(column)
    if _is_text(array.type):
        return pc.if_else(pc.is_in(array, value_set=pa.array(texts).cast(array.type)), None, array)
    if not (pa.types.is_integer(array.type) or pa.types.is_floating(array.type)):
        return column
    for number in numbers:
        try:
            same = pc.equal(array, pa.scalar(number, array.type))
        except (pa.ArrowException, OverflowError):  # The type does not have this number.
            continue
        array = pc.if_else(same, None, array)
    return array


def _plain_texts(column: Any) -> Any:
    """Returns a column of one chunk, with dictionaries and views of texts decoded."""
    array = _combine(column)
    if pa.types.is_dictionary(array.type) and _is_text(array.type.value_type):
        array = array.dictionary_decode()
    if str(array.type) in ("string_view", "binary_view"):
        array = array.cast(pa.large_string() if str(array.type) == "string_view" else pa.large_binary())
    return array


def _is_list(kind: Any) -> bool:
    return any(test(kind) for test in (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list))


def _list_offsets(array: Any) -> Int64Array:
    if array.null_count == 0 and not pa.types.is_fixed_size_list(array.type):
        bounds = array.offsets.to_numpy(zero_copy_only=False).astype(np.int64)
        return bounds - bounds[0]  # type: ignore[no-any-return]
    offsets = np.zeros(len(array) + 1, np.int64)
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _scalars(name: str, array: Any, offsets: Int64Array | None, kind: IdKind) -> IdColumn:
    """Ids of a flat array, without nulls."""
    if pa.types.is_null(array.type):
        array = array.cast(pa.uint64())
    if pa.types.is_dictionary(array.type):
        ids = _dictionary_ids(array, offsets, kind)
        if ids is not None:
            return ids
        array = array.dictionary_decode()
    if pa.types.is_decimal(array.type):
        array = array.cast(pa.string())
    if _is_text(array.type):
        return ids_of_texts(name, _buffers(array), offsets, kind)
    if array.null_count:
        offsets = offsets_of_present(_present(array), offsets)
        array = array.drop_null()
    _require_numbers(name, array.type, "a feature")
    return ids_of_numbers(name, array.to_numpy(zero_copy_only=False), offsets, kind)


def _dictionary_ids(array: Any, offsets: Int64Array | None, kind: IdKind) -> IdColumn | None:
    """Ids of a dictionary array, with each entry converted once; None if an entry, even an unused one, is not an id."""
    entries = array.dictionary
    if not _is_text(entries.type):
        return None
    ids, present, bad = text_ids(_buffers(entries), kind)
    if bad >= 0:
        return None
    index = array.indices.fill_null(0).to_numpy(zero_copy_only=False)
    has_id = _present(array)
    if len(present):
        has_id &= present[index]
    if has_id.all():
        return IdColumn(ids[index], offsets)
    return IdColumn(ids[index[has_id]], offsets_of_present(has_id, offsets))


def _is_text(kind: Any) -> bool:
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return any(test(kind) for test in tests) or str(kind) in ("string_view", "binary_view")


def _buffers(array: Any) -> TextBuffers:
    """The buffers of an array of texts, without a copy."""
    if str(array.type) in ("string_view", "binary_view"):
        array = array.cast(pa.large_binary())
    validity, bounds, data = array.buffers()
    large = pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type)
    if len(array) == 0:
        return TextBuffers.of([])
    offsets: NDArray[Any] = np.frombuffer(bounds, np.int64 if large else np.int32)
    return TextBuffers(
        np.frombuffer(data, np.uint8) if data is not None and data.size else np.empty(0, np.uint8),
        offsets[array.offset : array.offset + len(array) + 1],
        np.frombuffer(validity, np.uint8) if validity is not None and array.null_count else None,
        array.offset if validity is not None and array.null_count else 0,
    )


def _require_numbers(name: str, kind: Any, owner: str) -> None:
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        also = "texts and lists of these" if owner == "a feature" else "texts of numbers and booleans"
        raise DataError(
            f"Column {name!r} holds {kind}; {owner} takes whole numbers, floats, {also}: cast the column.", column=name
        )


def arrow_floats(name: str, column: Any) -> tuple[NDArray[Any], BoolArray | None]:
    """Numbers of an arrow array, in its own type (float64 for texts), and a mask of missing ones (None if complete)."""
    array = _combine(column)
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if _is_text(array.type):
        return numbers_of_texts(name, _buffers(array))
    if pa.types.is_null(array.type) or pa.types.is_decimal(array.type):
        array = array.cast(pa.float64())
    _require_numbers(name, array.type, "a dense feature or label")
    if not array.null_count:
        return array.to_numpy(zero_copy_only=False), None
    missing = ~_present(array)
    if pa.types.is_boolean(array.type):
        array = array.cast(pa.uint8())
    return array.fill_null(0).to_numpy(zero_copy_only=False), missing


def _present(array: Any) -> BoolArray:
    present: BoolArray = array.is_valid().to_numpy(zero_copy_only=False)
    return present


def _combine(column: Any) -> Any:
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if isinstance(column, pa.ChunkedArray):  # older pyarrow keeps a chunked array when it has no or several chunks
        column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    return column
