"""The data loader (Persia paper, section 4.1, steps 1 and 2; docs/reference/protocol.md, section 4)."""

from __future__ import annotations

import copy
import functools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from persia.batching.batch import Batch
from persia.batching.sampling import is_sampled, sampled_ids
from persia.data.cursor import Cursor
from persia.data.registrar import Registrar
from persia.errors import DataError, DeadlineError, MovedError, PersiaError
from persia.membership.directory import Directory
from persia.retry import Deadline
from persia.schema import Schema
from persia.services import EmbeddingWorker, Seekable
from persia.telemetry.logs import get_logger
from persia.telemetry.metrics import WaitClock
from persia.telemetry.tracing import Tracer
from persia.types import Delivery, Feed, Int64Array

__all__ = ["FRESH_SECONDS", "Loader"]

LOG = get_logger("persia.data")

FRESH_SECONDS = 300.0
"""Minimum time for which embedding workers keep a batch without a lookup."""


class _Entry:
    """A batch that has been read. It is retained until its NN worker requests a later one.

    Attributes:
        batch_id: batch id; None while it has to be registered (again).
        taken: whether its NN worker has received it with the batch id.
        id_counts: id counts of a sampled batch; see `RegisteredBatch`.
        registered: time of its registration.
    """

    def __init__(self, rank: int, batch: Batch, id_counts: Int64Array | None = None) -> None:
        self.rank = rank
        self.batch = batch
        self.id_counts = id_counts
        self.batch_id: int | None = None
        self.taken = False
        self.registered = 0.0


RETAINED_ON_DEMAND = 256
"""Number of taken batches to keep for repeated calls, if NN workers take batches in any order."""


class _Failure(NamedTuple):
    """The error that stopped reading, and the number of its batch."""

    number: int
    error: PersiaError


