"""Results of metrics, as plain records."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from persia.metrics.calibration_by_bucket import CalibrationBucket
from persia.metrics.grouped import GroupedFigures

__all__ = ["Figures", "MetricsResult", "mean"]


@dataclass(frozen=True, slots=True)
class Figures:
    """Metrics of one label over some rows; nan where undefined (see the classes of these names).

    Attributes:
        rows: number of rows.
        auc: area under the ROC curve.
        log_loss: mean log-loss.
        calibration: mean prediction over mean label.
        normalized_entropy: log-loss divided by the log-loss of always predicting the mean label: below 1 the model has
            learnt something (He et al., Practical Lessons from Predicting Clicks on Ads at Facebook, ADKDD'14, section
            2.1).
    """

    rows: int
    auc: float
    log_loss: float
    calibration: float
    normalized_entropy: float


@dataclass(frozen=True, slots=True)
class MetricsResult:
    """Metrics of a model.

    Attributes:
        rows: number of rows.
        auc: mean AUC over the labels that have both classes.
        log_loss: mean log-loss over the labels.
        calibration: mean calibration over the labels.
        normalized_entropy: mean normalized entropy over the labels.
        labels: metrics of each label over all rows.
        per_day: metrics of each label by day, in ascending order of days. Excludes rows without a day.
        buckets: calibration of each label in ten buckets of equal size, lowest predictions first.
        grouped: by label, ranking quality within groups, if an evaluation requested groups.
    """

    rows: int
    auc: float
    log_loss: float
    calibration: float
    normalized_entropy: float
    labels: Mapping[str, Figures]
    per_day: Mapping[int, Mapping[str, Figures]] = field(default_factory=dict)
    buckets: Mapping[str, tuple[CalibrationBucket, ...]] = field(default_factory=dict)
    grouped: Mapping[str, GroupedFigures] = field(default_factory=dict)

    @property
    def auc_per_day(self) -> dict[int, float]:
        """The AUC by day, as the mean over labels."""
        return {day: mean(f.auc for f in figures.values()) for day, figures in self.per_day.items()}

    @property
    def auc_mean_of_days(self) -> float:
        """The mean of the AUCs of all days; nan without days."""
        return mean(self.auc_per_day.values())


def mean(values: Any) -> float:
    """Returns the mean of the values that are not nan; nan if there are none."""
    known = [v for v in values if not math.isnan(v)]
    return math.fsum(known) / len(known) if known else math.nan
