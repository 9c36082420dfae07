"""Waits for free space: a full memory or disk pauses training, and loses nothing."""

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
"""Time before the deadline of a caller at which its call gives up, so that the caller gets the error of the PS."""

GRACE_SHARE = 0.25
"""The same for short timeouts, as a share of them."""

log = get_logger("persia.ps")


class SpaceWait:
    """Retries calls while there is no space for rows. Safe to call from several threads.

    However many calls wait, the log has one line when the first begins to, and one when all have gone on.

    Args:
        timeout: seconds after which callers in other processes give up. A call gives up a little earlier, as its error
            says where there is no space, and theirs would only say that this PS is late.
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
        """Calls until there is space, and returns the result. Blocks.

        Args:
            call: may be repeated.
            operation: its name, for log and error.
            deadline: of the call; None if it arrives now.

        Raises:
            StoreFullError: there was no space until the deadline.
        """
        began = time.monotonic()
        waited = False

        def begin_wait(error: Exception) -> None:
            nonlocal waited
            waited = True
            self._begin(operation, str(error))  # A log that kept the error would keep the store.

        try:
            found = retry(
                call,
                transient=lambda error: isinstance(error, StoreFullError),
                deadline=deadline if deadline is not None else self.deadline(),
                on_wait=begin_wait,
            )
        except BaseException as error:
            if waited:
                self._end(went_on=False)
            if not isinstance(error, StoreFullError):
                raise
            raise StoreFullError(
                f"{error.message}. ({operation} waited {time.monotonic() - began:.1f} s for space.)",
                operation=operation,
                seconds=self._timeout,
            ) from error
        if waited:
            self._end(went_on=True)
        return found

    def _begin(self, operation: str, error: str) -> None:
        with self._lock:
            self._waiting += 1
            first = self._waiting == 1
            if first:
                self._began = time.monotonic()
        if first:
            log.warning(
                "%s waits for space, so training pauses: %s. It goes on when there is some, and fails after %g s.",
                operation, error, self._timeout,
            )  # fmt: skip

    def _end(self, *, went_on: bool) -> None:
        with self._lock:
            self._waiting -= 1
            last = self._waiting == 0
            seconds = time.monotonic() - self._began
        if last and went_on:
            log.warning("There is space again after %.1f s: training goes on.", seconds)
