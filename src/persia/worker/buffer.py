"""Buffers batches at an embedding worker between their registration and the push of their gradients."""

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
    """Bounds and deadlines of an embedding worker, and compression of its traffic.

    Args:
        compression: compression of rows and gradients between embedding worker and NN worker: "none", or "fp16" with a
            scale per row (lossy, about half the bytes).
        pool_at: where features are pooled if NN workers permit it: "nn_worker", "embedding_worker", or "auto": at the
            embedding worker, for each table and batch for which that sends fewer bytes. Only tables without un-pooled
            features.
        capacity: maximum number of buffered batches; `register` blocks for more.
        timeout: seconds that `register` waits while the buffer is full.
        expiry: seconds without a call after which a batch is forgotten. Must be longer than the longest push: while a
            push waits for space at a PS, its NN worker does not request later batches.
    """

    compression: Literal["none", "fp16"] = "none"
    pool_at: Literal["nn_worker", "embedding_worker", "auto"] = "nn_worker"
    capacity: int = 4096
    timeout: float = 60.0
    expiry: float = 1800.0

    def __post_init__(self) -> None:
        plain_fields(self)
        check_choice("compression", self.compression, ("none", "fp16"))
        check_choice("pool_at", self.pool_at, ("nn_worker", "embedding_worker", "auto"))
        check_integer("capacity", self.capacity, 1)
        check_seconds("timeout", self.timeout)
        check_seconds("expiry", self.expiry)


T = TypeVar("T")


class _Buffered(Generic[T]):
    """An entry, the time of its last use, and the number of calls in progress that use it."""

    __slots__ = ("entry", "touched", "users")

    def __init__(self, entry: T, touched: float) -> None:
        self.entry = entry
        self.touched = touched
        self.users = 0


class BatchBuffer(Generic[T]):
    """A bounded buffer of entries by batch id. Data loaders block while it is full; unused entries expire.

    Safe to call from several threads.

    Args:
        rank: rank of the embedding worker.
        incarnation: incarnation of the embedding worker.
        options: bounds and deadlines.
        clock: clock in seconds, for expiry.
    """

    def __init__(
        self, rank: int, incarnation: int, options: WorkerOptions, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rank, self._incarnation = rank, incarnation
        self._options = options
        self._clock = clock
        self._changed = threading.Condition()
        self._entries: OrderedDict[int, _Buffered[T]] = OrderedDict()
        """In the order of `touched`."""
        self._retired = False
        self._counter = 0
        self._counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, entry: T) -> int:
        """Buffers an entry and returns its batch id; blocks while the buffer is full.

        Raises:
            MovedError: `retire` was called.
            DeadlineError: the buffer stayed full.
        """
        with self._changed:
            deadline = Deadline(self._options.timeout)
            self._expire()
            while len(self._entries) >= self._options.capacity and not self._retired:
                if deadline.passed:
                    raise DeadlineError(
                        f"Embedding worker {self._rank} (incarnation {self._incarnation}) has buffered "
                        f"{len(self._entries)} batches, its capacity, for {self._options.timeout:g} s: NN workers have "
                        "neither pushed nor released any. Check what delays them, or raise `capacity`.",
                        rank=self._rank,
                        buffered=len(self._entries),
                        seconds=self._options.timeout,
                    )
                oldest = next(iter(self._entries.values())).touched
                self._changed.wait(max(0.0, min(deadline.left, oldest + self._options.expiry - self._clock())))
                self._expire()
            if self._retired:
                raise MovedError(
                    f"Embedding worker {self._rank} (incarnation {self._incarnation}) is leaving; register with "
                    "another one.",
                    rank=self._rank,
                )
            batch_id = BatchId(self._rank, self._incarnation, self._counter).pack()
            self._counter += 1
            self._entries[batch_id] = _Buffered(entry, self._clock())
            self._counts["registered"] += 1
            return batch_id

    @contextlib.contextmanager
    def use(self, batch_id: int) -> Iterator[T]:
        """Yields the entry of a batch, which does not expire while in use.

        Raises:
            StaleBatchError: the batch is unknown, forgotten, or of another incarnation.
        """
        with self._changed:
            self._expire()
            buffered = self._entries.get(batch_id)
            if buffered is None:
                self._counts["stale"] += 1
                raise self._stale(batch_id)
            buffered.users += 1
            self._touch(batch_id, buffered)
        try:
            yield buffered.entry
        finally:
            with self._changed:
                buffered.users -= 1
                if self._entries.get(batch_id) is buffered:
                    self._touch(batch_id, buffered)

    def replace(self, batch_id: int, entry: T, by: T) -> T:
        """Replaces an entry that is in use, unless another call has; returns what is buffered then."""
        with self._changed:
            buffered = self._entries.get(batch_id)
            if buffered is None:
                return by
            if buffered.entry is entry:
                buffered.entry = by
            return buffered.entry

    def forget(self, batch_id: int, what: str) -> None:
        """Drops an entry, if it is buffered, and counts it as `what`."""
        with self._changed:
            if self._entries.pop(batch_id, None) is not None:
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
            return {"buffered": len(self._entries), **{name: self._counts[name] for name in names}}

    def _touch(self, batch_id: int, buffered: _Buffered[T]) -> None:
        buffered.touched = self._clock()
        self._entries.move_to_end(batch_id)

    def _expire(self) -> None:
        now = self._clock()
        while self._entries:
            batch_id, buffered = next(iter(self._entries.items()))
            if buffered.touched + self._options.expiry > now:
                return
            if buffered.users:
                self._touch(batch_id, buffered)
                continue
            del self._entries[batch_id]
            self._counts["expired"] += 1
            self._changed.notify_all()

    def _stale(self, batch_id: int) -> StaleBatchError:
        rank, incarnation, _ = BatchId.unpack(batch_id)
        if (rank, incarnation) != (self._rank, self._incarnation):
            reason = (
                f"it was buffered at embedding worker {rank}, incarnation {incarnation}, and this is {self._rank}, "
                f"incarnation {self._incarnation}; the batches of the former are lost"
            )
        else:
            reason = (
                "its gradient was pushed, it was released, or it was not used within "
                f"{self._options.expiry:g} s. Call backward once per batch, before drawing the next"
            )
        return StaleBatchError(f"Batch {batch_id:#x} is not buffered: {reason}.", batch_id=batch_id)
