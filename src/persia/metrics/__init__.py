"""Streaming metrics of binary predictions, from logits: AUC, log-loss, calibration; in all, per label and per day.

Memory does not grow with rows, an update costs some microseconds, and a state that is saved and loaded continues to
the last digit. Nothing here needs torch; tensors on the CPU that need no gradient are taken as arrays.
"""

from persia.metrics.auc import AUC, BLOCK
from persia.metrics.calibration import Calibration
from persia.metrics.log_loss import LogLoss
from persia.metrics.result import Figures, MetricsResult
from persia.metrics.streaming import Metrics

__all__ = ["AUC", "BLOCK", "Calibration", "Figures", "LogLoss", "Metrics", "MetricsResult"]
