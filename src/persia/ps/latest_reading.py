"""Readings with a bounded wait: the last known value if a lock or a disk delays a new one."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

from persia.retry import Deadline

__all__ = ["LatestReading"]

T = TypeVar("T")

WAIT_SECONDS = 1.0
"""Maximum wait for a new reading; far less than the timeout of health checks."""

END_SECONDS = 1.0
"""Maximum wait for a reading in progress at the end of the PS, or of Python."""


class _Attempt:
    """A reading in progress."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.ended = threading.Event()
        self.error: Exception | None = None


class LatestReading(Generic[T]):
    """Reads a value in the background, and returns the last known one if reading takes long. Thread-safe.

    There is at most one thread, and only while a reading is in progress.

    Args:
        read: reads the value; also called once by the constructor.
    """

    def __init__(self, read: Callable[[], T]) -> None:
        self._read = read
        self._known = read()
        self._lock = threading.Lock()
        self._attempt: _Attempt | None = None
        self._idle = threading.Event()
        self._idle.set()
        # A thread in the core when Python ends would abort the process. `self.close` would keep this object alive.
        weakref.finalize(self, self._idle.wait, END_SECONDS)

    def get(self) -> tuple[T, float]:
        """Returns the value, and the delay of a newer one in seconds; 0 if the value is current.

        Blocks for at most a second.
        """
        deadline = Deadline(WAIT_SECONDS)
        with self._lock:
            earlier = self._attempt
        # An earlier attempt may have read the value before this call, so it does not count as current.
        if earlier is not None and not earlier.ended.wait(deadline.left):
            return self._known, time.monotonic() - earlier.began
        with self._lock:
            attempt = self._attempt or self._begin()
        if not attempt.ended.wait(deadline.left):
            return self._known, time.monotonic() - attempt.began
        if attempt.error is not None:
            raise attempt.error
        return self._known, 0.0

    def close(self) -> None:
        """Waits for a reading in progress, for at most a second."""
        self._idle.wait(END_SECONDS)

    def _begin(self) -> _Attempt:
        """Starts a thread that reads the value. Under the lock."""
        attempt = _Attempt()
        threading.Thread(target=self._run, args=(attempt,), name="persia-metrics", daemon=True).start()
        self._attempt = attempt
        self._idle.clear()
        return attempt

    def _run(self, attempt: _Attempt) -> None:
        try:
            self._known = self._read()
        except Exception as error:
            attempt.error = error
        with self._lock:
            self._attempt = None
            self._idle.set()
        attempt.ended.set()
