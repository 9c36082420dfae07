"""Zipf-distributed ids: the number of distinct ids in a batch, and the share of their rows that is not in memory."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["distinct_ids", "missing_share"]

BINS = 4000


def distinct_ids(rows: int, zipf: float, samples: float) -> float:
    """Returns the expected number of distinct ids of a batch.

    Args:
        rows: number of ids.
        zipf: exponent of their popularity; 0 is uniform.
        samples: ids of a batch, repetitions included.
    """
    count, requested = _requested(rows, zipf, samples)
    return float((count * requested).sum())


def missing_share(rows: int, memory_rows: int, zipf: float, samples: float) -> float:
    """Returns the share of a batch's distinct ids whose rows are on SSD, by Che's approximation of an LRU cache.

    Args:
        rows: number of rows of the table.
        memory_rows: number of rows in memory.
        zipf: exponent of the popularity of ids; 0 is uniform.
        samples: ids of a batch, repetitions included.
    """
    if memory_rows >= rows:
        return 0.0
    count, requested = _requested(rows, zipf, samples)
    low, high = 0.0, 1.0
    while (count * -np.expm1(-requested * high)).sum() < memory_rows:
        high *= 2
    for _ in range(100):  # Bisects the number of batches after which an unused row has left memory.
        age = (low + high) / 2
        if (count * -np.expm1(-requested * age)).sum() < memory_rows:
            low = age
        else:
            high = age
    missing = np.exp(-requested * high)
    return float((count * requested * missing).sum() / (count * requested).sum())


def _requested(rows: int, zipf: float, samples: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns, by bin of about equal popularity, the number of ids and the probability that a batch has such an id."""
    edges = np.unique(np.geomspace(1, rows + 1, BINS).round())
    count = np.diff(edges)
    share = np.sqrt(edges[:-1] * (edges[1:] - 1).clip(1)) ** -zipf
    share /= (share * count).sum()
    return count, -np.expm1(-samples * share)
