"""Retries of transient failures: a full disk, a process that is restarting, an address that is still in use."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

__all__ = ["Backoff", "Deadline", "retry"]

T = TypeVar("T")


class Deadline:
    """A point in time by which an operation must end.

    Args:
        seconds: seconds from now.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds until the deadline, at least 0."""
        return max(0.0, self._end - time.monotonic())

    @property
    def passed(self) -> bool:
        """Whether the deadline has passed."""
        return self.left == 0


class Backoff(NamedTuple):
    """The pauses between attempts, each twice as long as the previous one.

    Attributes:
        first: length of the first pause in seconds.
        longest: maximum length of a pause in seconds.
    """

    first: float = 0.1
    longest: float = 2.0


DOUBLING = Backoff()


def retry(
    call: Callable[[], T],
    *,
    transient: Callable[[Exception], bool],
    deadline: Deadline,
    backoff: Backoff = DOUBLING,
    on_wait: Callable[[Exception], object] = lambda _: None,
    wait: Callable[[float], object] = time.sleep,
) -> T:
    """Retries transient failures until the deadline, and returns the result. Blocks.

    Args:
        call: a call that is safe to repeat; called at least once, and once more at the deadline.
        transient: returns whether a failure may be transient. Other failures are raised immediately.
        deadline: time after which a failure is raised.
        backoff: pauses between attempts.
        on_wait: called with the first failure, before the first pause.
        wait: waits for a number of seconds, or until there is a reason to retry.
    """
    pause = backoff.first
    waiting = False
    while True:
        try:
            return call()
        except Exception as error:
            if deadline.passed or not transient(error):
                raise
            if not waiting:
                on_wait(error)
                waiting = True
        wait(min(pause, deadline.left))
        pause = min(2 * pause, backoff.longest)
