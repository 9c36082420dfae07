"""The coordinator role: the control plane of a cluster."""

from persia.coordinator.coordinator import CoordinatorServer
from persia.coordinator.scheduler_state import report_metrics
from persia.coordinator.token_scheduler import TokenScheduler
from persia.types import TokenReport, WorkerReport

__all__ = ["CoordinatorServer", "TokenReport", "TokenScheduler", "WorkerReport", "report_metrics"]
