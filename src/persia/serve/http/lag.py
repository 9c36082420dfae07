"""Measures how far an event loop is behind."""

from __future__ import annotations

import asyncio

__all__ = ["Lag"]

INTERVAL = 0.02
DECAY = 0.9
"""Factor of the largest lag per interval: it falls to a third within a quarter of a second."""


class Lag:
    """The largest recent delay of an event loop: about the time of one round over all connections.

    Attributes:
        seconds: the delay.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Starts to measure the running event loop."""
        loop = asyncio.get_running_loop()
        due = loop.time() + INTERVAL

        def tick() -> None:
            nonlocal due
            now = loop.time()
            self.seconds = max(now - due, DECAY * self.seconds)
            due = now + INTERVAL
            self._handle = loop.call_at(due, tick)

        self._handle = loop.call_at(due, tick)

    def stop(self) -> None:
        """Ends the measurement."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
