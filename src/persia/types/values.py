"""16-bit floats: the values of rows in tables of dtype bfloat16 or float16.

In memory and in messages a row is made of 32-bit words. Two 16-bit values share a word, the first one in its low half;
the last half of an odd number of values is zero. So whatever moves rows moves float32 words and needs no dtype; only
stores and the users of rows convert. numpy has no bfloat16: its bits are uint16.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

__all__ = ["DTYPES", "LARGEST", "Dtype", "from_halves", "round_down", "to_halves", "widen", "words_of"]

Dtype = Literal["float32", "bfloat16", "float16"]
"""Dtype of the values of a table."""

DTYPES: tuple[Dtype, ...] = get_args(Dtype)

LARGEST: dict[Dtype, float] = {"float32": (2 - 2**-23) * 2.0**127, "bfloat16": (2 - 2**-7) * 2.0**127, "float16": 65504}
"""Largest finite number of each dtype."""


def words_of(dtype: Dtype, count: int) -> int:
    """Returns the 32-bit words that `count` values occupy."""
    return count if dtype == "float32" else (count + 1) // 2


def widen(words: NDArray[np.float32], dtype: Dtype, dim: int) -> NDArray[np.float32]:
    """Returns the values of rows, exactly: float32 `[n, dim]`.

    Args:
        words: rows as stored, float32 `[n, words_of(dtype, dim)]`, contiguous.
        dtype: of the values.
        dim: values per row.
    """
    if dtype == "float32":
        return words
    halves = words.view(np.uint16)[:, :dim]
    return from_halves(halves.view(np.float16) if dtype == "float16" else halves)


def from_halves(values: NDArray[Any]) -> NDArray[np.float32]:
    """Returns float32 values of any shape, exactly, from float32, float16 or bits of bfloat16 (uint16)."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.astype(np.float32, copy=False)


def to_halves(values: NDArray[np.float32], dtype: Dtype) -> NDArray[Any]:
    """Returns values rounded to the nearest, ties to even: float32, float16, or bits of bfloat16 (uint16).

    Finite values beyond the largest number become that number. Infinities and NaN stay such.
    """
    if dtype == "float32":
        return values
    limited = np.where(np.isfinite(values), np.clip(values, -LARGEST[dtype], LARGEST[dtype]), values)
    if dtype == "float16":
        return limited.astype(np.float16)
    bits = limited.astype(np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    signs = bits & np.uint32(0x80000000)
    chosen = np.where(np.isfinite(limited), rounded, np.where(np.isnan(limited), signs | np.uint32(0x7FC00000), bits))
    return (chosen >> np.uint32(16)).astype(np.uint16)


def round_down(value: float, dtype: Dtype) -> float:
    """Returns the largest number of a dtype that is not above a positive float32 value."""
    if dtype == "float32":
        return value
    if dtype == "bfloat16":
        return float((np.array([value], np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)[0])
    half = np.float16(min(value, LARGEST["float16"]))
    return float(half if half <= value else np.nextafter(half, np.float16(0)))
