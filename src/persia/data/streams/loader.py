"""The data loader of a stream, and a view of all of them as one (docs/reference/protocol.md, section 13)."""

from __future__ import annotations

import functools
from collections.abc import Callable

from persia.batching.batch import Batch
from persia.data.loader import FRESH_SECONDS, RETAINED_ON_DEMAND, Loader
from persia.data.streams.recorded import RecordedStream, Stopped
from persia.errors import DeadlineError
from persia.membership.data_loaders import DataLoaders
from persia.membership.directory import Directory, Roster
from persia.schema import Schema
from persia.services import DataLoader, EmbeddingWorker, SharedStream, StreamLog, StreamShare
from persia.telemetry.logs import get_logger
from persia.telemetry.metrics import Metric
from persia.types import Delivery, Feed, OffsetRange, loader_of

__all__ = ["StreamLoader", "StreamLoaders"]

LOG = get_logger("persia.data")

LOOK_AHEAD = 64
"""Number of records requested in one call when recorded batches are read again."""

LOOKUP_SECONDS = 1.0
"""Maximum wait of a lookup before the NN worker checks whether to stop."""

REPORT_SECONDS = 1.0
"""Pause before reading is retried, after a failure that could not be reported."""


class StreamLoader(Loader):
    """Reads its partitions of a stream, and records each batch before delivering it. Thread-safe.

    The number of a batch is known only once it is recorded; NN workers then request it from the data loader of its
    partition. A data loader that is new, or has lost the batch, looks it up in the record and reads it again.

    Args:
        source: the stream. It is not shared with other data loaders of this process.
        log: the record, at the coordinator.
        schema: schema that the batches must match.
        workers: the embedding workers.
        accumulation_steps: see `Loader`.
        timeout: see `Loader`.
        fresh: see `Loader`.
    """

    def __init__(
        self,
        source: SharedStream,
        log: StreamLog,
        schema: Schema,
        workers: Directory[EmbeddingWorker],
        accumulation_steps: int = 1,
        timeout: float = 600.0,
        fresh: float = FRESH_SECONDS,
    ) -> None:
        super().__init__(source, schema, workers, accumulation_steps, timeout, fresh)
        self._stream = source
        self._log = log
        self._schema = schema
        self._share: StreamShare | None = None
        self._share_of: tuple[int, ...] = ()
        """Identity of the reading to which the open share belongs."""
        self._ranges: dict[int, OffsetRange] = {}
        """Ranges of the retained batches."""
        self._recorded: dict[int, OffsetRange] = {}
        """Ranges of batches of this loader's partitions that follow a batch that was read again."""
        self._again: set[int] = set()
        """Numbers of retained batches that were read again."""
        self._failed: Feed | None = None
        """The feed in which new batches cannot be read."""

    def observe(self) -> list[Metric]:
        """Returns the metrics of this data loader's part of the stream."""
        return self._stream.observe()

    # --- which batches; under the lock ----------------------------------------------------------------------------

    def _reads_ahead(self, feed: Feed, number: int) -> bool:
        return number in self._ranges and loader_of(self._ranges[number].partition, feed.loaders) == feed.loader

    def _reads(self, feed: Feed, number: int) -> bool:
        return True  # Every batch is in the record.

    def _forget_passed(self, rank: int, number: int) -> None:
        super()._forget_passed(rank, number)
        # Batches that were taken elsewhere while the number of data loaders changed.
        for gone in [n for n in self._entries if n < number - RETAINED_ON_DEMAND]:
            self._forget(gone)

    def _forget(self, number: int) -> None:
        super()._forget(number)
        self._ranges.pop(number, None)
        self._again.discard(number)

    def _forget_all(self) -> None:
        super()._forget_all()
        self._recorded.clear()

    def _next_reading(self, feed: Feed) -> Callable[[], None] | None:
        missing = min((number for number in self._waiting if number not in self._entries), default=None)
        if missing is None:
            # Batches that were read again ahead may already have been taken, so new batches do not wait for them.
            untaken = [number for number, entry in self._entries.items() if not entry.taken]
            new = sum(number not in self._again for number in untaken)
            capacity = feed.ahead * feed.nn_workers
            if new >= capacity:
                return None
            if len(untaken) - new < capacity:
                missing = min((number for number in self._recorded if number not in self._entries), default=None)
        if missing is not None:
            self._doing = f"reading batch {missing} again"
            return functools.partial(self._read_again, feed, missing)
        if self._failed is feed:
            return None
        self._doing = "waiting for messages"
        return functools.partial(self._read_new, feed)

    # --- the thread that reads ------------------------------------------------------------------------------------

    def _read_again(self, feed: Feed, number: int) -> None:
        try:
            offsets = self._recorded.pop(number, None) or self._find(feed, number)
            with self.tracer.span("read"):
                batch = self._checked(self._open_share(feed).read(offsets))
            with self._changed:
                self._again.add(number)
            self._retain(feed, number, offsets, batch)
        except Stopped:
            return
        except Exception as error:
            self._close()
            self._fail(feed, number, error)

    def _read_new(self, feed: Feed) -> None:
        try:
            with self.tracer.span("read"):
                new = self._open_share(feed).poll()
            if new is not None:
                self._retain(feed, new.number, new.range, self._checked(new.batch))
        except Stopped:
            return
        except Exception as error:
            self._close()
            self._report(feed, error)

    def _report(self, feed: Feed, error: Exception) -> None:
        """Reports to NN workers that new batches cannot be read; if that fails, reading is retried."""
        message = f"Data loader {feed.loader}: {self._named(error).message}"
        with self._changed:
            if self._feed is not feed:  # Another reading has begun, which this failure does not concern.
                return
        try:
            self._log.fail_stream(isinstance(error, DeadlineError), message)
        except Exception as failed:
            LOG.warning("Cannot report that reading has failed (%s), so it is retried. %s", failed, message)
            with self._changed:
                self._changed.wait(REPORT_SECONDS)
            return
        with self._changed:
            self._failed = feed

    def _find(self, feed: Feed, number: int) -> OffsetRange:
        """Returns the range of a recorded batch; notes the ranges that follow, which will be requested next."""
        ranges = self._log.recorded(number, LOOK_AHEAD)
        with self._changed:
            self._recorded = {
                number + i: offsets
                for i, offsets in enumerate(ranges)
                if i and loader_of(offsets.partition, feed.loaders) == feed.loader
            }
        return ranges[0]

    def _retain(self, feed: Feed, number: int, offsets: OffsetRange, batch: Batch) -> None:
        with self._changed:
            if self._feed is feed:
                self._ranges[number] = offsets
            self._add(feed, number, batch)

    def _checked(self, batch: Batch) -> Batch:
        batch.validate(self._schema)
        return batch

    def _open_share(self, feed: Feed) -> StreamShare:
        """Returns the share of this feed; opens it unless it is open."""
        identity = _identity(feed)
        if self._share is None or self._share_of != identity:
            self._close()
            stopping = functools.partial(self._is_outdated, identity)
            self._share = self._stream.share(self._log, feed.loader, feed.loaders, stopping)
            self._share_of = identity
        return self._share

    def _is_outdated(self, share_of: tuple[int, ...]) -> bool:
        feed = self._feed
        return feed is None or _identity(feed) != share_of

    def _close(self) -> None:
        share, self._share = self._share, None
        if share is None:
            return
        try:
            share.close()
        except Exception:  # The next share opens its own connection.
            LOG.warning("The connection of data loader %s could not be closed.", self._share_of, exc_info=True)


