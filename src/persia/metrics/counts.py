"""Metrics of one label over one period, updated together, by kind of label."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from persia.metrics.answers import binary_scores, class_log_probabilities, only_ranks, values_of
from persia.metrics.auc import AUC
from persia.metrics.calibration import Calibration
from persia.metrics.checks import State, loss_terms, total_weight
from persia.metrics.log_loss import LogLoss
from persia.metrics.result import ClassFigures, Figures, LabelFigures, ValueFigures
from persia.schema import Label
from persia.types import Floats

__all__ = [
    "ClassMetrics",
    "LabelCounts",
    "LabelMetrics",
    "Terms",
    "ValueMetrics",
    "label_metrics",
    "rows_of",
    "terms_of",
]

Terms = tuple[float, ...]

TOP: Final = 5
"""The k of the top-k accuracy, for labels with more classes."""


class LabelCounts(Protocol):
    """Metrics of one label over one period."""

    @property
    def rows(self) -> int:
        """The number of rows so far, without those whose label is missing."""

    def add(self, logits: Floats, labels: Floats, weights: Floats | None, terms: Terms) -> None:
        """Counts checked rows; `terms` are their `terms_of`."""

    def settle(self) -> None:
        """Frees memory if that is possible. For when no more rows are expected soon."""

    def merge(self, other: Self) -> None:
        """Adds the rows of another object of the same label."""

    def copy(self) -> Self:
        """Returns a copy with the same rows."""

    def figures(self) -> LabelFigures:
        """Returns the metrics so far."""

    def state_dict(self) -> State:
        """Returns the counts."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replaces the counts by the counts of a state."""


