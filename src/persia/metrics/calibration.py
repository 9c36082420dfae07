"""Mean prediction over mean label, streaming."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from numpy.typing import ArrayLike

from persia.metrics.checks import State, check, check_weights, column, loss_terms

__all__ = ["Calibration"]


class Calibration:
    """Mean prediction divided by mean label: 1 is ideal; nan without a positive label. Not thread-safe."""

    def __init__(self) -> None:
        self.predicted = 0.0
        self.observed = 0.0

    def update(self, logits: ArrayLike, labels: ArrayLike, weights: ArrayLike | None = None) -> None:
        """Adds rows: logits, labels and weights `[rows]`, as for :meth:`AUC.update`."""
        x, y = column(logits, "logits"), column(labels, "labels")
        check(x, y)
        _, predicted, observed = loss_terms(x, y, check_weights(weights, len(x)))
        self.predicted += predicted
        self.observed += observed

    def result(self) -> float:
        """Returns the ratio."""
        return self.predicted / self.observed if self.observed else math.nan

    def merge(self, other: Calibration) -> None:
        """Adds the rows of another Calibration."""
        self.predicted += other.predicted
        self.observed += other.observed

    def state_dict(self) -> State:
        """Returns both sums."""
        return {"predicted": self.predicted, "observed": self.observed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replaces the counts by the counts of a state."""
        self.predicted, self.observed = float(state["predicted"]), float(state["observed"])
