"""16-bit values of the native store, in plain Python numbers."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from persia.store.config import TableConfig
from persia.store.reference_random import random_bits, row_key
from persia.types.values import LARGEST, Dtype, from_halves, to_halves

__all__ = ["as_words", "nearest", "round_update"]

ROUNDING = 0x726F756E64696E67
"""Keeps the random numbers of rounding apart from those of initial values and of admission."""

Vector = NDArray[np.float32]


def nearest(values: Vector, dtype: Dtype) -> Vector:
    """Returns values rounded to the nearest number of a dtype, as initial and imported ones are."""
    return from_halves(to_halves(values, dtype))


def round_update(config: TableConfig, id_: int, update_count: int, weight: Vector, state: Vector) -> None:
    """Rounds the values of a row at random, in place, after its update of this number."""
    row = row_key(config.seed ^ ROUNDING, config.name, id_)
    for part, (values, dtype) in enumerate(((weight, config.dtype), (state, config.state_dtype))):
        if dtype != "float32":
            first = update_count << 17 | part << 16
            values[:] = [_stochastic(float(v), dtype, _random16(row, first, i)) for i, v in enumerate(values)]


def _random16(key: int, first: int, element: int) -> int:
    return random_bits(key, first + element // 4) >> 16 * (element % 4) & 0xFFFF


def _stochastic(value: float, dtype: Dtype, random: int) -> float:
    """Rounds a float32 value up with a probability that makes it right on average (Gupta et al. 2015).

    Args:
        value: the value.
        dtype: of the result.
        random: a number of 16 bits.
    """
    if not math.isfinite(value) or value == 0:
        return value
    magnitude = abs(value)
    exponent = math.frexp(magnitude)[1] - 1
    if dtype == "bfloat16":
        step, bits = 2.0 ** (max(exponent, -126) - 7), 16
    elif exponent >= -14:
        step, bits = 2.0 ** (exponent - 10), 13
    else:
        step, bits = 2.0**-24, 16
    units = int(magnitude / step * 2**bits)
    rounded = (units + (random >> 16 - bits) >> bits) * step
    return math.copysign(min(rounded, LARGEST[dtype]), value)


def as_words(values: Vector, config: TableConfig) -> Vector:
    """Returns the values of a row as they are stored and looked up: float32 `[row_words]`."""
    if config.dtype == "float32":
        return values
    halves = np.zeros(2 * config.row_words, np.uint16)
    halves[: config.dim] = to_halves(values, config.dtype).view(np.uint16)
    return halves.view(np.float32)