class Loader:
    """Prefetches batches for NN workers and registers their ID features at embedding workers. Thread-safe.

    A background thread reads and registers from `begin` to `end`. Batches are checked against the schema.

    Args:
        source: source of batches. A `Sharded` one skips other loaders' batches cheaply; several loaders need at least
            a `Seekable` one. A single loader also reads any iterable in order.
        schema: schema that the batches must match.
        workers: the embedding workers. Call `check_workers` after each change of it.
        accumulation_steps: number of consecutive batches of an NN worker that go to the same embedding worker.
        timeout: seconds that `take` waits, and that a batch waits for an embedding worker.
        fresh: minimum seconds for which embedding workers keep a batch without a lookup. A batch that was ready for
            longer, for example during an evaluation, is registered again before it is delivered.
    """

    def __init__(
        self,
        source: Iterable[Batch] | Seekable,
        schema: Schema,
        workers: Directory[EmbeddingWorker],
        accumulation_steps: int = 1,
        timeout: float = 600.0,
        fresh: float = FRESH_SECONDS,
    ) -> None:
        self._fresh = fresh
        self._cursor = Cursor(source, schema)
        self._features = [feature.name for feature in schema.id_features]
        self._source = type(source).__name__
        self._timeout = timeout
        self._changed = threading.Condition()  # Guards all that follows.
        self._registrar = Registrar(workers, accumulation_steps, timeout)
        self._feed: Feed | None = None
        self._ended = False
        self._thread: threading.Thread | None = None
        self._entries: dict[int, _Entry] = {}
        self._asked: dict[int, int] = {}
        """Highest requested number by rank; lower ones are no longer needed."""
        self._waiting: list[int] = []
        self._position = 0
        self._end: int | None = None
        self._failure: _Failure | None = None
        self._unwanted: deque[int] = deque()
        self._doing = "waiting for `begin`"
        self._counts: Counter[str] = Counter()
        self.tracer = Tracer()
        """Records reads and registrations."""
        self.idle = WaitClock()
        """Pauses of reading, as enough batches are ready or none are wanted."""

    # --- calls --------------------------------------------------------------------------------------------------

    def check_workers(self) -> None:
        """Schedules a new registration of untaken batches whose embedding worker is gone.

        Returns immediately. A leaving embedding worker keeps its batches and gets no new ones.
        """
        with self._changed:
            self._failure = None
            for entry in self._entries.values():
                if not entry.taken:
                    self._check_registered(entry)
            self._changed.notify_all()

    def begin(self, feed: Feed) -> None:
        """Starts reading a pass, or another shard of the same pass. Returns immediately. See `services.DataLoader`.

        A feed of another generation of NN workers starts over, so no batch id is delivered twice.

        Raises:
            DataError: several loaders share a source that cannot seek.
        """
        self._cursor.check(feed)
        with self._changed:
            old = self._feed
            if feed == old:
                return
            if old is not None and old.reading == feed.reading:
                for number in [n for n in self._entries if not self._reads_ahead(feed, n)]:
                    self._forget(number)
                first = min(self._asked.values(), default=feed.start)
            else:
                self._forget_all()
                first, self._end = feed.start, None
            self._position = first + (feed.loader - first) % feed.loaders
            self._feed, self._failure, self._ended = feed, None, False
            if self._thread is None:
                self._cursor.rewind()
                name = f"data loader {feed.loader}"
                self._thread = threading.Thread(target=self._read_ahead, name=name, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def take(self, rank: int, epoch: int, number: int) -> Delivery:
        """Takes batch `number` of a pass; blocks until it is ready. See `services.DataLoader`.

        Raises:
            DataError: the batch cannot be read, does not match the schema or belongs to another rank; or the pass is
                over.
            DeadlineError: the source or the embedding workers were late; the message names them.
            MovedError: another loader reads the batch, or this one has ended.
        """
        deadline = Deadline(self._timeout)
        with self._changed:
            while True:
                feed = self._await_feed(rank, epoch, number, deadline)
                self._forget_passed(rank, number)
                if not self._ready(number):
                    self._failure = None  # Calls may be repeated, so retry.
                self._waiting.append(number)
                self._changed.notify_all()
                try:
                    ended = self._changed.wait_for(functools.partial(self._wait_over, feed, number), deadline.left)
                finally:
                    self._waiting.remove(number)
                if self._feed is not feed:
                    continue
                entry = self._entries.get(number)
                if entry is not None and entry.batch_id is not None:
                    return self._deliver(number, entry, entry.batch_id)
                if self._end is not None and number >= self._end:
                    return Delivery(number, None)
                if not ended:
                    raise self._late(number, f"batch {number} of pass {epoch} for NN worker {rank}")
                if self._failure is not None:
                    # Each thread raises its own copy, as raising writes the traceback to the error.
                    raise copy.copy(self._failure.error) from self._failure.error

    def end(self) -> None:
        """Stops reading and releases the ready batches. Waits for a read or registration in progress.

        Raises:
            DeadlineError: the read or registration did not end in time.
        """
        with self._changed:
            self._forget_all()
            self._feed, self._ended = None, True
            thread = self._thread
            self._changed.notify_all()
        if thread is not None:
            thread.join(self._timeout)
            if thread.is_alive():
                raise self._late(None, "the end")

    def statistics(self) -> dict[str, int]:
        """Returns batches `read`, `taken`, `registered`, `registered_again` and `ready`; `rows` and `bytes` read."""
        with self._changed:
            names = ("read", "taken", "registered", "registered_again", "rows", "bytes")
            ready = sum(not e.taken and e.batch_id is not None for e in self._entries.values())
            return {"ready": ready, **{name: self._counts[name] for name in names}}

    # --- which batches; under the lock ----------------------------------------------------------------------------

    def _reads_ahead(self, feed: Feed, number: int) -> bool:
        """Returns whether this loader reads a batch ahead."""
        return number % feed.loaders == feed.loader

    def _reads(self, feed: Feed, number: int) -> bool:
        """Returns whether this loader reads a batch on request."""
        return self._reads_ahead(feed, number)

    # --- parts of `take`; under the lock --------------------------------------------------------------------------

    def _await_feed(self, rank: int, epoch: int, number: int, deadline: Deadline) -> Feed:
        """Waits for the feed of this pass and returns it."""
        reached = self._changed.wait_for(
            lambda: self._ended or (self._feed is not None and self._feed.epoch >= epoch), deadline.left
        )
        if self._ended:
            raise MovedError(f"This data loader has ended; request batch {number} from another one.", number=number)
        if not reached or self._feed is None:
            raise self._late(number, f"the beginning of pass {epoch}")
        feed = self._feed
        if not self._reads(feed, number):
            raise MovedError(
                f"Batch {number} is read by data loader {number % feed.loaders} of {feed.loaders}, not by "
                f"{feed.loader}; refresh the membership and call that one.",
                number=number,
            )
        before = number < feed.start and not feed.on_demand  # On demand, it may have belonged to a dead NN worker.
        if epoch != feed.epoch or before or (number - feed.start) % feed.nn_workers != rank:
            raise DataError(
                f"Batch {number} of pass {epoch} is not NN worker {rank}'s: pass {feed.epoch} is read from batch "
                f"{feed.start} on, for {feed.nn_workers} NN workers in turn.",
                number=number,
                rank=rank,
            )
        return feed

    def _forget_passed(self, rank: int, number: int) -> None:
        on_demand = self._feed is not None and self._feed.on_demand
        if on_demand:
            # The owners of numbers are unknown, so a lower one may still be taken, or taken again.
            passed = [n for n, e in self._entries.items() if e.taken and n < number - RETAINED_ON_DEMAND]
        else:
            self._asked[rank] = max(number, self._asked.get(rank, number))
            passed = [n for n, e in self._entries.items() if e.rank == rank and n < number]
        for gone in passed:
            self._forget(gone)
        if number in self._entries:
            self._check_registered(self._entries[number])

    def _ready(self, number: int) -> bool:
        return number in self._entries and self._entries[number].batch_id is not None

    def _wait_over(self, feed: Feed, number: int) -> bool:
        return (
            self._feed is not feed
            or self._ready(number)
            or (self._end is not None and number >= self._end)
            or (self._failure is not None and self._failure.number <= number)
        )

    def _deliver(self, number: int, entry: _Entry, batch_id: int) -> Delivery:
        if not entry.taken:
            entry.taken = True
            self._counts["taken"] += 1
            self._changed.notify_all()
        batch = entry.batch
        return Delivery(number, batch.registered(batch_id, entry.id_counts))

    def _late(self, number: int | None, what: str) -> DeadlineError:
        loader = self._feed.loader if self._feed is not None else "without a feed"
        doing = f"{self._doing}: {self._registrar.doing}" if "registering" in self._doing else self._doing
        return DeadlineError(
            f"Data loader {loader} (source {self._source}): {what} was not there within {self._timeout:g} s; it is "
            f"{doing}. Remove the cause of the delay, or raise `timeout`.",
            number=number,
            seconds=self._timeout,
        )

    def _check_registered(self, entry: _Entry) -> None:
        """Schedules a new registration if the embedding worker is gone, or if its entry may have expired."""
        if entry.batch_id is None:
            return
        old = not entry.taken and time.monotonic() - entry.registered > self._fresh
        if old or self._registrar.lost(entry.batch_id):
            if old:
                self._unwanted.append(entry.batch_id)
            entry.batch_id, entry.taken = None, False
            self._counts["registered_again"] += 1

    def _forget(self, number: int) -> None:
        entry = self._entries.pop(number)
        if not entry.taken and entry.batch_id is not None:
            self._unwanted.append(entry.batch_id)

    def _forget_all(self) -> None:
        for number in list(self._entries):
            self._forget(number)
        self._asked.clear()

    # --- the thread that reads ------------------------------------------------------------------------------------

    def _read_ahead(self) -> None:
        while True:
            with self._changed:
                job = self._next_job()
                while job is None and not self._ended:
                    self._doing = "waiting for free space"
                    with self.idle.waiting():
                        self._changed.wait()
                    job = self._next_job()
                if job is None:
                    self._thread = None
                    break
            job()
        self._close()

    def _close(self) -> None:
        """Closes the source, as reading ends."""
        self._cursor.close()

    def _next_job(self) -> Callable[[], None] | None:
        if self._unwanted:
            return functools.partial(self._registrar.release, self._unwanted.popleft())
        feed = self._feed
        if feed is None or self._failure is not None:
            return None
        open_ = min((n for n, entry in self._entries.items() if entry.batch_id is None), default=None)
        if open_ is not None:
            self._doing = f"registering batch {open_}"
            return functools.partial(self._register, feed, open_)
        return self._next_reading(feed)

    def _next_reading(self, feed: Feed) -> Callable[[], None] | None:
        number = self._next_number(feed)
        if number is None:
            return None
        self._doing = f"reading batch {number}"
        return functools.partial(self._read, feed, number)

    def _next_number(self, feed: Feed) -> int | None:
        """Returns the next number to read: a number that an NN worker waits for, else in order while there is capacity.

        Numbers shortly before a requested one are read even without capacity: a slower NN worker will request them,
        and some sources cannot seek back.
        """
        ends = self._end is not None
        missing = [n for n in self._waiting if n not in self._entries and not (ends and n >= (self._end or 0))]
        requested = min(missing, default=None)
        number = self._position
        near = feed.loaders * feed.nn_workers * feed.ahead
        if requested is not None and not 0 <= requested - number <= near:
            number = requested if requested < number else max(number, requested - near)
        while number in self._entries or number < self._asked.get(self._rank(feed, number), 0):
            if number == requested:
                break
            number += feed.loaders
        if ends and number >= (self._end or 0):
            return requested
        rank = self._rank(feed, number)
        untaken = sum(entry.rank == rank and not entry.taken for entry in self._entries.values())
        return number if untaken < feed.ahead or (requested is not None and number < requested) else requested

    @staticmethod
    def _rank(feed: Feed, number: int) -> int:
        return (number - feed.start) % feed.nn_workers

    def _read(self, feed: Feed, number: int) -> None:
        try:
            with self.tracer.span("read"):
                batch = self._cursor.read(feed, number)
            with self._changed:
                if self._feed is feed:
                    self._position = number + feed.loaders
                    if batch is None:
                        self._end = number
                if batch is not None:
                    self._add(feed, number, batch)
                self._changed.notify_all()
        except Exception as error:
            self._fail(feed, number, error)

    def _add(self, feed: Feed, number: int, batch: Batch) -> None:
        """Counts a batch that was read, and retains it unless the feed has changed. Under the lock."""
        self._counts["read"] += 1
        self._counts["rows"] += len(batch)
        self._counts["bytes"] += _bytes(batch)
        if self._feed is feed:
            counts = sampled_ids(batch, self._features) if is_sampled(number) else None
            self._entries[number] = _Entry(self._rank(feed, number), batch, counts)
            self._changed.notify_all()

    def _register(self, feed: Feed, number: int) -> None:
        with self._changed:
            entry = self._entries.get(number)
        if entry is None:
            return
        try:
            with self.tracer.span("register"):
                batch_id = self._registrar.register(feed, number, entry.batch, lambda: self._feed is not feed)
        except Exception as error:
            self._fail(feed, number, error)
            return
        if batch_id is None:
            return
        with self._changed:
            self._counts["registered"] += 1
            if self._entries.get(number) is entry and not self._registrar.lost(batch_id):
                entry.batch_id, entry.registered = batch_id, time.monotonic()
            else:
                self._unwanted.append(batch_id)
            self._changed.notify_all()

    def _fail(self, feed: Feed, number: int, error: Exception) -> None:
        failure = _Failure(number, self._named(error))
        with self._changed:
            if self._feed is feed:
                self._failure = failure
                self._position = min(self._position, number)
                self._changed.notify_all()

    def _named(self, error: Exception) -> PersiaError:
        """Returns the error to raise in `take`. Logs the traceback if it is not a `PersiaError`."""
        if isinstance(error, PersiaError):
            return error
        LOG.error("Unexpected error while %s:", self._doing, exc_info=error)
        reported = DataError(
            f"{type(error).__name__} while {self._doing}: {error}. The log of the data loader has the traceback; "
            f"correct the source ({self._source}) if it is from there, or else report it."
        )
        reported.__cause__ = error
        return reported


def _bytes(batch: Batch) -> int:
    columns = batch.id_features.values()
    ids = sum(c.nbytes for c in columns)
    parts = (batch.dense, batch.labels, batch.day, batch.weights, batch.groups)
    return ids + sum(part.nbytes for part in parts if part is not None)
