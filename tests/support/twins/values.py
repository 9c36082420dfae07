"""16-bit values of the native store, in plain Python numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from persia.store.table_config import TableConfig
from persia.types.half_floats import LARGEST, Dtype
from support.twins.random_rows import GOLDEN, MASK, mix64, random_bits, row_key

__all__ = ["as_words", "from_halves", "nearest", "nearest_embedding", "round_update", "rounding_key", "to_halves"]

ROUNDING = 0x726F756E64696E67
"""Keeps the random numbers of rounding apart from those of initial values and of admission."""

Vector = NDArray[np.float32]


def from_halves(values: NDArray[Any]) -> Vector:
    """Returns float32 values as `persia.types.half_floats.from_halves` does."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.astype(np.float32)


def to_halves(values: Vector, dtype: Dtype) -> NDArray[Any]:
    """Returns values rounded to the nearest as `persia.types.half_floats.to_halves` does."""
    limited = np.where(np.isfinite(values), np.clip(values, -LARGEST[dtype], LARGEST[dtype]), values)
    if dtype == "float16":
        return limited.astype(np.float16)
    bits = limited.astype(np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    signs = bits & np.uint32(0x80000000)
    chosen = np.where(np.isfinite(limited), rounded, np.where(np.isnan(limited), signs | np.uint32(0x7FC00000), bits))
    return (chosen >> np.uint32(16)).astype(np.uint16)


def nearest(values: Vector, dtype: Dtype) -> Vector:
    """Returns values rounded to the nearest number of a dtype, as initial and imported ones are."""
    return values if dtype == "float32" else from_halves(to_halves(values, dtype))


def nearest_embedding(values: Vector, config: TableConfig) -> Vector:
    """Returns `nearest` of an embedding; 16-bit values do not exceed `stored_bound`."""
    rounded = nearest(values, config.dtype)
    if config.dtype == "float32" or not config.value_bound:
        return rounded
    return np.clip(rounded, np.float32(-config.stored_bound), np.float32(config.stored_bound))


def rounding_key(config: TableConfig, id_: int, step: int, before: Vector) -> int:
    """Returns the key of the random numbers of an update at a step.

    Args:
        config: of the table.
        id_: of the row.
        step: of the update.
        before: the embedding before it, as stored: float32 `[row_words]`.
    """
    hash_ = mix64(step + GOLDEN & MASK)
    for pair in np.append(before, np.zeros(len(before) % 2, np.float32)).view(np.uint64):
        hash_ = (hash_ ^ int(pair)) * GOLDEN & MASK
        hash_ ^= hash_ >> 32
    return mix64(row_key(config.seed ^ ROUNDING, config.name, id_) ^ hash_)


def round_update(config: TableConfig, key: int, update_count: int, weight: Vector, state: Vector) -> None:
    """Rounds the values of a row at random, in place, after its update of this number and `rounding_key`."""
    for part, (values, dtype) in enumerate(((weight, config.dtype), (state, config.state_dtype))):
        if dtype != "float32":
            first = update_count << 17 | part << 16
            values[:] = [_stochastic(float(v), dtype, _random16(key, first, i)) for i, v in enumerate(values)]


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
