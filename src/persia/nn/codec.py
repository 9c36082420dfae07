"""float16 rows with a scale per row, as they travel between embedding worker and NN worker (Persia, section 4.2.3)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from persia.types import Floats, WireRows

__all__ = ["decode", "encode"]

LARGEST = np.float32(2.0**15)
"""What the largest value of a row becomes: nearly all of float16's range, without its last, infinite step."""


def decode(rows: Mapping[str, WireRows], scales: Mapping[str, Floats] | None) -> dict[str, Floats]:
    """float32 rows `[n, dim]` by table; tables without scales come as they are."""
    scales = scales or {}
    return {name: values * scales[name][:, None] if name in scales else values for name, values in rows.items()}  # type: ignore[misc]


def encode(rows: Mapping[str, Floats]) -> tuple[dict[str, WireRows], dict[str, Floats]]:
    """float16 rows and their scales by table. A row with NaN or Inf stays not finite, as a whole."""
    packed: dict[str, WireRows] = {}
    scales: dict[str, Floats] = {}
    for name, values in rows.items():
        with np.errstate(invalid="ignore"):
            scale = scales[name] = np.abs(values).max(axis=1, initial=0.0) / LARGEST
            packed[name] = (values / np.where(scale == 0, 1, scale)[:, None]).astype(np.float16)
    return packed, scales
