"""Area under the ROC curve, streaming."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from persia.errors import ConfigError
from persia.metrics.bins import Bins, Cells, SortedRows, sorted_rows
from persia.metrics.checks import State, check, check_weights, column, sigmoid
from persia.types import Floats

__all__ = ["AUC", "BLOCK"]

BLOCK: Final = 1 << 14
"""Number of rows that are buffered before they are added, so that temporaries fit into the cache."""

WAITING: Final = 16
"""Maximum number of waiting rows per bin."""

MOST_PIECES: Final = 256
"""Number of arrays of waiting rows at which they are concatenated."""

BYTES_PER_BIN: Final = 24

KINDS: Final = ("cells", "loose")


class AUC:
    """Area under the ROC curve, over a histogram of logits whose bins follow the logits.

    The scale and location of the logits do not matter. The result is exact for at most `2 * bins` distinct logits.
    Beyond that, two rows of one bin count as a tie, which is half a pair, and `bound` returns the maximum error. With
    the default number of bins the bound is at most 1e-5 while the distribution of logits is stable, and a few times as
    much if it changes often. The actual error is much smaller if the order of rows within a bin is mixed. A label
    between 0 and 1 counts as that fraction of a positive and the rest of a negative.

    Memory: 64 bytes per bin for rows that wait to be counted (8 MiB by default), 24 to 48 for bins, and up to 96 more
    after merging or changes of the distribution; less with fewer rows. Not thread-safe.

    Args:
        bins: number of bins.
    """

    def __init__(self, bins: int = 1 << 17) -> None:
        if not 2 <= bins <= 1 << 24:
            raise ConfigError(f"Invalid AUC.bins = {bins}; expected a number from 2 to 2^24.", field="AUC.bins")
        self.bins = bins
        self._logits = np.empty(0, np.float32)
        self._labels = np.empty(0, np.float32)
        self._weights: Floats | None = None
        """Weights of the buffered rows; None until a row has one other than 1."""
        self._filled = 0
        self._clear()

    def _clear(self) -> None:
        self._counted = Bins(self.bins)
        self._negatives, self._positives = _Waiting(), _Waiting()
        self._waiting = 0
        """Number of waiting rows. A row with a label between 0 and 1 waits in both classes."""
        self._complete: Bins | None = None
        """`_counted` with the waiting rows, if computed."""

    def update(self, logits: ArrayLike, labels: ArrayLike, weights: ArrayLike | None = None) -> None:
        """Adds rows.

        Args:
            logits: `[rows]`, finite.
            labels: `[rows]`, each in [0, 1].
            weights: `[rows]`, from 0 on; a row of weight 2 counts as two rows. None weighs each 1.

        Raises:
            DataError: an argument is invalid; nothing has been added.
        """
        x, y = column(logits, "logits"), column(labels, "labels")
        check(x, y)
        w = check_weights(weights, len(x))
        if w is not None and self._weights is None:
            self._weights = np.ones(BLOCK, np.float32)
        if len(self._logits) == 0:
            self._logits, self._labels = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
        start = 0
        while start < len(x):
            take = min(BLOCK - self._filled, len(x) - start)
            self._logits[self._filled : self._filled + take] = x[start : start + take]
            self._labels[self._filled : self._filled + take] = y[start : start + take]
            if self._weights is not None:
                self._weights[self._filled : self._filled + take] = 1 if w is None else w[start : start + take]
            self._filled += take
            start += take
            if self._filled == BLOCK:
                self._flush()

    def _flush(self) -> None:
        if self._filled:
            weights = None if self._weights is None else self._weights[: self._filled]
            self.add(self._logits[: self._filled], self._labels[: self._filled], weights)
            self._filled = 0

    def add(self, logits: Floats, labels: Floats, weights: Floats | None = None) -> None:
        """Adds copies of rows without checks or buffering, for callers that have done both."""
        while len(logits):  # In chunks, so that results do not depend on the sizes of batches.
            chunk = max(1, WAITING * self.bins - self._waiting)
            self._wait(logits[:chunk], labels[:chunk], None if weights is None else weights[:chunk])
            self._waiting += min(chunk, len(logits))
            logits, labels = logits[chunk:], labels[chunk:]
            weights = None if weights is None else weights[chunk:]
            self._count()

    def _wait(self, logits: Floats, labels: Floats, weights: Floats | None) -> None:
        if weights is not None:
            positive_weights = labels.astype(np.float64) * weights
            for side, shares in (
                (self._negatives, weights - positive_weights),
                (self._positives, positive_weights),
            ):
                side.add(logits[shares > 0], shares[shares > 0])
            return
        negative, positive = np.flatnonzero(labels == 0), np.flatnonzero(labels == 1)  # `take` is faster than a mask.
        if len(negative) + len(positive) == len(labels):
            self._negatives.add(logits.take(negative))
            self._positives.add(logits.take(positive))
        else:
            shares = labels.astype(np.float64)
            self._negatives.add(logits[labels < 1], 1 - shares[labels < 1])
            self._positives.add(logits[labels > 0], shares[labels > 0])

    def _count(self) -> None:
        """Counts the waiting rows once there are enough of them."""
        self._complete = None
        if self._waiting >= WAITING * self.bins:
            self.settle()

    def settle(self) -> None:
        """Counts the waiting rows if they take more memory than their bins. For when no more rows are expected soon."""
        if self._waiting > BYTES_PER_BIN // 4 * self.bins:
            self._counted, self._waiting = self._binned(), 0
            self._negatives, self._positives, self._complete = _Waiting(), _Waiting(), None

    def _all(self) -> Bins:
        """Returns the bins of all rows."""
        self._flush()
        return self._binned()

    def _binned(self) -> Bins:
        """Returns the bins of all rows except buffered ones. Does not change which rows wait."""
        if self._complete is None:
            self._complete = self._counted.added(self._negatives.sorted(), self._positives.sorted())
        return self._complete

    def histogram(self) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """Returns the centers of all bins, ascending, and the weight of negatives and of positives in each."""
        cells = self._all().all_cells()
        return (cells.low.astype(np.float64) + cells.high) / 2, cells.negatives, cells.positives

    def result(self) -> float:
        """Returns the AUC; nan while there are rows of one class only."""
        return self._all().area()

    def reliability(self, groups: int = 20) -> list[tuple[float, float, float]]:
        """Returns mean prediction, mean label and number of rows for each of `groups` groups of about equal size.

        Groups are in ascending order of predictions; bins of equal predictions are not divided.
        """
        centers, negative, positive = self.histogram()
        rows = negative + positive
        if not len(rows):
            return []
        middle = (np.cumsum(rows) - rows / 2) / rows.sum()
        group = np.minimum((middle * groups).astype(np.intp), groups - 1)
        sums = [np.bincount(group, weights, groups) for weights in (sigmoid(centers) * rows, positive, rows)]
        return [(float(p / n), float(y / n), float(n)) for p, y, n in zip(*sums, strict=True) if n]

    def bound(self) -> float:
        """Returns the maximum error due to binning: half the fraction of pairs whose order is unknown."""
        return self._all().bound()

    def merge(self, other: AUC) -> None:
        """Adds the rows of another AUC with the same number of bins, which is not modified."""
        if other.bins != self.bins:
            raise ConfigError(
                f"Cannot merge an AUC of {other.bins} bins into one of {self.bins}; use the same number of bins.",
                field="AUC.bins",
            )
        self._flush()
        other._flush()
        if len(other._counted.cells.low):
            self._counted = self._counted.united(other._counted)
        self._negatives.extend(other._negatives)
        self._positives.extend(other._positives)
        self._waiting += other._waiting
        self._count()

    def copy(self) -> AUC:
        """Returns another AUC with the same rows."""
        self._flush()
        other = AUC(self.bins)
        other._counted, other._complete = self._counted, self._complete
        other._negatives.extend(self._negatives)
        other._positives.extend(self._positives)
        other._waiting = self._waiting
        return other

    def state_dict(self) -> State:
        """Returns the bins and the waiting rows."""
        self._flush()
        state: State = {"bins": self.bins, "waiting": self._waiting}
        for name, cells in zip(KINDS, (self._counted.cells, self._counted.loose), strict=True):
            state |= {f"{name}_{field}": value for field, value in zip(Cells._fields, cells, strict=True)}
        for name, waiting in (("negatives", self._negatives), ("positives", self._positives)):
            state[name], state[f"{name}_weights"] = waiting.joined()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replaces the counts by the counts of a state."""
        self._filled = 0
        self.bins = int(state["bins"])
        self._clear()
        cells, loose = (
            Cells(*(np.asarray(state[f"{name}_{f}"]) for f in Cells._fields)) for name in ("cells", "loose")
        )
        self._counted = Bins(self.bins, cells, loose)
        self._waiting = int(state["waiting"])
        for name, waiting in (("negatives", self._negatives), ("positives", self._positives)):
            weights = np.asarray(state[f"{name}_weights"])
            waiting.add(np.asarray(state[name]), weights if len(weights) else None)


