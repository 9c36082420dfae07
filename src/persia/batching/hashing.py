"""Ids from strings, numbers and feature crosses: XXH64, the same on every machine and in every version of persia."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from persia.batching.native import ThreadPool, as_data_error, core
from persia.errors import DataError
from persia.types import Ids, Int32Array, Int64Array

__all__ = ["hash_cross", "hash_strings", "hash_values"]

_MAX = 2**64 - 1


def _check_word(name: str, value: int) -> None:
    if not 0 <= value <= _MAX:
        raise DataError(f"{name} = {value!r}: it must be an int from 0 to 2^64 - 1.")


def _check_array(name: str, array: NDArray[Any], kinds: str, itemsize: int | None = None) -> None:
    """Kinds as in `dtype.kind`."""
    if not isinstance(array, np.ndarray) or array.dtype.kind not in kinds or not array.dtype.isnative:
        raise DataError(f"{name}: dtype {getattr(array, 'dtype', type(array))} cannot be hashed; see its description.")
    if itemsize is not None and array.dtype.itemsize != itemsize:
        raise DataError(f"{name}: dtype {array.dtype} must have {itemsize} bytes.")
    if array.ndim != 1 or not array.flags.c_contiguous or not array.flags.aligned:
        raise DataError(f"{name}: must be a contiguous, aligned array [n], got shape {array.shape}.")


def hash_strings(
    data: NDArray[np.uint8],
    offsets: Int32Array | Int64Array,
    pool: ThreadPool,
    *,
    validity: NDArray[np.uint8] | None = None,
    validity_start: int = 0,
    seed: int = 0,
    null: int = 0,
) -> Ids:
    """XXH64 of each string of an array in the layout of Arrow.

    Args:
        data: uint8, the bytes of all strings.
        offsets: int32 or int64 `[n + 1]`: string i is `data[offsets[i]:offsets[i + 1]]`. A slice of a longer array
            need not start at 0.
        pool: threads to run on.
        validity: uint8 bitmap, least significant bit first; a string without its bit is null. None: all are valid.
        validity_start: bit of the first string.
        seed: of the hash.
        null: the result for a null.

    Returns:
        uint64 `[n]`.

    Raises:
        DataError: dtypes, offsets or the bitmap do not fit.

    Blocks until done, without the GIL. Thread-safe.
    """
    _check_array("data", data, "u", 1)
    _check_array("offsets", offsets, "i", 4 if offsets.dtype.itemsize == 4 else 8)
    if validity is not None:
        _check_array("validity", validity, "u", 1)
    _check_word("seed", seed)
    _check_word("null", null)
    _check_word("validity_start", validity_start)
    if not len(offsets):
        raise DataError("offsets: there must be one more than strings, got none.")
    out = np.empty(len(offsets) - 1, np.uint64)
    with as_data_error:
        core.hash_strings(data, offsets, validity, validity_start, seed, null, out, pool)
    return out


def hash_values(values: NDArray[Any], pool: ThreadPool, *, seed: int = 0) -> Ids:
    """XXH64 of the little-endian bytes of each number, for numbers that are categories.

    The width is part of the identity: int32 5 and int64 5 hash differently. -0.0 hashes as 0.0, and every NaN alike.

    Args:
        values: bool, int, uint or float of 1, 2, 4 or 8 bytes, `[n]`, contiguous.
        pool: threads to run on.
        seed: of the hash.

    Returns:
        uint64 `[n]`.

    Raises:
        DataError: another dtype or shape.

    Blocks until done, without the GIL. Thread-safe.
    """
    _check_array("values", values, "biuf")
    _check_word("seed", seed)
    if values.dtype.itemsize > 8:
        raise DataError(f"values: dtype {values.dtype} must have 1, 2, 4 or 8 bytes.")
    out = np.empty(len(values), np.uint64)
    with as_data_error:
        bits = values.view(f"u{values.dtype.itemsize}")
        core.hash_values(bits, values.dtype.kind == "f", seed, out, pool)
    return out


def hash_cross(columns: Sequence[Ids], pool: ThreadPool, *, seed: int = 0) -> Ids:
    """The ids of a feature cross: XXH64 over the little-endian bytes of the ids of a sample, in the order of columns.

    Args:
        columns: at least one, uint64 `[n]` each.
        pool: threads to run on.
        seed: of the hash.

    Returns:
        uint64 `[n]`.

    Raises:
        DataError: no columns, another dtype, or different lengths.

    Blocks until done, without the GIL. Thread-safe.
    """
    if not columns:
        raise DataError("A feature cross needs at least one column.")
    for c, column in enumerate(columns):
        _check_array(f"column {c}", column, "u", 8)
    _check_word("seed", seed)
    out = np.empty(len(columns[0]), np.uint64)
    with as_data_error:
        core.hash_cross(list(columns), seed, out, pool)
    return out
