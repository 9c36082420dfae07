"""The coordinator role: the control plane of a cluster."""

from persia.coordinator.accounts import TokenReport, WorkerReport
from persia.coordinator.coordinator import Coordinator
from persia.coordinator.tokens import Tokens

__all__ = ["Coordinator", "TokenReport", "Tokens", "WorkerReport"]
