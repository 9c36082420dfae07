"""Batches at an embedding worker between their registration and the push of their gradient."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic, Literal, TypeVar

import msgspec

from persia.checks import check_choice, check_integer, check_seconds, plain_fields
from persia.errors import DeadlineError, MovedError, StaleBatchError
from persia.retry import Deadline
from persia.types import BatchId

__all__ = ["BatchBuffer", "WorkerOptions"]


class WorkerOptions(msgspec.Struct, frozen=True):
    """Bounds and deadlines of an embedding worker, and how rows travel.

    Args:
        compression: of rows and gradients between embedding worker and NN worker: "none", or "fp16" with a scale per
            row (docs: lossy, about half the bytes).
        capacity: batches that are buffered at most; more wait in `register`.
        timeout: seconds that `register` waits while the buffer is full.
        expiry: seconds without a call after which a batch is forgotten. It must be longer than the longest push: while
            a push waits for space at a PS, its NN worker does not ask for later batches.
    """

    compression: Literal["none", "fp16"] = "none"
    capacity: int = 4096
    timeout: float = 60.0
    expiry: float = 1800.0

    def __post_init__(self) -> None:
        plain_fields(self)
        check_choice("compression", self.compression, ("none", "fp16"))
        check_integer("capacity", self.capacity, 1)
        check_seconds("timeout", self.timeout)
        check_seconds("expiry", self.expiry)


T = TypeVar("T")


class _Kept(Generic[T]):
    """An entry, the time of its last use, and the number of calls that use it now."""

    __slots__ = ("entry", "touched", "users")

    def __init__(self, entry: T, touched: float) -> None:
        self.entry = entry
        self.touched = touched
        self.users = 0


class BatchBuffer(Generic[T]):
    """Entries by batch id. It is bounded, so that data loaders wait; unused entries expire.

    Safe to call from several threads.

    Args:
        rank: number of the embedding worker.
        incarnation: of the embedding worker.
        options: bounds and deadlines.
        clock: seconds, for expiry.
    """

    def __init__(
        self, rank: int, incarnation: int, options: WorkerOptions, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rank, self._incarnation = rank, incarnation
        self._options = options
        self._clock = clock
        self._changed = threading.Condition()
        self._kept: OrderedDict[int, _Kept[T]] = OrderedDict()
        """In the order of `touched`."""
        self._retired = False
        self._counter = 0
        self._counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, entry: T) -> int:
        """Keeps an entry and returns its batch id; blocks while the buffer is full.

        Raises:
            MovedError: `retire` was called.
            DeadlineError: the buffer stayed full.
        """
        with self._changed:
            deadline = Deadline(self._options.timeout)
            self._expire()
            while len(self._kept) >= self._options.capacity and not self._retired:
                if deadline.passed:
                    raise DeadlineError(
                        f"Embedding worker {self._rank} (incarnation {self._incarnation}) has buffered "
                        f"{len(self._kept)} batches, its most, for {self._options.timeout:g} s: NN workers have "
                        "neither pushed nor released any. See what holds them up, or raise `capacity`.",
                        rank=self._rank,
                        buffered=len(self._kept),
                        seconds=self._options.timeout,
                    )
                oldest = next(iter(self._kept.values())).touched
                self._changed.wait(max(0.0, min(deadline.left, oldest + self._options.expiry - self._clock())))
                self._expire()
            if self._retired:
                raise MovedError(
                    f"Embedding worker {self._rank} (incarnation {self._incarnation}) is leaving: register with "
                    "another one.",
                    rank=self._rank,
                )
            batch_id = BatchId(self._rank, self._incarnation, self._counter).pack()
            self._counter += 1
            self._kept[batch_id] = _Kept(entry, self._clock())
            self._counts["registered"] += 1
            return batch_id

    @contextlib.contextmanager
    def use(self, batch_id: int) -> Iterator[T]:
        """Yields the entry of a batch, which does not expire while it is used.

        Raises:
            StaleBatchError: the batch is unknown, forgotten, or of another incarnation.
        """
        with self._changed:
            self._expire()
            kept = self._kept.get(batch_id)
            if kept is None:
                self._counts["stale"] += 1
                raise self._stale(batch_id)
            kept.users += 1
            self._touch(batch_id, kept)
        try:
            yield kept.entry
        finally:
            with self._changed:
                kept.users -= 1
                if self._kept.get(batch_id) is kept:
                    self._touch(batch_id, kept)

    def forget(self, batch_id: int, what: str) -> None:
        """Drops an entry, if it is there, and counts it as `what`."""
        with self._changed:
            if self._kept.pop(batch_id, None) is not None:
                self._counts[what] += 1
                self._changed.notify_all()

    def retire(self) -> None:
        """Refuses new entries; waiting calls of `put` raise MovedError."""
        with self._changed:
            self._retired = True
            self._changed.notify_all()

    def statistics(self) -> dict[str, int]:
        """Returns counters: entries `buffered` now; `registered`, `pushed`, `released`, `expired`, `stale` so far."""
        with self._changed:
            self._expire()
            names = ("registered", "pushed", "released", "expired", "stale")
            return {"buffered": len(self._kept), **{name: self._counts[name] for name in names}}

    def _touch(self, batch_id: int, kept: _Kept[T]) -> None:
        kept.touched = self._clock()
        self._kept.move_to_end(batch_id)

    def _expire(self) -> None:
        now = self._clock()
        while self._kept:
            batch_id, kept = next(iter(self._kept.items()))
            if kept.touched + self._options.expiry > now:
                return
            if kept.users:
                self._touch(batch_id, kept)
                continue
            del self._kept[batch_id]
            self._counts["expired"] += 1
            self._changed.notify_all()

    def _stale(self, batch_id: int) -> StaleBatchError:
        rank, incarnation, _ = BatchId.unpack(batch_id)
        if (rank, incarnation) != (self._rank, self._incarnation):
            reason = (
                f"it lay at embedding worker {rank}, incarnation {incarnation}, and this is {self._rank}, incarnation "
                f"{self._incarnation}; what it had is lost"
            )
        else:
            reason = (
                "its gradient was pushed, it was released, or nobody called for it within "
                f"{self._options.expiry:g} s. Call backward once per batch, before drawing the next"
            )
        return StaleBatchError(f"Batch {batch_id:#x} is not buffered: {reason}.", batch_id=batch_id)