class _Waiting:
    """Rows of one class that have no bins yet."""

    def __init__(self) -> None:
        self._pieces: list[Floats] = []
        self._weights: list[NDArray[np.float64] | None] = []

    def add(self, logits: Floats, weights: NDArray[np.float64] | None = None) -> None:
        """Adds rows, whose arrays must not change afterwards. Without weights each row weighs 1."""
        if not len(logits):
            return
        self._pieces.append(logits)
        self._weights.append(weights)
        if len(self._pieces) >= MOST_PIECES:
            logits, weights = self.joined()
            self._pieces, self._weights = [logits], [weights if len(weights) else None]

    def extend(self, other: _Waiting) -> None:
        """Adds the rows of another object."""
        self._pieces += other._pieces
        self._weights += other._weights

    def joined(self) -> tuple[Floats, NDArray[np.float64]]:
        """Returns the logits in order of arrival, and their weights; empty weights if each is 1."""
        if not self._pieces:
            return np.empty(0, np.float32), np.empty(0)
        logits = np.concatenate(self._pieces)
        if all(weights is None for weights in self._weights):
            return logits, np.empty(0)
        pairs = zip(self._pieces, self._weights, strict=True)
        return logits, np.concatenate([np.ones(len(x)) if weights is None else weights for x, weights in pairs])

    def sorted(self) -> SortedRows:
        """Returns the rows sorted by logit."""
        logits, weights = self.joined()
        return sorted_rows(logits, weights if len(weights) else None)
