"""Streaming metrics of binary predictions, from logits: AUC, log-loss and calibration, per label and per day.

Memory does not grow with rows, and an update takes microseconds. A metric that is restored from its state gives the
same results to the last bit. Torch is not needed; CPU tensors without gradient are accepted as arrays.
"""

from persia.metrics.auc import AUC, BLOCK
from persia.metrics.calibration import Calibration
from persia.metrics.log_loss import LogLoss
from persia.metrics.merging import merged_metrics
from persia.metrics.result import Figures, MetricsResult
from persia.metrics.streaming import Metrics

__all__ = ["AUC", "BLOCK", "Calibration", "Figures", "LogLoss", "Metrics", "MetricsResult", "merged_metrics"]
