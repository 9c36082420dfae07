"""Encodes rows for the wire: float16 with a scale per row (Persia paper, section 4.2.3)."""

from __future__ import annotations

import numpy as np

from persia.batching.native import Scratch, as_data_error, borrow, core
from persia.types import Floats, Halves

__all__ = ["decode_rows", "encode_rows"]


def encode_rows(rows: Floats) -> tuple[Halves, Floats]:
    """Compresses rows to half their size; lossy.

    The scale of a row is its largest magnitude / 2^15, at least 2^-126, and 1 for a row of zeros. An element loses at
    most 2^-11 of its magnitude, or 2^-40 of the largest magnitude of its row if that is more.

    Args:
        rows: float32 `[n, dim]`; copied first if not contiguous.

    Returns:
        float16 `[n, dim]` and scales, float32 `[n]`: a row is `float16 * scale`. NaN stays NaN, and a row with an
        infinity becomes NaN as a whole, so non-finite elements never become finite.

    Raises:
        DataError: an array of another dtype or shape.

    Blocks until done, without the GIL. Thread-safe.
    """
    rows = np.ascontiguousarray(rows)
    halves, scales = np.empty(rows.shape, np.float16), np.empty(len(rows), np.float32)
    with as_data_error:
        core.encode_fp16(rows, halves, scales)
    return halves, scales


def decode_rows(halves: Halves, scales: Floats, scratch: Scratch | None = None) -> Floats:
    """Undoes `encode_rows`.

    Args:
        halves: float16 `[n, dim]`; copied first if not contiguous.
        scales: float32 `[n]`.
        scratch: memory reused from call to call.

    Returns:
        float32 `[n, dim]`.

    Raises:
        DataError: arrays of another dtype or shape.

    Blocks until done, without the GIL. Thread-safe.
    """
    (rows,) = borrow([halves.shape], scratch or Scratch())
    with as_data_error:
        core.decode_fp16(np.ascontiguousarray(halves), np.ascontiguousarray(scales), rows)
    return rows
