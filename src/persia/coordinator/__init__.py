"""The coordinator role: the control plane of a cluster."""

from persia.coordinator.coordinator import CoordinatorServer
from persia.coordinator.scheduler_state import TokenReport, WorkerReport
from persia.coordinator.token_scheduler import TokenScheduler

__all__ = ["CoordinatorServer", "TokenReport", "TokenScheduler", "WorkerReport"]
