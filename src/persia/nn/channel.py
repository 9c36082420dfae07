"""`Channel`: a bounded queue that can be closed."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from persia.retry import Deadline

__all__ = ["Channel", "Closed", "get_or_idle"]

T = TypeVar("T")

IDLE_SECONDS = 0.5
"""Between two calls of `idle` in `get_or_idle`."""


class Closed(Exception):  # noqa: N818 - not an error: the other side has ended
    """Raised by operations on a closed channel."""


class Channel(Generic[T]):
    """A bounded queue that can be closed, like `queue.Queue` with the `shutdown` of Python 3.13."""

    def __init__(self, capacity: int) -> None:
        self._items: deque[T] = deque()
        self._capacity = capacity
        self._closed = False
        self._getting = 0
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._items)

    @property
    def unclaimed(self) -> int:
        """Number of items that no waiting `get` is about to take."""
        with self._changed:
            return max(0, len(self._items) - self._getting)

    def put(self, item: T) -> None:
        """Blocks while full. Raises Closed when closed."""
        with self._changed:
            while len(self._items) >= self._capacity and not self._closed:
                self._changed.wait()
            if self._closed:
                raise Closed
            self._items.append(item)
            self._changed.notify_all()

    def await_demand(self) -> None:
        """Blocks until a `get` waits for an item. Raises Closed when closed."""
        with self._changed:
            while not self._closed and not (self._getting and not self._items):
                self._changed.wait()
            if self._closed:
                raise Closed

    def get(self, timeout: float | None = None) -> T:
        """Blocks while empty, at most `timeout` seconds.

        Raises:
            Closed: closed, and nothing is left.
            TimeoutError: nothing came in time.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            self._getting += 1
            self._changed.notify_all()
            try:
                while not self._items:
                    if self._closed:
                        raise Closed
                    remaining = None if deadline is None else deadline - time.monotonic()
                    if remaining is not None and remaining <= 0:
                        raise TimeoutError
                    self._changed.wait(remaining)
                item = self._items.popleft()
            finally:
                self._getting -= 1
            self._changed.notify_all()
            return item

    def close(self, *, discard: bool = False) -> None:
        """Refuses further items; those inside can still be got, unless discarded."""
        with self._changed:
            self._closed = True
            if discard:
                self._items.clear()
            self._changed.notify_all()


def get_or_idle(get: Callable[[float], T], timeout: float, idle: Callable[[], None] | None) -> T:
    """Gets an item within `timeout` seconds, and calls `idle` now and then until there is one.

    Args:
        get: raises TimeoutError if nothing came within this many seconds, like `Channel.get`.
        timeout: in seconds.
        idle: called in this thread; None for no calls.

    Raises:
        TimeoutError: nothing came in time.
    """
    if idle is None:
        return get(timeout)
    deadline = Deadline(timeout)
    while True:
        try:
            return get(min(IDLE_SECONDS, deadline.left))
        except TimeoutError:
            if deadline.passed:
                raise
        idle()
