"""AUC, log-loss and calibration of one label, updated together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from persia.metrics.auc import AUC
from persia.metrics.calibration import Calibration
from persia.metrics.checks import State
from persia.metrics.log_loss import LogLoss
from persia.metrics.result import Figures
from persia.types import Floats

__all__ = ["LabelMetrics"]


class LabelMetrics:
    """AUC, log-loss and calibration of one label over one period."""

    def __init__(self, bins: int) -> None:
        self.auc = AUC(bins)
        self.log_loss = LogLoss()
        self.calibration = Calibration()

    def add(self, logits: Floats, labels: Floats, terms: tuple[float, float, float]) -> None:
        """Counts checked rows; `terms` are their `loss_terms`."""
        self.auc.add(logits, labels)
        self.log_loss.total += terms[0]
        self.log_loss.rows += len(logits)
        self.calibration.predicted += terms[1]
        self.calibration.observed += terms[2]

    def merge(self, other: LabelMetrics) -> None:
        """Adds the rows of another LabelMetrics."""
        self.auc.merge(other.auc)
        self.log_loss.merge(other.log_loss)
        self.calibration.merge(other.calibration)

    def copy(self) -> LabelMetrics:
        """Returns a copy with the same rows."""
        other = LabelMetrics(self.auc.bins)
        other.auc = self.auc.copy()
        other.log_loss.merge(self.log_loss)
        other.calibration.merge(self.calibration)
        return other

    def figures(self) -> Figures:
        """Returns the metrics so far."""
        rows, loss = self.log_loss.rows, self.log_loss.result()
        base = self.calibration.observed / rows if rows else 0.0
        normalized = math.nan
        if 0 < base < 1:
            normalized = loss / -(base * math.log(base) + (1 - base) * math.log1p(-base))
        return Figures(rows, self.auc.result(), loss, self.calibration.result(), normalized)

    def state_dict(self) -> State:
        """Returns the states of all three metrics, whose keys differ."""
        return {**self.auc.state_dict(), **self.log_loss.state_dict(), **self.calibration.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replaces the counts by the counts of a state."""
        self.auc.load_state_dict(state)
        self.log_loss.load_state_dict(state)
        self.calibration.load_state_dict(state)