class LabelMetrics:
    """AUC, log-loss and calibration of a binary label over one period.

    Args:
        bins: of the AUC.
        ranks: whether logits are scores that only rank, so that there is an AUC alone.
    """

    def __init__(self, bins: int, *, ranks: bool = False) -> None:
        self.auc = AUC(bins)
        self.log_loss = LogLoss()
        self.calibration = Calibration()
        self.ranks = ranks

    @property
    def rows(self) -> int:
        """See `LabelCounts`."""
        return self.log_loss.rows

    def add(self, logits: Floats, labels: Floats, weights: Floats | None, terms: Terms) -> None:
        """See `LabelCounts`."""
        self.auc.add(logits, labels, weights)
        self.log_loss.add(terms[0], len(logits), total_weight(len(logits), weights))
        self.calibration.predicted += terms[1]
        self.calibration.observed += terms[2]

    def settle(self) -> None:
        """See `LabelCounts`."""
        self.auc.settle()

    def merge(self, other: LabelMetrics) -> None:
        """Adds the rows of another LabelMetrics."""
        self.auc.merge(other.auc)
        self.log_loss.merge(other.log_loss)
        self.calibration.merge(other.calibration)

    def copy(self) -> LabelMetrics:
        """Returns a copy with the same rows."""
        other = LabelMetrics(self.auc.bins, ranks=self.ranks)
        other.auc = self.auc.copy()
        other.log_loss.merge(self.log_loss)
        other.calibration.merge(self.calibration)
        return other

    def figures(self) -> Figures:
        """Returns the metrics so far."""
        if self.ranks:
            return Figures(self.rows, self.auc.result(), math.nan, math.nan, math.nan)
        weight, loss = self.log_loss.weight, self.log_loss.result()
        base = self.calibration.observed / weight if weight else 0.0
        normalized = math.nan
        if 0 < base < 1:
            normalized = loss / -(base * math.log(base) + (1 - base) * math.log1p(-base))
        return Figures(self.rows, self.auc.result(), loss, self.calibration.result(), normalized)

    def state_dict(self) -> State:
        """Returns the states of all three metrics, whose keys differ."""
        return {**self.auc.state_dict(), **self.log_loss.state_dict(), **self.calibration.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replaces the counts by the counts of a state."""
        self.auc.load_state_dict(state)
        self.log_loss.load_state_dict(state)
        self.calibration.load_state_dict(state)


class _Sums:
    """Sums of terms over rows.

    Args:
        label: the label.
        terms: number of sums.
    """

    def __init__(self, label: Label, terms: int) -> None:
        self.label = label
        self.rows = 0
        self.weight = 0.0
        self.sums: NDArray[np.float64] = np.zeros(terms)

    def add(self, logits: Floats, labels: Floats, weights: Floats | None, terms: Terms) -> None:
        """See `LabelCounts`."""
        self.rows += len(labels)
        self.weight += total_weight(len(labels), weights)
        self.sums += terms

    def settle(self) -> None:
        """See `LabelCounts`."""

    def merge(self, other: Self) -> None:
        """See `LabelCounts`."""
        self.rows += other.rows
        self.weight += other.weight
        self.sums += other.sums

    def copy(self) -> Self:
        """See `LabelCounts`."""
        other = type(self)(self.label, len(self.sums))
        other.merge(self)
        return other

    def state_dict(self) -> State:
        """See `LabelCounts`."""
        return {"rows": self.rows, "weight": self.weight, "sums": self.sums.copy()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `LabelCounts`."""
        self.rows, self.weight = int(state["rows"]), float(state["weight"])
        self.sums = np.array(state["sums"], np.float64)

    def _mean(self, term: int) -> float:
        return float(self.sums[term]) / self.weight if self.weight else math.nan


class ValueMetrics(_Sums):
    """Errors of the values of a regression or count over one period."""

    def __init__(self, label: Label, terms: int = 4) -> None:
        super().__init__(label, terms)

    def figures(self) -> ValueFigures:
        """Returns the metrics so far. There are none of scores that only rank."""
        if only_ranks(self.label):
            return ValueFigures(self.rows, math.nan, math.nan, math.nan)
        predicted, observed = float(self.sums[2]), float(self.sums[3])
        ratio = predicted / observed if observed else math.nan
        return ValueFigures(self.rows, math.sqrt(self._mean(0)), self._mean(1), ratio)


class ClassMetrics(_Sums):
    """Accuracy and log-loss of a label with classes over one period."""

    def __init__(self, label: Label, terms: int = 3) -> None:
        super().__init__(label, terms)

    def figures(self) -> ClassFigures:
        """Returns the metrics so far."""
        top = self._mean(1) if len(self.label.class_names) > TOP else math.nan
        return ClassFigures(self.rows, self._mean(0), top, self._mean(2))


def label_metrics(label: Label, bins: int) -> LabelCounts:
    """Returns the metrics of a label without rows.

    Args:
        label: the label.
        bins: of an AUC.
    """
    if label.class_names:
        return ClassMetrics(label)
    return LabelMetrics(bins, ranks=only_ranks(label)) if label.kind == "binary" else ValueMetrics(label)


def rows_of(
    labels: tuple[Label, ...], k: int, logits: Floats, targets: Floats, weights: Floats | None
) -> tuple[Floats, Floats, Floats | None]:
    """Returns logits, labels and weights of the rows in which a label is known, as `LabelCounts` takes them.

    Args:
        labels: all labels, in the order of their logits.
        k: number of the label.
        logits: `[rows, outputs]`.
        targets: `[rows, labels]`; NaN where one is missing.
        weights: `[rows]`; None weighs each 1.
    """
    label, y = labels[k], targets[:, k]
    if label.kind == "binary":
        x = binary_scores(labels, label, logits)
    else:
        start = sum(each.outputs for each in labels[:k])
        x = logits[:, start : start + label.outputs] if label.class_names else logits[:, start]
    known = ~np.isnan(y)
    return (x, y, weights) if known.all() else (x[known], y[known], None if weights is None else weights[known])


def terms_of(label: Label, logits: Floats, labels: Floats, weights: Floats | None) -> Terms:
    """Returns the weighted sums over rows that the metrics of a label are made of.

    Args:
        label: the label.
        logits: `[rows]`, of a binary label its `binary_scores`; `[rows, outputs]` of a label with classes.
        labels: `[rows]`, none of which is missing.
        weights: `[rows]`; None weighs each 1.
    """
    if label.class_names:
        return _class_terms(label, logits, labels, weights)
    if label.kind == "binary":
        return loss_terms(logits, labels, weights)
    predicted, observed = values_of(label, logits.astype(np.float64)), labels.astype(np.float64)
    error = predicted - observed
    return tuple(_total(each, weights) for each in (error * error, np.abs(error), predicted, observed))


def _class_terms(label: Label, logits: Floats, labels: Floats, weights: Floats | None) -> Terms:
    """Returns the weights of rows that are right, of rows that are right within `TOP`, and the sum of the log-loss.

    Of equal probabilities the lower class comes first, as in `numpy.argmax`. A probability below 2.2e-16, the precision
    of float64, counts as that, as in scikit-learn.
    """
    scores = class_log_probabilities(label, logits)
    rows, own = np.arange(len(scores)), labels.astype(np.intp)
    chosen = scores[rows, own]
    above = (scores > chosen[:, None]).sum(axis=1)
    above += ((scores == chosen[:, None]) & (np.arange(scores.shape[1]) < own[:, None])).sum(axis=1)
    loss = -np.maximum(chosen, math.log(np.finfo(np.float64).eps))
    return tuple(_total(each, weights) for each in (above < 1, above < TOP, loss))


def _total(values: NDArray[Any], weights: Floats | None) -> float:
    values = values.astype(np.float64)
    return float((values if weights is None else values * weights).sum())
