"""A stream that data loaders read, as an NN worker has it (docs/reference/protocol.md, section 13)."""

from __future__ import annotations

from collections.abc import Callable

from persia.membership.data_loaders import DataLoaders
from persia.membership.directory import Roster
from persia.services import DataLoader, StreamLog
from persia.telemetry.metrics import Metric
from persia.types import Delivery, Feed, OffsetRange, Offsets, loader_of

__all__ = ["RecordedStream", "StreamLoaders"]

LOOKUP_SECONDS = 1.0
"""Maximum wait of a lookup, before the NN worker looks whether it was asked to stop."""

BEYOND = 1 << 62
"""A batch number that no stream reaches."""

KEPT = 256
"""Batches to keep below the position: those of NN workers that have died may be handed out again."""


class RecordedStream:
    """The position of a run in a stream whose record is elsewhere: a `persia.services.StreamPosition`.

    Args:
        log: the record.
        begins: whether `begin` starts a record; else it has been started for this NN worker.
        commit: reports offsets of a complete checkpoint.
        observe: returns metrics.
    """

    def __init__(
        self,
        log: StreamLog,
        begins: bool,
        commit: Callable[[Offsets], None],
        observe: Callable[[], list[Metric]] = list,
    ) -> None:
        self.log = log
        self.stopping: Callable[[], bool] = lambda: False
        self._begins = begins
        self._commit = commit
        self._observe = observe

    @property
    def interrupted(self) -> bool:
        """Whether the record was closed before the end of the stream, by whichever NN worker was asked to stop."""
        return self.log.lookup(BEYOND, BEYOND, 0.0).interrupted

    def begin(self, number: int, offsets: Offsets, stopping: Callable[[], bool]) -> None:
        """Starts to read; see `persia.services.StreamPosition`."""
        self.stopping = stopping
        if self._begins:
            self.log.begin_stream(number, offsets, True)

    def offsets(self, number: int) -> Offsets:
        """Returns where a batch begins."""
        return self.log.stream_offsets(number)

    def forget(self, below: int) -> None:
        """Forgets batches of lower numbers."""
        self.log.covered(below - KEPT)

    def commit(self, offsets: Offsets) -> None:
        """Reports the offsets of a complete checkpoint."""
        self._commit(offsets)

    def observe(self) -> list[Metric]:
        """Returns metrics."""
        return self._observe()


class StreamLoaders:
    """The data loaders of a stream as one `DataLoader`, which finds batches by the record. Thread-safe.

    Args:
        loaders: all data loaders.
        begin: gives each its share of a feed.
        stream: the position of this NN worker.
        nn_workers: number of NN workers.
        timeout: deadline of a call in seconds, retries included; the wait for a batch to be recorded has none.
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
        """Returns a batch; waits until it is recorded, and with it the step that it is in.

        Args:
            rank: of this NN worker.
            epoch: number of the pass.
            number: of the batch.
        """
        last = number + self._nn_workers - 1 - rank
        return self._take(rank, epoch, number, last)

    def take_on_demand(self, epoch: int, number: int) -> Delivery:
        """Returns a batch to whichever NN worker has drawn its number; waits until it is recorded."""
        return self._take(0, epoch, number, number)

    def awaited(self) -> bool:
        """Returns whether an NN worker waits for the stream."""
        return self._stream.log.awaited()

    def end(self) -> None:
        """Ends the reading of all."""
        self._loaders.end()

    def statistics(self) -> dict[str, int]:
        """Returns the counters, summed."""
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

    def _taken(self, found: OffsetRange, rank: int, epoch: int, number: int) -> Delivery:
        operation = f"take of batch {number}"

        def take(roster: Roster[DataLoader]) -> Delivery:
            if not (loaders := roster.alive()):
                raise self._loaders.directory.absent(self._timeout, operation)
            return loaders[loader_of(found.partition, len(loaders))].service.take(rank, epoch, number)

        return self._loaders.directory.call(take, self._timeout)
