"""Bounds the memory of unread messages by the growth of this process, as ZeroMQ does not report it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

from persia.malloc import allocated_bytes

__all__ = ["Growth"]

_MEMORY_PER_BYTE = 40
"""Upper bound on the memory that ZeroMQ takes for each byte of an unread message. An empty frame takes the most: it has
2 bytes and takes 64. The rest is a margin for malloc."""

_FEW = 1024
"""Less than this fraction of the limit is too little to matter: 40 times of it are 4% of the limit."""

_FREE_SECONDS = 1.0
"""Seconds after which ZeroMQ has begun to free the memory of connections that were closed. It takes up to a second for
each gigabyte, and reads nothing meanwhile."""


class Growth:
    """Finds the connections whose frames may take more memory than allowed. Not thread-safe.

    The frames of a connection take at most `_MEMORY_PER_BYTE` times its unread bytes. They also take at most the memory
    by which the process has grown since the connection had few unread bytes. Only if both bounds exceed the limit are
    connections to be closed, and of them as few as possible.

    Honest messages have few frames. Together they take about their bytes, which are bounded too. The process may grow
    for another reason while they arrive. To hurt them it must grow by the limit, by default a quarter of the host's
    memory, before one of them is complete, which takes less than a second, and more than 1/40 of the limit must be
    unread. A client whose connection is closed sends its calls again.

    Args:
        limit: maximum memory of unread messages, in bytes.
        clock: returns the current time in seconds.
    """

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._before: dict[int, int] = {}  # By connection with many unread bytes: allocated bytes before most of them.
        self._now = 0  # Allocated bytes at the last check.
        self._free = -math.inf
        self._freeing = False

    @property
    def watching(self) -> bool:
        """Whether much was unread at the last check."""
        return bool(self._before)

    def forget(self, connection: int) -> None:
        """Notes that a connection is closed."""
        self._before.pop(connection, None)

    def pause(self) -> None:
        """Blames no connection for memory of closed ones until that should be free.

        No-op for a second after a pause: peers whose connections are closed again and again must not prevent checks.
        """
        now = self._clock()
        if now >= self._free + _FREE_SECONDS:
            self._free = now + _FREE_SECONDS
            self._freeing = True

    def check(self, unread: Mapping[int, int]) -> list[int]:
        """Returns the connections to be closed.

        Counts the allocated bytes only if much is unread, as this may take milliseconds. Without a libc that counts
        them, returns none: only the unread bytes are bounded then.

        Args:
            unread: unread bytes of each connection of which no complete message was read since the last check.
        """
        rest, many = sum(unread.values()), []
        for connection in sorted(unread, key=lambda one: -unread[one]):
            if rest * _FEW <= self._limit:
                break
            many.append(connection)
            rest -= unread[connection]
        now = allocated_bytes() if many else None
        if now is None:
            self._before.clear()
            return []
        # Memory that is freed meanwhile must not hide growth.
        before = self._before = {one: min(now, self._before.get(one, now)) for one in many}
        falls, self._now = now < self._now, now
        if self._clock() < self._free or (self._freeing and falls):
            return []
        self._freeing = False
        most = {one: min(_MEMORY_PER_BYTE * unread[one], now - before[one]) for one in many}
        found, total, oldest = [], 0, now
        # From the least to the most: once the sum exceeds the limit, all that follow are too much.
        for connection in sorted(many, key=lambda one: (most[one], unread[one])):
            total += most[connection]
            oldest = min(oldest, before[connection])
            if min(total, now - oldest) > self._limit:
                found.append(connection)
        return found
