"""Adaptive bins of logits: they divide where rows are, which bounds the error of the area under the ROC curve."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from persia.types import Floats

__all__ = ["Bins", "Cells", "SortedRows", "sorted_rows"]

Doubles = NDArray[np.float64]
Indices = NDArray[np.intp]

FULL: Final = 2.5
"""A bin whose share of rows is larger than FULL / limit is divided."""

MOST_CELLS: Final = 2
"""Maximum number of bins, as a multiple of `limit`; beyond it neighbors are grouped."""

MOST_LOOSE: Final = 4
"""Maximum number of loose bins, as a multiple of `limit`; beyond it neighbors are grouped."""


class SortedRows(NamedTuple):
    """Rows of one class.

    Attributes:
        logits: ascending.
        before: total weight before each row, and last the weight of all rows, `[rows + 1]`; None if each row weighs 1.
    """

    logits: Floats
    before: Doubles | None

    @property
    def total(self) -> float:
        """The weight of all rows."""
        return float(len(self.logits) if self.before is None else self.before[-1])

    def between(self, ends: Indices) -> Doubles:
        """Returns the weights of rows from each position up to the next one."""
        return np.diff(ends.astype(np.float64) if self.before is None else self.before[ends])

    def at(self, rows: Indices) -> SortedRows:
        """Returns the rows at these positions."""
        weights = None if self.before is None else self.before[rows + 1] - self.before[rows]
        return SortedRows(self.logits[rows], None if weights is None else _sums_before(weights))


def sorted_rows(logits: Floats, weights: Doubles | None = None) -> SortedRows:
    """Sorts rows. Without weights, each row weighs 1."""
    if weights is None:
        return SortedRows(np.sort(logits), None)
    order = np.argsort(logits, kind="stable")
    return SortedRows(logits[order], _sums_before(weights[order]))


class Cells(NamedTuple):
    """Intervals of logits with the weights of their rows.

    Attributes:
        low: smallest logit of each cell.
        high: largest logit of each cell.
        negatives: weight of the negatives of each cell.
        positives: weight of the positives of each cell.
    """

    low: Floats
    high: Floats
    negatives: Doubles
    positives: Doubles

    @property
    def points(self) -> NDArray[np.bool_]:
        """Mask of the cells whose rows all have the same logit."""
        single_logit: NDArray[np.bool_] = self.low == self.high
        return single_logit

    def at(self, which: NDArray[np.bool_] | Indices) -> Cells:
        """Returns the cells of a mask, or of indices."""
        index = np.flatnonzero(which) if which.dtype == np.bool_ else which
        return Cells(
            self.low.take(index), self.high.take(index), self.negatives.take(index), self.positives.take(index)
        )

    def shares(self, totals: tuple[float, float]) -> Doubles:
        """Returns the share of each cell: the mean over both classes; a class without rows counts as 0."""
        negatives, positives = (0.5 / total if total else 0.0 for total in totals)
        return self.negatives * negatives + self.positives * positives

    def grouped(self, limit: int, totals: tuple[float, float]) -> Cells:
        """Groups neighbors into about `limit` cells of equal shares, each below 2 / limit. Larger cells stay single."""
        shares = self.shares(totals)
        target = ((np.cumsum(shares) - shares / 2) * limit).astype(np.int64)
        large = shares >= 2 / limit
        firsts = np.flatnonzero(np.append(True, (target[1:] != target[:-1]) | large[1:] | large[:-1]))
        low, high = np.minimum.reduceat(self.low, firsts), np.maximum.reduceat(self.high, firsts)
        return Cells(low, high, np.add.reduceat(self.negatives, firsts), np.add.reduceat(self.positives, firsts))


NO_CELLS: Final = Cells(np.empty(0, np.float32), np.empty(0, np.float32), np.empty(0), np.empty(0))


class Bins(NamedTuple):
    """A histogram of the logits of both classes. Immutable.

    Each logit has its own bin while at most `2 * limit` logits differ, so results are exact. Beyond that, each bin has
    a share of about 1 / limit of the rows, where a share is the mean of the share of the negatives and the share of
    the positives. A bin reaches from its smallest logit to the smallest logit of the next bin. New rows are counted in
    their bins, unless the share of a bin would exceed FULL / limit: then its older rows become a loose bin, which gets
    no more rows, and its new rows get their own bins. Bins therefore follow the logits when these move.

    The order of two rows is unknown only if the intervals of their bins overlap. Such a pair counts half, so half of
    the share of these pairs bounds the error. Without loose bins the bound is at most half of FULL / limit: if a bin
    has the shares a of the positives and b of the negatives, the sum of a * b is at most the sum of ((a + b) / 2)^2,
    and so at most the largest share.

    Attributes:
        limit: approximate number of bins; see above.
        cells: the bins, in ascending order; disjoint.
        loose: bins that get no more rows, in any order. They overlap each other and `cells`.
    """

    limit: int
    cells: Cells = NO_CELLS
    loose: Cells = NO_CELLS

    @property
    def totals(self) -> tuple[float, float]:
        """Weight of all negatives and of all positives."""
        parts = self.cells, self.loose
        return sum(float(p.negatives.sum()) for p in parts), sum(float(p.positives.sum()) for p in parts)

    def added(self, negatives: SortedRows, positives: SortedRows) -> Bins:
        """Returns bins that also contain these rows."""
        if not len(negatives.logits) + len(positives.logits):
            return self
        most = MOST_CELLS * self.limit
        if self._exact and len(self.cells.low) <= most and _distinct(negatives) <= most >= _distinct(positives):
            return self._with(_points(negatives, positives, self.cells))
        if not len(self.cells.low):
            cells, _ = _counted(_quantiles(negatives, positives, self.limit), negatives, positives)
            return self._with(cells.at(cells.negatives + cells.positives > 0))
        cells, ends = _counted(self.cells, negatives, positives)
        own = self.totals
        shares = cells.shares((own[0] + negatives.total, own[1] + positives.total))
        new = sum(np.diff(end) for end in ends) > 0
        divided = np.flatnonzero((cells.low < cells.high) & new & (shares > FULL / self.limit))
        if not len(divided):
            return self._replace(cells=cells)
        rows = [
            side.at(_ranges(end[divided], end[divided + 1]))
            for side, end in zip((negatives, positives), ends, strict=True)
        ]
        old = self.cells.at(divided)
        fresh = _points(rows[0], rows[1], old.at(old.points))
        others = np.ones(len(cells.low), bool)
        others[divided] = False
        return self._with(_ascending(cells.at(others), fresh), old.at(~old.points))

    def united(self, other: Bins) -> Bins:
        """Returns bins with the rows of both and the limit of `self`."""
        first, second = (self, other) if other._exact or sum(self.totals) >= sum(other.totals) else (other, self)
        points = second.cells.points
        union = first._replace(limit=self.limit)._with(first.cells, second.cells.at(~points), second.loose)
        single = second.cells.at(points)
        return union.added(
            SortedRows(single.low, _sums_before(single.negatives)),
            SortedRows(single.low, _sums_before(single.positives)),
        )

    def all_cells(self) -> Cells:
        """Returns all bins, in ascending order of their centers."""
        return self.cells if not len(self.loose.low) else _by_center(_joined(self.cells, self.loose))

    def area(self) -> float:
        """Returns the area under the ROC curve; nan while there are rows of one class only."""
        negatives, positives = self.totals
        if not negatives * positives:
            return math.nan
        cells, below, overlapping = self._pairs()
        return float((cells.positives * (below + overlapping / 2)).sum()) / (negatives * positives)

    def bound(self) -> float:
        """Returns the maximum error of `area`; nan while there are rows of one class only."""
        negatives, positives = self.totals
        if not negatives * positives:
            return math.nan
        cells, _, overlapping = self._pairs()
        unknown = np.where(cells.points, overlapping - cells.negatives, overlapping)
        return float((cells.positives * unknown).sum()) / (negatives * positives) / 2

    def _pairs(self) -> tuple[Cells, Doubles, Doubles]:
        """Returns all bins, and for each bin the weight of negatives in bins below it and in bins that overlap it."""
        if not len(self.loose.low):
            return self.cells, np.cumsum(self.cells.negatives) - self.cells.negatives, self.cells.negatives
        cells = _joined(self.cells, self.loose)
        by_high, by_low = np.argsort(cells.high, kind="stable"), np.argsort(cells.low, kind="stable")
        ended, started = _sums_before(cells.negatives[by_high]), _sums_before(cells.negatives[by_low])
        below = ended[np.searchsorted(cells.high[by_high], cells.low, "left")]
        return cells, below, started[np.searchsorted(cells.low[by_low], cells.high, "right")] - below

    @property
    def _exact(self) -> bool:
        return not len(self.loose.low) and bool(self.cells.points.all())

    def _with(self, cells: Cells, *loose: Cells) -> Bins:
        """Returns a copy with other cells and more loose bins. Groups neighbors if there are too many."""
        bins = Bins(self.limit, cells, _joined(self.loose, *loose))
        if len(bins.loose.low) > MOST_LOOSE * self.limit:
            bins = bins._replace(loose=_by_center(bins.loose).grouped(self.limit, bins.totals))
        if len(cells.low) > MOST_CELLS * self.limit:
            bins = bins._replace(cells=cells.grouped(self.limit, bins.totals))
        return bins


def _counted(cells: Cells, negatives: SortedRows, positives: SortedRows) -> tuple[Cells, list[Indices]]:
    """Counts rows in disjoint cells; also returns, by class, the first row of each cell, followed by the last end."""
    low, high, ends, weights = cells.low.copy(), cells.high.copy(), [], []
    for side in (negatives, positives):
        end = np.concatenate(([0], np.searchsorted(side.logits, cells.low[1:]), [len(side.logits)]))
        if len(side.logits):
            low[0] = min(low[0], side.logits[0])
            last = side.logits[np.maximum(end[1:] - 1, 0)]
            np.maximum(high, last, out=high, where=end[1:] > end[:-1])
        ends.append(end)
        weights.append(side.between(end))
    return Cells(low, high, cells.negatives + weights[0], cells.positives + weights[1]), ends


def _quantiles(negatives: SortedRows, positives: SortedRows, limit: int) -> Cells:
    """Returns empty cells, each of which will have a share below 2 / limit or a single logit."""
    edges = []
    for side in (negatives, positives):
        sample = side.logits[:: max(1, math.ceil(2 * len(side.logits) / limit))]
        frequent = sample[1:][sample[1:] == sample[:-1]]
        edges += [sample, np.nextafter(frequent, np.float32(np.inf))]
    low = np.unique(np.concatenate(edges))
    return Cells(low, np.full(len(low), -np.inf, np.float32), np.zeros(len(low)), np.zeros(len(low)))


def _distinct(side: SortedRows) -> int:
    """Returns the number of distinct logits."""
    return int(np.count_nonzero(side.logits[1:] != side.logits[:-1])) + bool(len(side.logits))


def _points(negatives: SortedRows, positives: SortedRows, others: Cells) -> Cells:
    """Returns a cell for each logit of the negatives, the positives, and other single-logit cells."""
    parts = [others]
    for side in (negatives, positives):
        firsts = _firsts(side.logits)
        logits, weights = side.logits[firsts], side.between(np.append(firsts, len(side.logits)))
        none = np.zeros(len(firsts))
        parts.append(Cells(logits, logits, *((weights, none) if side is negatives else (none, weights))))
    cells = _ascending(*parts)
    firsts = _firsts(cells.low)
    if len(firsts) == len(cells.low):
        return cells
    low = cells.low[firsts]
    return Cells(low, low, np.add.reduceat(cells.negatives, firsts), np.add.reduceat(cells.positives, firsts))


def _firsts(values: Floats) -> Indices:
    """Returns the position of the first occurrence of each value in a sorted array."""
    return np.flatnonzero(np.append(True, values[1:] != values[:-1])[: len(values)])


def _ranges(starts: Indices, stops: Indices) -> Indices:
    """Returns the numbers from each start up to its stop, concatenated."""
    lengths = stops - starts
    numbers: Indices = np.arange(lengths.sum()) + np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
    return numbers


def _sums_before(weights: Doubles) -> Doubles:
    """Returns the sum of the weights before each weight, and last the sum of all."""
    return np.concatenate(([0.0], np.cumsum(weights)))


def _joined(*parts: Cells) -> Cells:
    used = [part for part in parts if len(part.low)] or [NO_CELLS]
    return used[0] if len(used) == 1 else Cells(*(np.concatenate(column) for column in zip(*used, strict=True)))


def _ascending(*parts: Cells) -> Cells:
    """Joins sorted cells."""
    cells = _joined(*parts)
    return cells.at(np.argsort(cells.low, kind="stable"))  # A stable sort merges sorted runs.


def _by_center(cells: Cells) -> Cells:
    return cells.at(np.argsort(cells.low.astype(np.float64) + cells.high, kind="stable"))
