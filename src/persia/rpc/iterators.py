"""Iterators that a server runs for its clients, one item per request."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator
from typing import Any

from persia.errors import WireError
from persia.rpc.limits import Limits
from persia.telemetry.logs import get_logger

__all__ = ["END", "Streams"]

_log = get_logger("persia.rpc")

END = object()
"""Marks the end of an iterator."""


class _Stream:
    def __init__(self, iterator: Iterator[Any]) -> None:
        self.lock = threading.Lock()
        self.iterator = iterator
        self.position = -1
        self.item: Any = END
        self.error: BaseException | None = None
        self.used = time.monotonic()

    def late(self, oldest: float) -> bool:
        """Whether it was last used before `oldest`. An iterator that is making an item is in use."""
        return self.used < oldest and not self.lock.locked()

    def close(self) -> None:
        """Closes the iterator. A generator runs its `finally`; its errors are only logged."""
        with self.lock:
            self.iterator, iterator, self.item = iter(()), self.iterator, END
        try:
            close = getattr(iterator, "close", None)
            if close is not None:
                close()
        except BaseException:
            _log.exception("An iterator failed when it was closed.")


class Streams:
    """Open iterators by number. Thread-safe; `next` blocks while the iterator makes an item.

    Each iterator keeps its last item, so that a client can request it again after a reconnection.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._streams: dict[int, _Stream] = {}
        self.expired = 0

    def open(self, iterator: Iterator[Any]) -> int:
        """Adds an iterator; returns its number, which other clients cannot guess.

        Raises:
            WireError: there are too many open iterators.
        """
        number = secrets.randbits(63)
        with self._lock:
            if len(self._streams) >= self._limits.streams:
                raise WireError(
                    f"{len(self._streams)} iterators are open, as many as Limits.streams allows; read them to their "
                    "end or close them."
                )
            self._streams[number] = _Stream(iterator)
        return number

    def next(self, number: int, position: int) -> Any:
        """Returns the item at a position, either the last one again or the next one; END after the last item.

        Raises:
            WireError: the iterator does not exist, or the position is invalid.
        """
        with self._lock:
            stream = self._streams.get(number)
        if stream is None:
            raise WireError(
                "The iterator is gone: it ended, was not read for too long, or its process restarted; "
                "call the method again."
            )
        with stream.lock:
            stream.used = time.monotonic()
            if position == stream.position + 1:
                stream.item = END  # Free the last item: at most one is in memory while the next is made.
                stream.position, stream.error = position, None
                try:
                    stream.item = next(stream.iterator, END)
                except BaseException as error:
                    stream.error = error
                stream.used = time.monotonic()
            elif position != stream.position:
                raise WireError(
                    f"Cannot read item {position} of an iterator at item {stream.position}; read items in order."
                )
            if stream.error is not None:
                raise stream.error
            return stream.item

    def close(self, number: int) -> None:
        """Closes an iterator. No-op if it is unknown."""
        with self._lock:
            stream = self._streams.pop(number, None)
        if stream is not None:
            stream.close()

    def late(self) -> bool:
        """Whether there are iterators that were not read for too long."""
        oldest = time.monotonic() - self._limits.stream_seconds
        with self._lock:
            return any(stream.late(oldest) for stream in self._streams.values())

    def expire(self) -> None:
        """Closes the expired iterators. Blocks while they run their cleanup."""
        oldest = time.monotonic() - self._limits.stream_seconds
        with self._lock:
            late = [number for number, stream in self._streams.items() if stream.late(oldest)]
            self.expired += len(late)
        for number in late:
            self.close(number)

    def refresh(self) -> None:
        """Resets the time of all iterators, as requests for them may be waiting."""
        now = time.monotonic()
        with self._lock:
            for stream in self._streams.values():
                stream.used = now

    def close_all(self) -> None:
        """Closes all iterators."""
        for number in list(self._streams):
            self.close(number)

    def __len__(self) -> int:
        return len(self._streams)
