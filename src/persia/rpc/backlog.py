"""The queue of a server: requests that wait or run, and the bounds on them."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import NamedTuple

from persia.rpc.dispatch import Reply
from persia.rpc.limits import Limits

__all__ = ["Backlog", "Job"]


class Job(NamedTuple):
    """A request to run, and the client to reply to.

    Attributes:
        peer: identity of the client.
        nbytes: size of the request in bytes.
        expires: monotonic time at which the client gives up.
        work: runs the request; returns the reply, if any. Does not raise.
    """

    peer: bytes
    nbytes: int
    expires: float
    work: Callable[[], Reply | None]


class Backlog:
    """A bounded first-in, first-out queue of jobs. Not thread-safe; the server locks it.

    Args:
        limits: bounds on the number and size of requests.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._waiting: collections.deque[Job] = collections.deque()
        self.requests = 0
        self.nbytes = 0

    @property
    def full(self) -> bool:
        """Whether to stop reading requests."""
        return self.requests >= self._limits.requests or self.nbytes >= self._limits.request_bytes

    @property
    def waits(self) -> bool:
        """Whether a job is waiting."""
        return bool(self._waiting)

    def put(self, job: Job) -> None:
        """Appends a job."""
        self.requests += 1
        self.nbytes += job.nbytes
        self._waiting.append(job)

    def take(self) -> Job:
        """Removes the first job. It counts as held until it is `done`."""
        return self._waiting.popleft()

    def done(self, job: Job) -> None:
        """Marks a taken job as finished."""
        self.requests -= 1
        self.nbytes -= job.nbytes

    def drop_late(self, now: float) -> int:
        """Drops waiting jobs whose client has given up; returns their number."""
        late = [job for job in self._waiting if job.expires <= now]
        if late:
            self._waiting = collections.deque(job for job in self._waiting if job.expires > now)
        for job in late:
            self.done(job)
        return len(late)

    def clear(self) -> None:
        """Drops all waiting jobs without a reply."""
        self.drop_late(float("inf"))
