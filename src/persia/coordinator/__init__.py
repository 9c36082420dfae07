"""The coordinator role: the control plane of a cluster."""

from persia.coordinator.coordinator import CoordinatorServer
from persia.coordinator.token_scheduler import TokenScheduler
from persia.coordinator.worker_state import TokenReport, WorkerReport

__all__ = ["CoordinatorServer", "TokenReport", "TokenScheduler", "WorkerReport"]
