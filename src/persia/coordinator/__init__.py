"""The coordinator role: the control plane of a cluster."""

from persia.coordinator.coordinator import Coordinator

__all__ = ["Coordinator"]