class StreamLoaders:
    """The data loaders of a stream as one `DataLoader`, which locates batches by the record. Thread-safe.

    Args:
        loaders: all data loaders.
        begin: gives each data loader its share of a feed.
        stream: the position of this NN worker.
        nn_workers: number of NN workers.
        timeout: deadline of a call in seconds, including retries; waiting for a batch to be recorded has no deadline.
    """

    def __init__(
        self,
        loaders: DataLoaders,
        begin: Callable[[Feed], None],
        stream: RecordedStream,
        nn_workers: int,
        timeout: float,
    ) -> None:
        self._loaders = loaders
        self._begin = begin
        self._stream = stream
        self._nn_workers = nn_workers
        self._timeout = timeout

    def begin(self, feed: Feed) -> None:
        """Starts a feed; returns once all data loaders have begun."""
        self._begin(feed)

    def take(self, rank: int, epoch: int, number: int) -> Delivery:
        """Returns a batch; waits until all batches of its step are recorded.

        Args:
            rank: rank of this NN worker.
            epoch: number of the pass.
            number: number of the batch.
        """
        last = number + self._nn_workers - 1 - rank
        return self._take(rank, epoch, number, last)

    def take_on_demand(self, epoch: int, number: int) -> Delivery:
        """Returns a batch to the NN worker that has drawn its number; waits until the batch is recorded."""
        return self._take(0, epoch, number, number)

    def awaited(self) -> bool:
        """Returns whether an NN worker waits for the stream."""
        return self._stream.log.awaited()

    def end(self) -> None:
        """Ends reading in all data loaders."""
        self._loaders.end()

    def statistics(self) -> dict[str, int]:
        """Returns the counters, summed over all data loaders."""
        return self._loaders.statistics()

    def _take(self, rank: int, epoch: int, number: int, last: int) -> Delivery:
        stream = self._stream
        while True:
            recorded = stream.log.lookup(number, last, LOOKUP_SECONDS)
            if recorded.over:
                return Delivery(number, None)
            if recorded.range is not None:
                return self._taken(recorded.range, rank, epoch, number)
            if stream.stopping():
                stream.log.close_stream()  # For all NN workers at the same batch.

    def _taken(self, offsets: OffsetRange, rank: int, epoch: int, number: int) -> Delivery:
        operation = f"take of batch {number}"

        def take(roster: Roster[DataLoader]) -> Delivery:
            if not (loaders := roster.alive()):
                raise self._loaders.directory.absent(self._timeout, operation)
            return loaders[loader_of(offsets.partition, len(loaders))].service.take(rank, epoch, number)

        return self._loaders.directory.call(take, self._timeout)


def _identity(feed: Feed) -> tuple[int, ...]:
    """Returns the identity of what one data loader reads."""
    return (*feed.reading, feed.loader, feed.loaders)
