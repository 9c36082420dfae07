"""16-bit floats: the values of rows in tables of dtype bfloat16 or float16.

In memory and in messages a row consists of 32-bit words. Two 16-bit values share a word, the first one in its low half;
the last half of an odd number of values is zero. Code that moves rows moves float32 words and needs no dtype; only
stores and users of rows convert. numpy has no bfloat16: its bits are uint16.
"""

from __future__ import annotations

import importlib
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "DTYPES",
    "LARGEST",
    "Dtype",
    "from_halves",
    "largest_finite",
    "round_down",
    "to_halves",
    "words_of",
]

_core: Any = importlib.import_module("persia._core").values

Dtype = Literal["float32", "bfloat16", "float16"]
"""Dtype of the values of a table."""

DTYPES: tuple[Dtype, ...] = get_args(Dtype)

LARGEST: dict[Dtype, float] = {"float32": (2 - 2**-23) * 2.0**127, "bfloat16": (2 - 2**-7) * 2.0**127, "float16": 65504}
"""Largest finite number of each dtype."""


def words_of(dtype: Dtype, count: int) -> int:
    """Returns the 32-bit words that `count` values occupy."""
    return count if dtype == "float32" else (count + 1) // 2


def from_halves(values: NDArray[Any]) -> NDArray[np.float32]:
    """Returns float32 values of any shape, exactly, from float32, float16 or bits of bfloat16 (uint16)."""
    if values.dtype not in (np.uint16, np.float16):
        return values.astype(np.float32, copy=False)
    out = np.empty(values.shape, np.float32)
    bits = np.ascontiguousarray(values).view(np.uint16)
    _core.widen(bits.reshape(-1), out.reshape(-1), "bfloat16" if values.dtype == np.uint16 else "float16")
    return out


def to_halves(values: NDArray[np.float32], dtype: Dtype) -> NDArray[Any]:
    """Returns values rounded to the nearest, ties to even: float32, float16, or bits of bfloat16 (uint16).

    Finite values beyond the largest number become that number. Infinities and NaN do not change.
    """
    if dtype == "float32":
        return values
    out = np.empty(values.shape, np.uint16)
    _core.narrow(np.ascontiguousarray(values, np.float32).reshape(-1), out.reshape(-1), dtype)
    return out.view(np.float16) if dtype == "float16" else out


def largest_finite(values: NDArray[np.float32]) -> float:
    """Returns the largest magnitude of the finite values of an array of any shape; 0 without any."""
    return float(_core.largest_finite(np.ascontiguousarray(values, np.float32).reshape(-1)))


def round_down(value: float, dtype: Dtype) -> float:
    """Returns the largest number of a dtype that is not above a value, which is finite and not negative.

    For float32, returns the value.
    """
    if dtype == "float32":
        return value
    near = to_halves(np.array([min(value, LARGEST[dtype])], np.float32), dtype)
    if float(from_halves(near)[0]) > value:
        near = (near.view(np.uint16) - np.uint16(1)).view(near.dtype)  # Bits are in the order of the numbers.
    return float(from_halves(near)[0])
