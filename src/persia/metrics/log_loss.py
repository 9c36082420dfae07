"""Mean log-loss, streaming."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from numpy.typing import ArrayLike

from persia.metrics.checks import State, check, column, loss_terms

__all__ = ["LogLoss"]


class LogLoss:
    """Mean log-loss (binary cross-entropy), computed from logits; nan without rows. Not thread-safe."""

    def __init__(self) -> None:
        self.total = 0.0
        self.rows = 0

    def update(self, logits: ArrayLike, labels: ArrayLike) -> None:
        """Adds rows: logits and labels `[rows]`, as for :meth:`AUC.update`."""
        x, y = column(logits, "logits"), column(labels, "labels")
        check(x, y)
        self.total += loss_terms(x, y)[0]
        self.rows += len(x)

    def result(self) -> float:
        """Returns the mean."""
        return self.total / self.rows if self.rows else math.nan

    def merge(self, other: LogLoss) -> None:
        """Adds the rows of another LogLoss."""
        self.total += other.total
        self.rows += other.rows

    def state_dict(self) -> State:
        """Returns the sum and the number of rows."""
        return {"total": self.total, "rows": self.rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replaces the counts by the counts of a state."""
        self.total, self.rows = float(state["total"]), int(state["rows"])
