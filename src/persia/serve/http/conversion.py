"""The thread that converts large bodies, with admission control."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from persia.errors import OverloadedError
from persia.serve.http.batcher import RESERVE, expired
from persia.serve.http.compute_times import ComputeTimes

__all__ = ["ConversionThread"]

T = TypeVar("T")


class ConversionThread:
    """Converts bodies in one thread, in order, without blocking the event loop. Used from one event loop.

    Args:
        max_pending: maximum number of pending conversions.

    Attributes:
        overloaded: number of conversions that were refused immediately.
        expired: number of conversions that were skipped, as their deadline had passed.
    """

    def __init__(self, max_pending: int) -> None:
        self.overloaded = 0
        self.expired = 0
        self._max_pending = max_pending
        self._thread = ThreadPoolExecutor(1, "persia-convert")
        self._pending: dict[object, int] = {}
        """Sizes of the conversions that wait or run, in bytes."""
        self._times = ComputeTimes()
        self._lock = threading.Lock()

    def wait(self) -> float:
        """Returns the expected seconds until the pending conversions are done."""
        with self._lock:
            return sum(map(self._times.seconds, self._pending.values()))

    def check(self, size: int, deadline: float) -> None:
        """Checks whether a conversion would be accepted, for example before the body is read.

        Args:
            size: bytes of the body.
            deadline: `time.monotonic()` by which the request must be answered.

        Raises:
            OverloadedError: too many are pending, or they would take too much of the remaining time.
        """
        with self._lock:
            pending = len(self._pending)
            wait = sum(map(self._times.seconds, [*self._pending.values(), size]))
        if not pending:  # Even if estimates are bad: converting improves them.
            return
        full = pending >= self._max_pending
        if not full and time.monotonic() + RESERVE * wait <= deadline:
            return
        self.overloaded += 1
        reason = (
            f"{pending} bodies are waiting for conversion (max_queue = {self._max_pending})"
            if full
            else f"the conversion of the body would end in about {1000 * wait:.0f} ms, too near to the deadline"
        )
        raise OverloadedError(
            f"The server is overloaded: {reason}. Try again later, or add servers.", retry_after=max(1, math.ceil(wait))
        )

    async def run(self, size: int, deadline: float, convert: Callable[..., T], *arguments: Any) -> T:
        """Returns the result of a conversion, which is skipped if its deadline passes while it waits.

        Args:
            size: bytes of the body.
            deadline: `time.monotonic()`.
            convert: called in the thread.
            *arguments: arguments of the call.

        Raises:
            OverloadedError: as `check` does, or the deadline has passed.
        """
        self.check(size, deadline)

        def timed() -> T:
            started = time.monotonic()
            if started > deadline:
                self.expired += 1
                raise expired()
            try:
                return convert(*arguments)
            finally:
                with self._lock:
                    self._times.add(size, time.monotonic() - started)

        key = object()
        with self._lock:
            self._pending[key] = size
        future = self._thread.submit(timed)
        future.add_done_callback(lambda _: self._remove(key))  # Also if it is cancelled while it waits.
        return await asyncio.wrap_future(future)

    def close(self, wait: bool = True) -> None:
        """Ends the thread.

        Args:
            wait: complete pending conversions first, and block until then.
        """
        self._thread.shutdown(wait, cancel_futures=not wait)

    def _remove(self, key: object) -> None:
        with self._lock:
            del self._pending[key]
