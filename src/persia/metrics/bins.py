"""Bins of logits that divide where rows are, so that the area under the ROC curve has a small error that is known."""

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
"""Bins, over `limit`, from which they are grouped."""

MOST_LOOSE: Final = 4
"""Loose bins, over `limit`, from which they are grouped."""


class SortedRows(NamedTuple):
    """Rows of one class.

    Attributes:
        logits: ascending.
        before: weight of all rows before each one, and of all rows, `[rows + 1]`; None if each row weighs 1.
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
        """Returns some of the rows."""
        weights = None if self.before is None else self.before[rows + 1] - self.before[rows]
        return SortedRows(self.logits[rows], None if weights is None else _sums_before(weights))


def sorted_rows(logits: Floats, weights: Doubles | None = None) -> SortedRows:
    """Sorts rows. Without weights, each row weighs 1."""
    if weights is None:
        return SortedRows(np.sort(logits), None)
    order = np.argsort(logits, kind="stable")
    return SortedRows(logits[order], _sums_before(weights[order]))


class Cells(NamedTuple):
    """Intervals of logits with the rows in them.

    Attributes:
        low: smallest logit of each.
        high: largest logit of each.
        negatives: weight of its negatives.
        positives: weight of its positives.
    """

    low: Floats
    high: Floats
    negatives: Doubles
    positives: Doubles

    @property
    def points(self) -> NDArray[np.bool_]:
        """Which of them have rows of one logit only."""
        found: NDArray[np.bool_] = self.low == self.high
        return found

    def at(self, which: NDArray[np.bool_] | Indices) -> Cells:
        """Returns those of a mask, or of indices."""
        of = np.flatnonzero(which) if which.dtype == np.bool_ else which
        return Cells(self.low.take(of), self.high.take(of), self.negatives.take(of), self.positives.take(of))

    def shares(self, totals: tuple[float, float]) -> Doubles:
        """Returns the share of each: the mean over both classes, 0 of a class without rows."""
        negatives, positives = (0.5 / total if total else 0.0 for total in totals)
        return self.negatives * negatives + self.positives * positives

    def grouped(self, limit: int, totals: tuple[float, float]) -> Cells:
        """Groups neighbours to about `limit` cells of equal shares, each below 2 / limit; larger cells stay alone."""
        shares = self.shares(totals)
        target = ((np.cumsum(shares) - shares / 2) * limit).astype(np.int64)
        large = shares >= 2 / limit
        firsts = np.flatnonzero(np.append(True, (target[1:] != target[:-1]) | large[1:] | large[:-1]))
        low, high = np.minimum.reduceat(self.low, firsts), np.maximum.reduceat(self.high, firsts)
        return Cells(low, high, np.add.reduceat(self.negatives, firsts), np.add.reduceat(self.positives, firsts))


NO_CELLS: Final = Cells(np.empty(0, np.float32), np.empty(0, np.float32), np.empty(0), np.empty(0))


class Bins(NamedTuple):
    """A histogram of the logits of both classes. Immutable.

    While at most `2 * limit` logits differ, each has a bin: all is exact. From then on each bin has a share of about
    1 / limit of the rows, where a share is the mean of those of the negatives and of the positives. A bin reaches from
    its smallest logit to that of the next bin. New rows are counted in their bins, but for a bin whose share would
    exceed FULL / limit: its older rows become a loose bin, which gets no more rows, and its new rows bins of their own.
    So bins follow the logits wherever they move.

    The order of two rows is unknown only if the intervals of their bins overlap. Such a pair counts half, so half of
    the share of these pairs bounds the error. Without loose bins that is at most half of FULL / limit: if a bin has the
    shares a of the positives and b of the negatives, the sum of a * b is at most that of ((a + b) / 2)^2, and so at
    most the largest share.

    Attributes:
        limit: see above.
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
        """Returns bins that have these rows, too."""
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
        """Returns bins that have the rows of both, with the limit of these."""
        first, second = (self, other) if other._exact or sum(self.totals) >= sum(other.totals) else (other, self)
        points = second.cells.points
        kept = first._replace(limit=self.limit)._with(first.cells, second.cells.at(~points), second.loose)
        single = second.cells.at(points)
        return kept.added(
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
        """Returns all bins, and for each one the negatives in bins below it, and those in bins that overlap it."""
        if not len(self.loose.low):
            return self.cells, np.cumsum(self.cells.negatives) - self.cells.negatives, self.cells.negatives
        cells = _joined(self.cells, self.loose)
        by_high, by_low = np.argsort(cells.high, kind="stable"), np.argsort(cells.low, kind="stable")
        ended, begun = _sums_before(cells.negatives[by_high]), _sums_before(cells.negatives[by_low])
        below = ended[np.searchsorted(cells.high[by_high], cells.low, "left")]
        return cells, below, begun[np.searchsorted(cells.low[by_low], cells.high, "right")] - below

    @property
    def _exact(self) -> bool:
        return not len(self.loose.low) and bool(self.cells.points.all())

    def _with(self, cells: Cells, *loose: Cells) -> Bins:
        """Returns these bins in place of its own, and more loose ones; grouped if there are too many."""
        found = Bins(self.limit, cells, _joined(self.loose, *loose))
        if len(found.loose.low) > MOST_LOOSE * self.limit:
            found = found._replace(loose=_by_center(found.loose).grouped(self.limit, found.totals))
        if len(cells.low) > MOST_CELLS * self.limit:
            found = found._replace(cells=cells.grouped(self.limit, found.totals))
        return found


def _counted(cells: Cells, negatives: SortedRows, positives: SortedRows) -> tuple[Cells, list[Indices]]:
    """Counts all rows in disjoint cells; also returns where in each class the rows of each cell begin, and the end."""
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
    """Returns empty cells, of which each will have a share below 2 / limit, or one logit."""
    edges = []
    for side in (negatives, positives):
        some = side.logits[:: max(1, math.ceil(2 * len(side.logits) / limit))]
        frequent = some[1:][some[1:] == some[:-1]]
        edges += [some, np.nextafter(frequent, np.float32(np.inf))]
    low = np.unique(np.concatenate(edges))
    return Cells(low, np.full(len(low), -np.inf, np.float32), np.zeros(len(low)), np.zeros(len(low)))


def _distinct(side: SortedRows) -> int:
    """Returns how many logits differ."""
    return int(np.count_nonzero(side.logits[1:] != side.logits[:-1])) + bool(len(side.logits))


def _points(negatives: SortedRows, positives: SortedRows, others: Cells) -> Cells:
    """Returns a cell for each logit of negatives, of positives, and of other such cells."""
    parts = [others]
    for side in (negatives, positives):
        firsts = _firsts(side.logits)
        logits, weights = side.logits[firsts], side.between(np.append(firsts, len(side.logits)))
        none = np.zeros(len(firsts))
        parts.append(Cells(logits, logits, *((weights, none) if side is negatives else (none, weights))))
    found = _ascending(*parts)
    firsts = _firsts(found.low)
    if len(firsts) == len(found.low):
        return found
    low = found.low[firsts]
    return Cells(low, low, np.add.reduceat(found.negatives, firsts), np.add.reduceat(found.positives, firsts))


def _firsts(values: Floats) -> Indices:
    """Returns where each value of a sorted array occurs first."""
    return np.flatnonzero(np.append(True, values[1:] != values[:-1])[: len(values)])


def _ranges(starts: Indices, stops: Indices) -> Indices:
    """Returns all numbers from each start up to its stop."""
    lengths = stops - starts
    found: Indices = np.arange(lengths.sum()) + np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
    return found


def _sums_before(weights: Doubles) -> Doubles:
    """Returns the sum of the weights before each one, and of all."""
    return np.concatenate(([0.0], np.cumsum(weights)))


def _joined(*parts: Cells) -> Cells:
    used = [part for part in parts if len(part.low)] or [NO_CELLS]
    return used[0] if len(used) == 1 else Cells(*(np.concatenate(column) for column in zip(*used, strict=True)))


def _ascending(*parts: Cells) -> Cells:
    """Joins sorted cells."""
    found = _joined(*parts)
    return found.at(np.argsort(found.low, kind="stable"))  # Merges runs that are sorted.


def _by_center(cells: Cells) -> Cells:
    return cells.at(np.argsort(cells.low.astype(np.float64) + cells.high, kind="stable"))
