"""Area under the ROC curve, streaming."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from persia.errors import ConfigError
from persia.metrics.checks import State, check, column
from persia.types import Floats

__all__ = ["AUC", "BLOCK"]

BLOCK: Final = 1 << 14
"""Number of rows that are buffered before they are binned, so that temporaries fit into the cache."""

LIMIT: Final = 16.0
"""Logits are clipped to +-LIMIT before they are binned."""


class AUC:
    """Area under the ROC curve, over a histogram of logits.

    Logits are clipped to +-16 and binned uniformly. Two rows of one bin count as a tie, that is as half a pair. With
    the default of 2^18 bins (1.2e-4 wide) the result agrees with the exact AUC to about 1e-6 once logits spread over
    hundreds of bins; `bound` returns the maximum error. A label between 0 and 1 counts as that fraction of a positive
    and the rest of a negative.

    Memory: 16 bytes per bin (pages in use only) and a buffer of 128 KiB. Not thread-safe.

    Args:
        bins: number of bins.
    """

    def __init__(self, bins: int = 1 << 18) -> None:
        if not 2 <= bins <= 1 << 24:
            raise ConfigError(f"Invalid AUC.bins = {bins}; expected a number from 2 to 2^24.", field="AUC.bins")
        self.bins = bins
        self._counts: NDArray[np.float64] | None = None  # [2 * bins]: negatives and positives of each bin
        self._logits = np.empty(0, np.float32)
        self._labels = np.empty(0, np.float32)
        self._filled = 0

    def update(self, logits: ArrayLike, labels: ArrayLike) -> None:
        """Adds rows.

        Args:
            logits: `[rows]`, finite.
            labels: `[rows]`, each in [0, 1].

        Raises:
            DataError: an argument is invalid; nothing has been added.
        """
        x, y = column(logits, "logits"), column(labels, "labels")
        check(x, y)
        if len(self._logits) == 0:
            self._logits, self._labels = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
        start = 0
        while start < len(x):
            take = min(BLOCK - self._filled, len(x) - start)
            self._logits[self._filled : self._filled + take] = x[start : start + take]
            self._labels[self._filled : self._filled + take] = y[start : start + take]
            self._filled += take
            start += take
            if self._filled == BLOCK:
                self._flush()

    def _flush(self) -> None:
        if self._filled:
            self.add(self._logits[: self._filled], self._labels[: self._filled])
            self._filled = 0

    def add(self, logits: Floats, labels: Floats) -> None:
        """Bins rows without checks or buffering, for callers that have done both."""
        if self._counts is None:
            self._counts = np.zeros(2 * self.bins)
        scaled = (np.clip(logits, -LIMIT, LIMIT) + np.float32(LIMIT)) * np.float32(self.bins / (2 * LIMIT))
        index = np.minimum(scaled.astype(np.intp), self.bins - 1)
        index *= 2
        positive = labels == 1
        if np.all(positive | (labels == 0)):
            index += positive
            np.add.at(self._counts, index, 1.0)
        else:
            np.add.at(self._counts, index, 1.0 - labels.astype(np.float64))
            np.add.at(self._counts, index + 1, labels.astype(np.float64))

    def _sides(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        self._flush()
        if self._counts is None:
            return np.zeros(1), np.zeros(1)
        sides = self._counts.reshape(-1, 2)
        return sides[:, 0], sides[:, 1]

    def histogram(self) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """Returns the centers of all bins, float64 `[bins]`, and how much of negatives and of positives is in each."""
        negative, positive = self._sides()
        centers = (np.arange(len(negative), dtype=np.float64) + 0.5) * (2 * LIMIT / self.bins) - LIMIT
        return centers, negative, positive

    def result(self) -> float:
        """Returns the AUC; nan while there are rows of one class only."""
        negative, positive = self._sides()
        pairs = float(negative.sum()) * float(positive.sum())
        if pairs == 0:
            return math.nan
        below = np.cumsum(negative) - 0.5 * negative
        return float((positive * below).sum()) / pairs  # `np.dot` of strided arrays takes three times as long.

    def reliability(self, groups: int = 20) -> list[tuple[float, float, float]]:
        """Returns mean prediction, mean label and number of rows of `groups` groups of about as many rows each.

        Groups are in ascending order of predictions; bins of equal predictions are not divided.
        """
        negative, positive = self._sides()
        rows = negative + positive
        used = np.flatnonzero(rows)
        if not len(used):
            return []
        rows, positive = rows[used], positive[used]
        predicted = 1.0 / (1.0 + np.exp(LIMIT - (used + 0.5) * (2 * LIMIT / self.bins)))
        middle = (np.cumsum(rows) - rows / 2) / rows.sum()
        group = np.minimum((middle * groups).astype(np.intp), groups - 1)
        sums = [np.bincount(group, of, groups) for of in (predicted * rows, positive, rows)]
        return [(float(p / n), float(y / n), float(n)) for p, y, n in zip(*sums, strict=True) if n]

    def bound(self) -> float:
        """Returns the maximum error due to binning: half the fraction of pairs that share a bin."""
        negative, positive = self._sides()
        pairs = float(negative.sum()) * float(positive.sum())
        return 0.5 * float(np.dot(positive, negative)) / pairs if pairs else math.nan

    def merge(self, other: AUC) -> None:
        """Adds the rows of another AUC with the same number of bins."""
        if other.bins != self.bins:
            raise ConfigError(
                f"Cannot merge an AUC of {other.bins} bins into one of {self.bins}; use the same number of bins.",
                field="AUC.bins",
            )
        self._flush()
        other._flush()
        if other._counts is None:
            return
        if self._counts is None:
            self._counts = np.zeros(2 * self.bins)
        used = np.flatnonzero(other._counts)
        if len(used) < self.bins // 8:  # Of a few rows: memory of other bins is not even touched.
            self._counts[used] += other._counts[used]
        else:
            self._counts += other._counts

    def state_dict(self) -> State:
        """Returns the bins in use and their counts."""
        self._flush()
        used = np.flatnonzero(self._counts) if self._counts is not None else np.empty(0, np.int64)
        counts = self._counts[used] if self._counts is not None else np.empty(0)
        return {"bins": self.bins, "used": used.astype(np.int64), "counts": counts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replaces the counts by those of a state."""
        self.bins = int(state["bins"])
        self._filled = 0
        self._counts = np.zeros(2 * self.bins)
        self._counts[np.asarray(state["used"])] = state["counts"]
