"""Metrics of retrieval: at which rank among all items a model finds the item that the user chose."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import ArrayLike, NDArray

from persia.errors import ConfigError, DataError
from persia.metrics.checks import State, check_cutoffs, check_weights
from persia.types import Int64Array

__all__ = ["RetrievalFigures", "RetrievalMetrics"]

Doubles = NDArray[np.float64]

EXACT_HARMONICS = 1024
"""Number of harmonic numbers that are summed up; larger ones have an expansion that is exact to the last digits."""


@dataclass(frozen=True, slots=True)
class RetrievalFigures:
    """How high a model ranks the chosen item of each sample among all items; nan without samples.

    Items with equal scores share their ranks: a metric is the mean over all their orders, as in `GroupedFigures`. A
    chosen item that is not among the items counts as a miss: 0 in every metric.

    Attributes:
        rows: number of samples.
        items: number of items that compete.
        missing: number of samples whose item is not among them.
        hit_rate: by k, HR@k: the share of samples whose item is among the k highest scores. With one chosen item for
            each sample, it is also recall@k.
        ndcg: by k, NDCG@k: the mean of 1 / log2(1 + rank), 0 beyond k (Jarvelin and Kekalainen, TOIS 2002).
        mrr: mean of 1 / rank, without a cutoff (Voorhees, TREC-8, 1999).
        coverage: by k, the share of items that are among the k highest scores of any sample. Of equal scores, items
            with smaller ids are taken first.
    """

    rows: int
    items: int
    missing: int
    hit_rate: Mapping[int, float]
    ndcg: Mapping[int, float]
    mrr: float
    coverage: Mapping[int, float]

    def summary(self) -> str:
        """Returns HR and NDCG by k, and MRR, on one line."""
        by_k = [f"HR@{k} {self.hit_rate[k]:.4f}, NDCG@{k} {self.ndcg[k]:.4f}" for k in self.hit_rate]
        return ", ".join([*by_k, f"MRR {self.mrr:.4f}"])

    def value(self, metric: str) -> float:
        """Returns a metric by name: "hr@K", "ndcg@K", "mrr" or "coverage@K".

        Raises:
            ConfigError: there is no such metric.
        """
        values = {"mrr": self.mrr}
        for name, by_k in (("hr", self.hit_rate), ("ndcg", self.ndcg), ("coverage", self.coverage)):
            values |= {f"{name}@{k}": value for k, value in by_k.items()}
        if metric not in values:
            raise ConfigError(f"There is no metric {metric!r}; there are {', '.join(values)}.", field="metric")
        return values[metric]


class RetrievalMetrics:
    """Sums up ranks to `RetrievalFigures`. Not thread-safe.

    Memory: 1 byte for each item and k.

    Args:
        items: number of items that compete.
        at: values of k, each 1 or more.

    Raises:
        ConfigError: a k is less than 1 or not an integer, or `at` is empty.
    """

    def __init__(self, items: int, at: Sequence[int] = (10,)) -> None:
        self.at = check_cutoffs("RetrievalMetrics.at", at)
        self.items = items
        self._rows = self._missing = 0
        self._weight = self._reciprocal = 0.0
        self._hits, self._gains = np.zeros((2, len(self.at)))
        self._covered = np.zeros((len(self.at), items), np.bool_)
        most = max(self.at)
        self._discounts = np.r_[0.0, np.cumsum(1 / np.log2(np.arange(2.0, most + 2)))]
        """Sum of the discounts of the first n ranks, by n."""

    def update(self, above: ArrayLike, equal: ArrayLike, top: ArrayLike, weights: ArrayLike | None = None) -> None:
        """Adds samples.

        Args:
            above: number of items with a higher score than the chosen one, `[rows]`; -1 if that is not among the items.
            equal: number of other items with the same score, `[rows]`.
            top: positions of the items with the highest scores, highest first, `[rows, max(at) or more]`; -1 where
                there are no more.
            weights: `[rows]`, from 0 on; None weighs each row 1. Coverage has no weights.

        Raises:
            DataError: the arguments do not fit each other; nothing has been added.
        """
        first, others, best = (np.asarray(each, np.int64) for each in (above, equal, top))
        if first.ndim != 1 or others.shape != first.shape or best.ndim != 2 or len(best) != len(first):
            raise DataError(
                f"Ranks have shapes {list(first.shape)}, {list(others.shape)} and {list(best.shape)}; give [rows], "
                "[rows] and [rows, k].",
                field="above",
            )
        w = check_weights(weights, len(first))
        weight = np.ones(len(first)) if w is None else w.astype(np.float64)
        found = first >= 0
        self._rows += len(first)
        self._missing += int(np.count_nonzero(~found))
        self._weight += float(weight.sum())
        first, others, weight = first[found], others[found], weight[found]
        tied = others + 1
        self._reciprocal += float(weight @ _mean_reciprocal(first, others))
        for place, k in enumerate(self.at):
            begin, end = np.minimum(first, k), np.minimum(first + tied, k)
            self._hits[place] += weight @ ((end - begin) / tied)
            self._gains[place] += weight @ ((self._discounts[end] - self._discounts[begin]) / tied)
            chosen = best[:, :k]
            self._covered[place, chosen[chosen >= 0]] = True

    def result(self) -> RetrievalFigures:
        """Returns the metrics so far."""
        total = self._weight

        def means(sums: Doubles) -> dict[int, float]:
            return {k: float(each) / total if total else math.nan for k, each in zip(self.at, sums, strict=True)}

        counts = self._covered.sum(1)
        covered = {
            k: int(count) / self.items if self.items and self._rows else math.nan
            for k, count in zip(self.at, counts, strict=True)
        }
        mrr = self._reciprocal / total if total else math.nan
        return RetrievalFigures(
            self._rows, self.items, self._missing, means(self._hits), means(self._gains), mrr, covered
        )

    def merge(self, other: RetrievalMetrics) -> None:
        """Adds the samples of another RetrievalMetrics over the same items, which is not modified."""
        self._rows += other._rows
        self._missing += other._missing
        self._weight += other._weight
        self._reciprocal += other._reciprocal
        self._hits += other._hits
        self._gains += other._gains
        self._covered |= other._covered

    def merged(self, gather: Callable[[bytes], list[bytes]]) -> RetrievalMetrics:
        """Returns the metrics of all NN workers, the same on each. Blocks.

        Args:
            gather: `AllReduce.gather`, or `SingleReplica.gather`.
        """
        payloads = gather(safetensors.numpy.save({name: np.asarray(v) for name, v in self.state_dict().items()}))
        if len(payloads) == 1:
            return self
        total = RetrievalMetrics(self.items, self.at)
        for payload in payloads:
            part = RetrievalMetrics(self.items, self.at)
            part.load_state_dict(safetensors.numpy.load(payload))
            total.merge(part)
        return total

    def state_dict(self) -> State:
        """Returns the sums."""
        return {
            "counts": np.array([self._rows, self._missing], np.int64),
            "sums": np.array([self._weight, self._reciprocal]),
            "hits": self._hits.copy(),
            "gains": self._gains.copy(),
            "covered": np.packbits(self._covered, axis=1),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replaces the sums by those of a state over the same items."""
        self._rows, self._missing = (int(each) for each in state["counts"])
        self._weight, self._reciprocal = (float(each) for each in state["sums"])
        self._hits, self._gains = np.array(state["hits"]), np.array(state["gains"])
        self._covered = np.unpackbits(np.asarray(state["covered"]), axis=1, count=self.items).astype(np.bool_)


def _mean_reciprocal(above: Int64Array, equal: Int64Array) -> Doubles:
    """Returns the mean of 1 / rank over the ranks `above + 1` to `above + 1 + equal`."""
    means: Doubles = 1 / (above + 1.0)
    tied = equal > 0
    if tied.any():
        first, count = above[tied], equal[tied] + 1
        means[tied] = (_harmonic(first + count) - _harmonic(first)) / count
    return means


def _harmonic(n: Int64Array) -> Doubles:
    """Returns the sum of 1 / i for i from 1 to n."""
    exact = np.r_[0.0, np.cumsum(1 / np.arange(1.0, EXACT_HARMONICS))]
    large = np.maximum(n, EXACT_HARMONICS).astype(np.float64)
    expansion = np.log(large) + np.euler_gamma + 1 / (2 * large) - 1 / (12 * large**2) + 1 / (120 * large**4)
    return np.where(n < EXACT_HARMONICS, exact[np.minimum(n, EXACT_HARMONICS - 1)], expansion)
