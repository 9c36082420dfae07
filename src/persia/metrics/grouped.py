"""AUC within groups, recall@k and NDCG@k: how well each user's samples are ranked among themselves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from persia.errors import DataError
from persia.metrics.checks import State, check, check_cutoffs, check_weights, column
from persia.types import Floats, Int64Array

__all__ = ["GroupedFigures", "GroupedMetrics"]

Doubles = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class GroupedFigures:
    """Ranking quality of samples within their groups, such as the users of a feature.

    Attributes:
        groups: number of groups.
        rows: number of rows.
        auc: GAUC, the mean AUC of groups, weighted by their rows (Deep Interest Network, KDD'18, section 6.2). Groups
            with only one class have no AUC and do not count. nan of labels that are no classes.
        recall: by k, the share of a group's positives among its k highest logits; mean over groups with a positive.
            nan of labels that are no classes.
        ndcg: by k, NDCG@k with labels as gains (Jarvelin and Kekalainen, TOIS 2002); mean over groups with a positive.
            nan if a label is negative.
    """

    groups: int
    rows: int
    auc: float
    recall: Mapping[int, float]
    ndcg: Mapping[int, float]


class GroupedMetrics:
    """GAUC, recall@k and NDCG@k of one label, exact.

    Rows of a group may come in any order and in several batches. Rows with equal logits share their ranks: the result
    is the mean over all their orders. A label between 0 and 1 counts as that fraction of a positive and the rest of a
    negative.

    With weights, a pair of rows counts by the product of theirs in the AUC of a group, and a group by the sum of its
    weights. Recall and NDCG of a group use its labels alone; a group counts by the mean of its weights, as with
    `sample_weight` of scikit-learn's `ndcg_score`.

    Memory: 16 bytes per row, 20 with weights, as a group is complete only at the end. Use it for evaluations. Not
    thread-safe.

    Args:
        at: values of k, each 1 or more.
        binary: False for labels that are gains of any size, such as ratings: then there is NDCG alone.

    Raises:
        ConfigError: a k is less than 1 or not an integer, or `at` is empty.
    """

    def __init__(self, at: Sequence[int] = (10,), *, binary: bool = True) -> None:
        self.at = check_cutoffs("GroupedMetrics.at", at)
        self.binary = binary
        self._groups: list[NDArray[np.uint64]] = []
        self._logits: list[Floats] = []
        self._labels: list[Floats] = []
        self._weights: list[Floats | None] = []
        """Weights of each piece of rows; None if all weigh 1."""

    def update(self, groups: ArrayLike, logits: ArrayLike, labels: ArrayLike, weights: ArrayLike | None = None) -> None:
        """Adds rows.

        Args:
            groups: integers `[rows]`, such as the ids of a feature with one id per sample.
            logits: `[rows]`, finite.
            labels: `[rows]`, each in [0, 1]; finite if they are gains.
            weights: `[rows]`, from 0 on; None weighs each row 1.

        Raises:
            DataError: an argument is invalid; nothing has been added.
        """
        x, y, ids = column(logits, "logits"), column(labels, "labels"), np.asarray(groups)
        check(x, y if self.binary else np.where(np.isfinite(y), np.float32(0), y))
        w = check_weights(weights, len(x))
        if ids.dtype.kind not in "iu" or ids.shape != x.shape:
            raise DataError(
                f"groups have dtype {ids.dtype} and shape {ids.shape}; pass one integer for each of {len(x)} rows.",
                field="groups",
            )
        self._groups.append(ids.astype(np.uint64))
        self._logits.append(x.copy())
        self._labels.append(y.copy())
        self._weights.append(None if w is None else w.copy())

    def result(self) -> GroupedFigures:
        """Returns the metrics so far. Takes about 1 s per million rows."""
        unsorted, logits, labels, weights = self._rows()
        undefined = dict.fromkeys(self.at, math.nan)
        if not len(unsorted):
            return GroupedFigures(0, 0, math.nan, undefined, undefined)
        order = np.lexsort((-logits, unsorted))
        groups, logits = unsorted[order], logits[order]
        starts = _starts(groups)
        sizes = np.diff(starts, append=len(groups))
        ranked = _Ranked(labels[order].astype(np.float64), logits, starts, sizes)
        positives = np.add.reduceat(ranked.labels, starts)
        best = labels[np.lexsort((-labels, unsorted))].astype(np.float64)  # Groups are in the same positions.
        totals = sizes if weights is None else np.add.reduceat(weights[order].astype(np.float64), starts)
        shares = None if weights is None else totals / sizes
        recall, ndcg = dict(undefined), dict(undefined)
        for k in self.at if self.binary or labels.min() >= 0 else ():
            top = (ranked.position < k).astype(np.float64)
            if self.binary:
                recall[k] = _mean_share(ranked.gain(top), positives, shares)
            discount = top / np.log2(ranked.position + 2.0)
            ndcg[k] = _mean_share(ranked.gain(discount), np.add.reduceat(best * discount, starts), shares)
        if weights is not None:
            ranked = _Ranked(ranked.labels, logits, starts, sizes, weights[order].astype(np.float64))
            positives = np.add.reduceat(ranked.labels, starts)
        pairs = positives * (totals - positives)
        known = pairs > 0
        auc = math.nan
        if self.binary and known.any():
            areas = ranked.ordered_pairs()[known] / pairs[known]
            auc = float(np.average(areas, weights=totals[known]))
        return GroupedFigures(len(starts), len(groups), auc, recall, ndcg)

    def merge(self, other: GroupedMetrics) -> None:
        """Adds the rows of another GroupedMetrics, which is not modified."""
        self._groups += other._groups
        self._logits += other._logits
        self._labels += other._labels
        self._weights += other._weights

    def state_dict(self) -> State:
        """Returns all rows."""
        groups, logits, labels, weights = self._rows()
        state = {"groups": groups, "logits": logits, "labels": labels}
        return state if weights is None else {**state, "weights": weights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replaces the rows by the rows of a state."""
        self._groups = [np.asarray(state["groups"], np.uint64)]
        self._logits = [np.asarray(state["logits"], np.float32)]
        self._labels = [np.asarray(state["labels"], np.float32)]
        self._weights = [np.asarray(state["weights"], np.float32) if "weights" in state else None]

    def _rows(self) -> tuple[NDArray[np.uint64], Floats, Floats, Floats | None]:
        """Joins the rows so far."""
        if len(self._groups) != 1:
            if any(weights is not None for weights in self._weights):
                pairs = zip(self._weights, self._labels, strict=True)
                parts = [np.ones(len(rows), np.float32) if w is None else w for w, rows in pairs]
                self._weights = [np.concatenate(parts)]
            else:
                self._weights = [None]
            self._groups = [np.concatenate(self._groups) if self._groups else np.empty(0, np.uint64)]
            self._logits = [np.concatenate(self._logits) if self._logits else np.empty(0, np.float32)]
            self._labels = [np.concatenate(self._labels) if self._labels else np.empty(0, np.float32)]
        return self._groups[0], self._logits[0], self._labels[0], self._weights[0]


class _Ranked:
    """Rows by group, highest logit first. Sums are over blocks: rows of a group with equal logits.

    Args:
        labels: labels of the rows.
        logits: logits of the rows.
        starts: first row of each group.
        sizes: number of rows of each group.
        weights: weights of the rows, by which labels and rows are multiplied; None weighs each 1.
    """

    def __init__(
        self,
        labels: Doubles,
        logits: Floats,
        starts: Int64Array,
        sizes: Int64Array,
        weights: Doubles | None = None,
    ) -> None:
        self.labels = labels if weights is None else labels * weights
        first = np.repeat(starts, sizes)
        self.position: Int64Array = np.arange(len(labels)) - first
        new = np.empty(len(labels), bool)
        new[0] = True
        new[1:] = (logits[1:] != logits[:-1]) | (first[1:] != first[:-1])
        self._blocks = np.flatnonzero(new)
        self._rows = (
            np.diff(self._blocks, append=len(labels)) if weights is None else np.add.reduceat(weights, self._blocks)
        )
        self._positive = np.add.reduceat(self.labels, self._blocks)
        self._of_group = np.searchsorted(self._blocks, starts)  # Each group begins with a block.

    def gain(self, weights: Doubles) -> Doubles:
        """Returns by group the sum of labels times the weights of their positions; equal logits share their weights."""
        shared = np.add.reduceat(weights, self._blocks) / self._rows
        total: Doubles = np.add.reduceat(shared * self._positive, self._of_group)
        return total

    def ordered_pairs(self) -> Doubles:
        """Returns by group the number of pairs with the positive above the negative; a tie counts as half a pair."""
        negative = self._rows - self._positive
        above = np.cumsum(negative)  # Over all groups so far, including this block.
        groups = np.diff(self._of_group, append=len(negative))
        end = np.repeat(above[np.append(self._of_group[1:], len(negative)) - 1], groups)
        pairs: Doubles = np.add.reduceat(self._positive * (end - above + 0.5 * negative), self._of_group)
        return pairs


def _starts(groups: NDArray[np.uint64]) -> Int64Array:
    new = np.ones(len(groups), bool)
    new[1:] = groups[1:] != groups[:-1]
    return np.flatnonzero(new)


def _mean_share(parts: Doubles, wholes: Doubles, weights: Doubles | None) -> float:
    """Returns the weighted mean of parts / wholes over nonzero wholes; without weights each weighs 1."""
    known = wholes > 0
    if weights is not None:
        known &= weights > 0
    if not known.any():
        return math.nan
    shares = parts[known] / wholes[known]
    return float(shares.mean() if weights is None else np.average(shares, weights=weights[known]))
