"""What every process answers."""

from __future__ import annotations

from typing import Protocol

from persia.telemetry.metrics import Health

__all__ = ["Observable"]


class Observable(Protocol):
    """A process of any role; it answers this beside what its role does, also while it is busy."""

    def health(self) -> Health:
        """How it is: since when it runs, its counters, and how long things took."""
