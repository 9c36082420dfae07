"""Metrics of predictions from logits, in all, per day, by group and by value; and of retrieval from ranks.

Memory is bounded (except for groups), and an update takes microseconds. A metric that is restored from its state gives
bit-identical results. Torch is not needed; CPU tensors without gradient are accepted as arrays. `DriftCounts` counts
the values of inputs and predictions, and `psi` measures the distance of two distributions.
"""

from persia.metrics.answers import AnswerColumns, AnswerKind, Answers, answers_of
from persia.metrics.auc import AUC, BLOCK
from persia.metrics.by_value import OTHER, LabelGroups, MetricsByValue
from persia.metrics.calibration import Calibration
from persia.metrics.calibration_by_bucket import CalibrationBucket, calibration_buckets
from persia.metrics.drift import (
    DriftCounts,
    DriftReference,
    ValueBuckets,
    compared_columns,
    count_ids,
    merged_drift,
)
from persia.metrics.grouped import GroupedFigures, GroupedMetrics
from persia.metrics.log_loss import LogLoss
from persia.metrics.merging import merged_grouped, merged_metrics
from persia.metrics.psi import MODERATE, SIGNIFICANT, psi
from persia.metrics.result import (
    METRICS,
    ClassFigures,
    Figures,
    LabelFigures,
    MetricFormat,
    MetricsResult,
    ValueFigures,
)
from persia.metrics.retrieval import RetrievalFigures, RetrievalMetrics
from persia.metrics.streaming import Metrics
from persia.metrics.watching import WatchedMetric, check_metric_name, figure, watched_metric

__all__ = [
    "AUC",
    "BLOCK",
    "METRICS",
    "MODERATE",
    "OTHER",
    "SIGNIFICANT",
    "AnswerColumns",
    "AnswerKind",
    "Answers",
    "Calibration",
    "CalibrationBucket",
    "ClassFigures",
    "DriftCounts",
    "DriftReference",
    "Figures",
    "GroupedFigures",
    "GroupedMetrics",
    "LabelFigures",
    "LabelGroups",
    "LogLoss",
    "MetricFormat",
    "Metrics",
    "MetricsByValue",
    "MetricsResult",
    "RetrievalFigures",
    "RetrievalMetrics",
    "ValueBuckets",
    "ValueFigures",
    "WatchedMetric",
    "answers_of",
    "calibration_buckets",
    "check_metric_name",
    "compared_columns",
    "count_ids",
    "figure",
    "merged_drift",
    "merged_grouped",
    "merged_metrics",
    "psi",
    "watched_metric",
]
