"""Values of published rows: float32, float16, or int8 with a scale for each row."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from persia.types.half_floats import LARGEST, from_halves, to_halves
from persia.types.publishing import PublishDtype

__all__ = ["NAMES", "decode_values", "encode_values"]

NAMES: dict[PublishDtype, str] = {"float32": "F32", "float16": "F16", "int8": "I8"}
"""Names of dtypes in safetensors files."""

STEPS = 127
"""Largest magnitude of an int8 value: the scale is symmetric, so -128 is not used."""

LARGEST_SCALE = np.nextafter(np.float32(LARGEST["float32"] / STEPS), np.float32(0))
"""A larger scale times 127 could round to infinity."""


def encode_values(values: NDArray[np.float32], dtype: PublishDtype) -> tuple[NDArray[Any], NDArray[np.float32] | None]:
    """Returns rows `[n, dim]` in a dtype, and for int8 the scale of each row, float32 `[n]`.

    float16: finite values beyond the largest number become that number. int8: a value is an integer times the scale of
    its row, off by half the scale at most. A row with NaN or an infinity has the scale NaN, and becomes NaN.
    """
    if dtype == "float32":
        return values, None
    if dtype == "float16":
        return to_halves(values, "float16"), None
    with np.errstate(invalid="ignore"):  # NaN is handled below.
        peaks = np.abs(values).max(axis=1, initial=0)
        scales = np.where(np.isfinite(peaks), np.minimum(peaks / STEPS, LARGEST_SCALE), peaks).astype(np.float32)
    finite = np.isfinite(scales)
    usable = finite & (scales >= np.finfo(np.float32).tiny)  # With a smaller scale, quotients are not accurate.
    quotients = np.where(usable[:, None], values, 0) / np.where(usable, scales, 1)[:, None]
    scales = np.where(usable, scales, np.where(finite, 0, np.nan)).astype(np.float32)
    return np.rint(quotients).clip(-STEPS, STEPS).astype(np.int8), scales


def decode_values(values: NDArray[Any], scales: NDArray[np.float32] | None) -> NDArray[np.float32]:
    """Returns published rows as float32 `[n, dim]`."""
    if scales is None:
        return from_halves(values)
    return values.astype(np.float32) * scales[:, None]
