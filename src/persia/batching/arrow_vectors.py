"""Flattens arrow columns of vectors: lists, nested lists, tensors, bytes of fixed size, and texts of numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from persia.batching.texts import MISSING
from persia.errors import DataError
from persia.types import BoolArray, Int64Array

__all__ = ["arrow_vectors"]

_BETWEEN = r"[\[\](),;|\s]+"


def arrow_vectors(name: str, column: Any) -> tuple[Any, Int64Array, BoolArray]:
    """Returns the numbers of a column of vectors, the bounds of its rows, and which rows are missing.

    Args:
        name: name of the column, for messages.
        column: lists, nested lists or tensors of numbers; bytes of fixed size, which are numbers from 0 to 255; or
            texts such as "[1, 2]" or "1;2".

    Returns:
        A flat arrow array, int64 `[batch + 1]`, bool `[batch]`.
    """
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    if isinstance(array.type, pa.BaseExtensionType):
        array = array.storage
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if _is_text(array.type):
        array = _lists_of_texts(array)
    missing = np.asarray(array.is_null().to_numpy(zero_copy_only=False), np.bool_)
    if pa.types.is_null(array.type):
        return pa.array([], pa.float64()), np.zeros(len(array) + 1, np.int64), missing
    if pa.types.is_fixed_size_binary(array.type):
        offsets = np.zeros(len(array) + 1, np.int64)
        np.cumsum(np.where(missing, 0, array.type.byte_width), out=offsets[1:])
        return pa.array(np.frombuffer(b"".join(array.drop_null().to_pylist()), np.uint8)), offsets, missing
    offsets = np.arange(len(array) + 1, dtype=np.int64)
    if not _is_list(array.type):
        raise DataError(
            f"Column {name!r} holds {array.type}, but its DenseFeature has a size; give lists of numbers, or correct "
            "DenseFeature.size.",
            column=name,
        )
    while _is_list(array.type):
        bounds = np.zeros(len(array) + 1, np.int64)
        lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
        np.cumsum(lengths, out=bounds[1:])
        offsets, array = bounds[offsets], array.flatten()
    return array, offsets, missing


def _lists_of_texts(array: Any) -> Any:
    """Splits texts of several numbers; a marker of a missing value is a missing row."""
    texts = array.cast(pa.large_string())
    texts = pc.utf8_trim_whitespace(pc.replace_substring_regex(texts, _BETWEEN, " "))
    texts = pc.if_else(pc.is_in(texts, value_set=pa.array(["", *MISSING], pa.large_string())), None, texts)
    return pc.split_pattern(texts, " ")


def _is_list(kind: Any) -> bool:
    return any(test(kind) for test in (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list))


def _is_text(kind: Any) -> bool:
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return any(test(kind) for test in tests) or str(kind) in ("string_view", "binary_view")
