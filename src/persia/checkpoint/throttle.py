"""Limits the processor time of those who write checkpoints while training continues."""

from __future__ import annotations

import os
import threading
import time

__all__ = ["Throttle"]

REST_SECONDS = 1.0
"""Longest pause, so that a file is written within the deadline of a call, however small the share."""


class Throttle:
    """Limits the processor time of a thread to a share of all processors, until `hurry` is set.

    Waiting for a disk or a network does not count, as it takes nothing from training.

    Args:
        share: of all processors; a thread that may use a whole one never pauses.
        hurry: once set, there are no more pauses.
    """

    def __init__(self, share: float, hurry: threading.Event) -> None:
        self._factor = max(0.0, 1 / (share * len(os.sched_getaffinity(0))) - 1)
        self._hurry = hurry
        self.resume()

    def resume(self) -> None:
        """Starts to count the work of the calling thread, which may be another one than before."""
        self._begin = time.thread_time()

    def __call__(self) -> None:
        """Pauses in proportion to the work since the last pause."""
        self._hurry.wait(min(REST_SECONDS, (time.thread_time() - self._begin) * self._factor))
        self.resume()
