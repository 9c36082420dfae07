"""Ids from feature crosses: XXH64, the same on every machine and in every version of persia."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from persia.batching.native import ThreadPool, as_data_error, core
from persia.errors import DataError
from persia.types import Ids

__all__ = ["hash_cross"]

_MAX = 2**64 - 1


def _check_word(name: str, value: int) -> None:
    if not 0 <= value <= _MAX:
        raise DataError(f"{name} = {value!r}; it must be an int from 0 to 2^64 - 1.")


def _check_array(name: str, array: NDArray[Any], kinds: str, itemsize: int | None = None) -> None:
    """Raises DataError unless the dtype has one of these kinds (see `dtype.kind`) and the array is `[n]`."""
    if not isinstance(array, np.ndarray) or array.dtype.kind not in kinds or not array.dtype.isnative:
        raise DataError(f"{name}: dtype {getattr(array, 'dtype', type(array))} cannot be hashed; see its description.")
    if itemsize is not None and array.dtype.itemsize != itemsize:
        raise DataError(f"{name}: dtype {array.dtype} must have {itemsize} bytes.")
    if array.ndim != 1 or not array.flags.c_contiguous or not array.flags.aligned:
        raise DataError(f"{name}: must be a contiguous, aligned array [n], got shape {array.shape}.")


def hash_cross(columns: Sequence[Ids], pool: ThreadPool, *, seed: int = 0) -> Ids:
    """The ids of a feature cross: XXH64 over the little-endian bytes of the ids of a sample, in the order of columns.

    Args:
        columns: at least one, uint64 `[n]` each.
        pool: threads to run on.
        seed: seed of the hash.

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
