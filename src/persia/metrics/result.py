"""What metrics amount to: plain records."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Figures", "MetricsResult", "mean"]


@dataclass(frozen=True, slots=True)
class Figures:
    """Quality of one label over some rows; nan where it is not defined (see the classes of these names)."""

    rows: int
    auc: float
    log_loss: float
    calibration: float


@dataclass(frozen=True, slots=True)
class MetricsResult:
    """Quality of a model.

    Attributes:
        rows: rows seen.
        auc: mean over the labels that have both classes; with one label, its AUC. Likewise the next two.
        log_loss: mean over labels.
        calibration: mean over labels.
        labels: figures of each label over all rows.
        per_day: figures of each label by day, days ascending; rows without a day are in none.
    """

    rows: int
    auc: float
    log_loss: float
    calibration: float
    labels: Mapping[str, Figures]
    per_day: Mapping[int, Mapping[str, Figures]] = field(default_factory=dict)

    @property
    def auc_per_day(self) -> dict[int, float]:
        """AUC by day, mean over labels."""
        return {day: mean(f.auc for f in figures.values()) for day, figures in self.per_day.items()}

    @property
    def auc_mean_of_days(self) -> float:
        """Mean over the days of the AUC of each; nan without days."""
        return mean(self.auc_per_day.values())


def mean(values: Any) -> float:
    """Mean of the values that are not nan; nan without any."""
    known = [v for v in values if not math.isnan(v)]
    return math.fsum(known) / len(known) if known else math.nan
