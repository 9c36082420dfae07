"""pyarrow columns to ids and numbers; the only file of this package that imports pyarrow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from persia.batching.batch import IdColumn
from persia.batching.columns import hash_buffers, missing_number, number_ids, offsets_of_present
from persia.errors import DataError
from persia.types import BoolArray, Ids, Int64Array

__all__ = ["arrow_floats", "arrow_ids"]


def arrow_ids(name: str, column: Any) -> IdColumn:
    """Ids from an arrow array of whole numbers, texts, floats, a dictionary, or lists of these."""
    array = _combine(column)
    kind = array.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _scalars(name, array.flatten(), _list_offsets(array))
    return _scalars(name, array, None)


def _list_offsets(array: Any) -> Int64Array:
    if array.null_count == 0 and not pa.types.is_fixed_size_list(array.type):
        bounds = array.offsets.to_numpy(zero_copy_only=False).astype(np.int64)
        return bounds - bounds[0]  # type: ignore[no-any-return]
    offsets = np.zeros(len(array) + 1, np.int64)
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _scalars(name: str, array: Any, offsets: Int64Array | None) -> IdColumn:
    """Ids of a flat array; nulls are left out."""
    if pa.types.is_null(array.type):
        array = array.cast(pa.uint64())
    if str(array.type) in ("string_view", "binary_view"):
        array = array.cast(pa.large_binary())
    if array.null_count:
        offsets = offsets_of_present(_present(array), offsets)
        array = array.drop_null()
    kind = array.type
    if pa.types.is_dictionary(kind):
        index = array.indices.to_numpy(zero_copy_only=False)
        if array.dictionary.null_count:
            return _scalars(name, array.dictionary_decode(), offsets)
        if _is_text(kind.value_type):
            return IdColumn(_hash(array.dictionary)[index], offsets)
        return number_ids(name, _numbers(name, array.dictionary)[index], offsets)
    if _is_text(kind):
        return IdColumn(_hash(array), offsets)
    return number_ids(name, _numbers(name, array), offsets)


def _is_text(kind: Any) -> bool:
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return any(test(kind) for test in tests)


def _hash(array: Any) -> Ids:
    """xxhash64 of each text of an array without nulls, straight from its buffers."""
    _, bounds, data = array.buffers()
    if len(array) == 0:
        return np.empty(0, np.uint64)
    large = pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type)
    offsets: NDArray[Any] = np.frombuffer(bounds, np.int64 if large else np.int32)[
        array.offset : array.offset + len(array) + 1
    ]
    text = np.frombuffer(data, np.uint8) if data is not None and data.size else np.empty(0, np.uint8)
    return hash_buffers(text, offsets)


def _numbers(name: str, array: Any) -> NDArray[Any]:
    kind = array.type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        raise DataError(
            f"Column {name!r} has the arrow type {kind}; whole numbers, floats, texts and lists of these are "
            "understood: cast it.",
            column=name,
        )
    values: NDArray[Any] = array.to_numpy(zero_copy_only=False)
    return values


def arrow_floats(name: str, column: Any) -> NDArray[Any]:
    """Numbers of an arrow array, in its own type; a null is an error."""
    array = _combine(column)
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if array.null_count:
        raise missing_number(name, int(_present(array).argmin()))
    return _numbers(name, array)


def _present(array: Any) -> BoolArray:
    present: BoolArray = array.is_valid().to_numpy(zero_copy_only=False)
    return present


def _combine(column: Any) -> Any:
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if isinstance(column, pa.ChunkedArray):  # older pyarrow keeps a chunked array when it has no or several chunks
        column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    return column
