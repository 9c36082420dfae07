"""AUC within groups, recall@k and NDCG@k: how well each user's samples are ranked among themselves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from persia.checks import check_integer
from persia.errors import ConfigError, DataError
from persia.metrics.checks import State, check, column
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
            with only one class have no AUC and do not count.
        recall: by k, the share of a group's positives among its k highest logits; mean over groups with a positive.
        ndcg: by k, NDCG@k with labels as gains; mean over groups with a positive.
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

    Memory: 16 bytes per row, as a group is complete only at the end. Use it for evaluations. Not thread-safe.

    Args:
        at: values of k, each 1 or more.

    Raises:
        ConfigError: a k is less than 1 or not an integer, or `at` is empty.
    """

    def __init__(self, at: Sequence[int] = (10,)) -> None:
        if isinstance(at, (str, int)) or not at:
            raise ConfigError(f"Invalid GroupedMetrics.at = {at!r}; expected a list of numbers.", field="at")
        for k in at:
            check_integer("GroupedMetrics.at", k, 1)
        self.at = tuple(dict.fromkeys(int(k) for k in at))
        self._groups: list[NDArray[np.uint64]] = []
        self._logits: list[Floats] = []
        self._labels: list[Floats] = []

    def update(self, groups: ArrayLike, logits: ArrayLike, labels: ArrayLike) -> None:
        """Adds rows.

        Args:
            groups: integers `[rows]`, such as the ids of a feature with one id per sample.
            logits: `[rows]`, finite.
            labels: `[rows]`, each in [0, 1].

        Raises:
            DataError: an argument is invalid; nothing has been added.
        """
        x, y, ids = column(logits, "logits"), column(labels, "labels"), np.asarray(groups)
        check(x, y)
        if ids.dtype.kind not in "iu" or ids.shape != x.shape:
            raise DataError(
                f"groups have dtype {ids.dtype} and shape {ids.shape}; pass one integer for each of {len(x)} rows.",
                field="groups",
            )
        self._groups.append(ids.astype(np.uint64))
        self._logits.append(x.copy())
        self._labels.append(y.copy())

    def result(self) -> GroupedFigures:
        """Returns the metrics so far. Takes about 1 s per million rows."""
        unsorted, logits, labels = self._rows()
        if not len(unsorted):
            return GroupedFigures(0, 0, math.nan, dict.fromkeys(self.at, math.nan), dict.fromkeys(self.at, math.nan))
        order = np.lexsort((-logits, unsorted))
        groups, logits = unsorted[order], logits[order]
        starts = _starts(groups)
        sizes = np.diff(starts, append=len(groups))
        ranked = _Ranked(labels[order].astype(np.float64), logits, starts, sizes)
        positives = np.add.reduceat(ranked.labels, starts)
        best = labels[np.lexsort((-labels, unsorted))].astype(np.float64)  # Groups are in the same positions.
        recall, ndcg = {}, {}
        for k in self.at:
            top = (ranked.position < k).astype(np.float64)
            recall[k] = _mean_share(ranked.gain(top), positives)
            discount = top / np.log2(ranked.position + 2.0)
            ndcg[k] = _mean_share(ranked.gain(discount), np.add.reduceat(best * discount, starts))
        pairs = positives * (sizes - positives)
        known = pairs > 0
        auc = math.nan
        if known.any():
            areas = ranked.ordered_pairs()[known] / pairs[known]
            auc = float(np.average(areas, weights=sizes[known]))
        return GroupedFigures(len(starts), len(groups), auc, recall, ndcg)

    def merge(self, other: GroupedMetrics) -> None:
        """Adds the rows of another GroupedMetrics, which is not modified."""
        self._groups += other._groups
        self._logits += other._logits
        self._labels += other._labels

    def state_dict(self) -> State:
        """Returns all rows."""
        groups, logits, labels = self._rows()
        return {"groups": groups, "logits": logits, "labels": labels}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replaces the rows by the rows of a state."""
        self._groups = [np.asarray(state["groups"], np.uint64)]
        self._logits = [np.asarray(state["logits"], np.float32)]
        self._labels = [np.asarray(state["labels"], np.float32)]

    def _rows(self) -> tuple[NDArray[np.uint64], Floats, Floats]:
        """Joins the rows so far."""
        if len(self._groups) != 1:
            self._groups = [np.concatenate(self._groups) if self._groups else np.empty(0, np.uint64)]
            self._logits = [np.concatenate(self._logits) if self._logits else np.empty(0, np.float32)]
            self._labels = [np.concatenate(self._labels) if self._labels else np.empty(0, np.float32)]
        return self._groups[0], self._logits[0], self._labels[0]


class _Ranked:
    """Rows by group, highest logit first. Sums are over blocks: rows of a group with equal logits.

    Args:
        labels: labels of the rows.
        logits: logits of the rows.
        starts: first row of each group.
        sizes: number of rows of each group.
    """

    def __init__(self, labels: Doubles, logits: Floats, starts: Int64Array, sizes: Int64Array) -> None:
        self.labels = labels
        first = np.repeat(starts, sizes)
        self.position: Int64Array = np.arange(len(labels)) - first
        new = np.empty(len(labels), bool)
        new[0] = True
        new[1:] = (logits[1:] != logits[:-1]) | (first[1:] != first[:-1])
        self._blocks = np.flatnonzero(new)
        self._rows = np.diff(self._blocks, append=len(labels))
        self._positive = np.add.reduceat(labels, self._blocks)
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


def _mean_share(parts: Doubles, wholes: Doubles) -> float:
    """Returns the mean of parts / wholes over nonzero wholes."""
    known = wholes > 0
    return float((parts[known] / wholes[known]).mean()) if known.any() else math.nan
