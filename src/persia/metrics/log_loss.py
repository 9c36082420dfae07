"""Mean log-loss, streaming."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from numpy.typing import ArrayLike

from persia.metrics.checks import State, check, check_weights, column, loss_terms, total_weight

__all__ = ["LogLoss"]


class LogLoss:
    """Mean log-loss (binary cross-entropy), computed from logits; nan without rows. Not thread-safe."""

    def __init__(self) -> None:
        self.total = 0.0
        self.rows = 0
        self.weight = 0.0
        """Sum of the weights of all rows."""

    def update(self, logits: ArrayLike, labels: ArrayLike, weights: ArrayLike | None = None) -> None:
        """Adds rows: logits, labels and weights `[rows]`, as for :meth:`AUC.update`."""
        x, y = column(logits, "logits"), column(labels, "labels")
        check(x, y)
        w = check_weights(weights, len(x))
        self.add(loss_terms(x, y, w)[0], len(x), total_weight(len(x), w))

    def add(self, total: float, rows: int, weight: float) -> None:
        """Adds the weighted log-loss of rows."""
        self.total += total
        self.rows += rows
        self.weight += weight

    def result(self) -> float:
        """Returns the mean."""
        return self.total / self.weight if self.weight else math.nan

    def merge(self, other: LogLoss) -> None:
        """Adds the rows of another LogLoss."""
        self.add(other.total, other.rows, other.weight)

    def state_dict(self) -> State:
        """Returns the sum, the number of rows, and their weight unless each weighs 1."""
        state = {"total": self.total, "rows": self.rows}
        return state if self.weight == self.rows else {**state, "weight": self.weight}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replaces the counts by the counts of a state."""
        self.total, self.rows = float(state["total"]), int(state["rows"])
        self.weight = float(state.get("weight", self.rows))
