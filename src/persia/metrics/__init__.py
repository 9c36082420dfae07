"""Metrics of binary predictions, from logits: AUC, log-loss and calibration, per label and per day, and by group.

Memory is bounded (except for groups), and an update takes microseconds. A metric that is restored from its state gives
bit-identical results. Torch is not needed; CPU tensors without gradient are accepted as arrays. `DriftCounts` counts
the values of inputs and predictions, and `psi` measures the distance of two distributions.
"""

from persia.metrics.auc import AUC, BLOCK
from persia.metrics.calibration import Calibration
from persia.metrics.calibration_by_bucket import CalibrationBucket, calibration_buckets
from persia.metrics.drift import DriftCounts, DriftReference, ValueBuckets, count_ids, merged_drift
from persia.metrics.grouped import GroupedFigures, GroupedMetrics
from persia.metrics.log_loss import LogLoss
from persia.metrics.merging import merged_grouped, merged_metrics
from persia.metrics.psi import MODERATE, SIGNIFICANT, psi
from persia.metrics.result import Figures, MetricsResult
from persia.metrics.streaming import Metrics

__all__ = [
    "AUC",
    "BLOCK",
    "MODERATE",
    "SIGNIFICANT",
    "Calibration",
    "CalibrationBucket",
    "DriftCounts",
    "DriftReference",
    "Figures",
    "GroupedFigures",
    "GroupedMetrics",
    "LogLoss",
    "Metrics",
    "MetricsResult",
    "ValueBuckets",
    "calibration_buckets",
    "count_ids",
    "merged_drift",
    "merged_grouped",
    "merged_metrics",
    "psi",
]
