"""Compute times of this NN worker's batches, reported to the coordinator at intervals for `persia.modes.Auto`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from persia.services import TokenService
from persia.types import StepTiming

__all__ = ["StepTimings"]


class StepTimings:
    """Collects the compute times of batches and reports them. Thread-safe.

    Args:
        tokens: receives the reports.
        rank: of this NN worker.
        every: minimum number of seconds between two reports.
        resend: sends the coordinator the rule of Auto again, after it has restarted.
    """

    def __init__(self, tokens: TokenService, rank: int, every: float, resend: Callable[[], object]) -> None:
        self._tokens = tokens
        self._rank = rank
        self._every = every
        self._resend = resend
        self._lock = threading.Lock()
        self._sent = time.monotonic()
        self._unsent: list[tuple[float, float]] = []

    def add(self, began: float) -> None:
        """Adds a batch that began at `began` on the monotonic clock and ends now; reports at intervals."""
        with self._lock:
            now = time.monotonic()
            self._unsent.append((began, now - began))
            if now - self._sent < self._every:
                return
            self._sent = now
            unsent, self._unsent = self._unsent, []
        if not self._tokens.report_timings(self._rank, [StepTiming(now - start, seconds) for start, seconds in unsent]):
            self._resend()
