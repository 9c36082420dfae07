"""The coordinator role: the control plane of a cluster."""

from persia.coordinator.coordinator import Coordinator
from persia.coordinator.token_scheduler import Tokens
from persia.coordinator.worker_state import TokenReport, WorkerReport

__all__ = ["Coordinator", "TokenReport", "Tokens", "WorkerReport"]
