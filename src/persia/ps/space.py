"""Waits for free space: if memory or disk are full, training pauses without losses."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from persia.errors import StoreFullError
from persia.retry import Deadline, retry
from persia.telemetry.logs import get_logger

__all__ = ["SpaceWait"]

T = TypeVar("T")

GRACE_SECONDS = 5.0
"""Time before the caller's deadline at which a call gives up, so that the caller gets the error of the PS."""

GRACE_SHARE = 0.25
"""The same time as a share of the timeout, for short timeouts."""

log = get_logger("persia.ps")


class SpaceWait:
    """Retries calls while there is no space for rows. Safe to call from several threads.

    For any number of waiting calls, the log has one line when the first begins to wait, and one when all have
    continued.

    Args:
        timeout: seconds after which callers in other processes give up. A call gives up a little earlier, as its error
            names the place without space, and the callers' error would only say that this PS is late.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout - min(GRACE_SECONDS, GRACE_SHARE * timeout)
        self._lock = threading.Lock()
        self._waiting = 0
        self._began = 0.0

    def deadline(self) -> Deadline:
        """Returns the deadline of a call that arrives now, for calls that wait for others before they need space."""
        return Deadline(self._timeout)

    def retry(self, call: Callable[[], T], operation: str, deadline: Deadline | None = None) -> T:
        """Repeats a call until there is space, and returns the result. Blocks.

        Args:
            call: a call that may be repeated.
            operation: name of the call, for log and error.
            deadline: deadline of the call; None if it arrives now.

        Raises:
            StoreFullError: there was no space before the deadline.
        """
        began = time.monotonic()
        waited = False

        def begin_wait(error: Exception) -> None:
            nonlocal waited
            waited = True
            self._begin(operation, str(error))  # A log that retained the error would keep the store alive.

        try:
            result = retry(
                call,
                transient=lambda error: isinstance(error, StoreFullError),
                deadline=deadline if deadline is not None else self.deadline(),
                on_wait=begin_wait,
            )
        except BaseException as error:
            if waited:
                self._end(continued=False)
            if not isinstance(error, StoreFullError):
                raise
            raise StoreFullError(
                f"{error.message}. ({operation} waited {time.monotonic() - began:.1f} s for space.)",
                operation=operation,
                seconds=self._timeout,
            ) from error
        if waited:
            self._end(continued=True)
        return result

    def _begin(self, operation: str, error: str) -> None:
        with self._lock:
            self._waiting += 1
            first = self._waiting == 1
            if first:
                self._began = time.monotonic()
        if first:
            log.warning(
                "%s waits for space, so training pauses: %s. It continues when there is space, and fails after %g s.",
                operation, error, self._timeout,
            )  # fmt: skip

    def _end(self, *, continued: bool) -> None:
        with self._lock:
            self._waiting -= 1
            last = self._waiting == 0
            seconds = time.monotonic() - self._began
        if last and continued:
            log.warning("There is space again after %.1f s: training continues.", seconds)
