"""Threads of a PS that work on its store in the background."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable

__all__ = ["Background"]


class Background:
    """A thread that works until it is done or told to stop. Thread-safe.

    It is stopped when the interpreter exits, as a thread in the core would then abort the process.

    Args:
        name: name of the thread.
        work: what it does; it gets the event that tells it to stop.
    """

    def __init__(self, name: str, work: Callable[[threading.Event], None]) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(work,), name=name, daemon=True)
        atexit.register(self.stop)
        self._thread.start()

    @property
    def stopping(self) -> bool:
        """Whether it was told to stop."""
        return self._stop.is_set()

    def stop(self, seconds: float = 1.0) -> bool:
        """Tells it to stop, and waits for its end, for at most this number of seconds; returns whether it has ended."""
        self._stop.set()
        return self.wait(seconds)

    def wait(self, seconds: float) -> bool:
        """Waits for its end; returns whether it has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self, work: Callable[[threading.Event], None]) -> None:
        try:
            work(self._stop)
        finally:
            atexit.unregister(self.stop)
