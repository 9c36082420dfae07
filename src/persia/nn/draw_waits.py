"""`DrawWaits`: how long the network waits for batches, and for which part of that time no batch was read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from persia.telemetry.metrics import Histogram, Latency, WaitClock

__all__ = ["DrawWaits"]


class DrawWaits:
    """The waits of the training thread for its next batch. It adds them; any thread may read them.

    Attributes:
        loading_seconds: seconds of these waits for which the next batch was not read. For the rest of them it was
            registered, waited for earlier gradients, or was looked up.
    """

    def __init__(self) -> None:
        self._waits = Histogram()
        self.loading_seconds = 0.0

    @contextmanager
    def timed(self, reading: WaitClock) -> Iterator[None]:
        """Adds the duration of the block, even if it raises.

        Args:
            reading: the waits for a batch that is not read, of whichever thread looks it up.
        """
        before = reading.seconds
        try:
            with self._waits.timed():
                yield
        finally:
            self.loading_seconds += reading.seconds - before

    def latency(self) -> Latency:
        """Returns all waits so far."""
        return self._waits.latency("nn_wait_seconds")
