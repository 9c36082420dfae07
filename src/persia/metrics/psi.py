"""Population stability index, and the buckets that it compares."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import ArrayLike

from persia.types import Ids, Int64Array

__all__ = [
    "ID_BUCKETS",
    "LENGTH_BUCKETS",
    "MODERATE",
    "SIGNIFICANT",
    "bucket_ids",
    "bucket_lengths",
    "psi",
]

MODERATE: Final = 0.1
"""A PSI below this is an insignificant change."""

SIGNIFICANT: Final = 0.25
"""A PSI of at least this is significant. Both thresholds are rules of thumb in credit scoring (Lewis, 1994)."""

ID_BUCKETS: Final = 32
LENGTH_BUCKETS: Final = 18
"""0, 1, 2, 3-4, 5-8, ..., and all from 2^15 + 1 on."""

MIX = np.uint64(0x9E3779B97F4A7C15)
"""2^64 over the golden ratio: the product's upper bits depend on all bits of an id."""

HALF = 0.5


def psi(expected: ArrayLike, actual: ArrayLike) -> float:
    """Returns the population stability index of counts by bucket: sum of (a - e) * ln(a / e) over shares a and e.

    0 means that both are equal. An empty bucket counts as half an observation, as the logarithm would be undefined.
    Without any change, samples of n and m observations in b buckets have a PSI of (b - 1) * (1 / n + 1 / m) on average
    (Yurdakul, 2018).

    Args:
        expected: counts `[buckets]` of the reference.
        actual: counts `[buckets]` to compare with it.

    Returns:
        The index; NaN if one of them has no observation.
    """
    e, a = np.asarray(expected, np.float64), np.asarray(actual, np.float64)
    if not (e.sum() and a.sum()):
        return float("nan")
    e, a = np.maximum(e, HALF) / e.sum(), np.maximum(a, HALF) / a.sum()
    return float(((a - e) * np.log(a / e)).sum())


def bucket_ids(ids: Ids) -> Int64Array:
    """Returns the number of ids in each bucket of a hash, int64 `[ID_BUCKETS]`.

    Args:
        ids: uint64 `[n]`.
    """
    shift = np.uint64(64 - (ID_BUCKETS - 1).bit_length())
    return np.bincount(((ids * MIX) >> shift).astype(np.int64), minlength=ID_BUCKETS).astype(np.int64)


def bucket_lengths(lengths: Int64Array) -> Int64Array:
    """Returns the number of lists of ids in each bucket of lengths, int64 `[LENGTH_BUCKETS]`.

    Args:
        lengths: int64 `[rows]`.
    """
    bounds = np.array([0, *(1 << np.arange(LENGTH_BUCKETS - 2))])  # The largest length of each bucket.
    return np.bincount(np.searchsorted(bounds, lengths), minlength=LENGTH_BUCKETS).astype(np.int64)
