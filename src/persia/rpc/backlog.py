"""What a server holds: requests that wait or run, and the bound on them."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import NamedTuple

from persia.rpc.dispatch import Reply
from persia.rpc.limits import Limits

__all__ = ["Backlog", "Job"]


class Job(NamedTuple):
    """Something to run, and whom to send what it returns.

    Attributes:
        peer: the client.
        nbytes: of the request.
        expires: when the client is gone, by the monotonic clock.
        work: returns the reply, if there is one. Does not raise.
    """

    peer: bytes
    nbytes: int
    expires: float
    work: Callable[[], Reply | None]


class Backlog:
    """Jobs in the order in which they came. Not thread-safe: its server has a lock.

    Args:
        limits: when it is full.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._waiting: collections.deque[Job] = collections.deque()
        self.requests = 0
        self.nbytes = 0

    @property
    def full(self) -> bool:
        """Whether no more should be read."""
        return self.requests >= self._limits.requests or self.nbytes >= self._limits.request_bytes

    @property
    def waits(self) -> bool:
        """Whether there is a job to take."""
        return bool(self._waiting)

    def put(self, job: Job) -> None:
        """One more waits."""
        self.requests += 1
        self.nbytes += job.nbytes
        self._waiting.append(job)

    def take(self) -> Job:
        """The first that waits; it counts until it is `done`."""
        return self._waiting.popleft()

    def done(self, job: Job) -> None:
        """A job that was taken has ended."""
        self.requests -= 1
        self.nbytes -= job.nbytes

    def drop_late(self, now: float) -> int:
        """Lets go of those that wait and whose client is gone; returns how many."""
        late = [job for job in self._waiting if job.expires <= now]
        if late:
            self._waiting = collections.deque(job for job in self._waiting if job.expires > now)
        for job in late:
            self.done(job)
        return len(late)

    def clear(self) -> None:
        """Forgets all that wait; they get no reply."""
        self.drop_late(float("inf"))
