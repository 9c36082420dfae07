"""Positions in streams: records of batches by number, in this process or elsewhere, and iteration over them."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Generic, Protocol, TypeVar

from persia.batching.batch import Batch
from persia.data.streams.offset_log import OffsetLog, unrecorded
from persia.services import StreamLog, StreamShare
from persia.telemetry.metrics import Metric
from persia.types import Offsets, SourceFingerprint, SourcePart

__all__ = ["BatchRecord", "LocalStream", "LoggedStream", "RecordedStream", "Stopped"]

E = TypeVar("E")

BEYOND = 1 << 62
"""A batch number that no stream reaches."""

RETAINED = 256
"""Batches to retain below the position: batches of dead NN workers may be delivered again."""


class Stopped(Exception):  # noqa: N818 - not an error
    """Raised by a stream that was asked to stop, instead of waiting."""


class PositionRecord(Protocol):
    """A record of batches and their offsets. See `persia.services.StreamLog` for its methods."""

    def stream_offsets(self, number: int) -> Offsets:
        """Returns the offsets at which a batch begins: a recorded batch, or the next to be recorded."""

    def covered(self, below: int) -> None:
        """Forgets batches of lower numbers."""


R = TypeVar("R", bound=PositionRecord)


class BatchRecord(Generic[E]):
    """A `PositionRecord` with an entry for each batch, and the position after it. Thread-safe.

    Args:
        stream: name of the kind of stream, for errors.
        number: number of the first batch.
        offsets: offsets at which the first batch begins.
    """

    def __init__(self, stream: str, number: int, offsets: Offsets) -> None:
        self._lock = threading.Lock()
        self._stream = stream
        self._first = number
        self._begin = offsets
        self._batches: list[tuple[E, Offsets]] = []

    @property
    def last(self) -> Offsets:
        """The position after the last batch."""
        with self._lock:
            return self._batches[-1][1] if self._batches else self._begin

    def find(self, number: int) -> E | None:
        """Returns the entry of a batch; None if it is the next to be recorded.

        Raises:
            DataError: the batch was forgotten, or batches before it are not recorded.
        """
        with self._lock:
            index = self._index(number)
            return self._batches[index][0] if index < len(self._batches) else None

    def append(self, entry: E, after: Offsets) -> None:
        """Records the next batch, and the position after it."""
        with self._lock:
            self._batches.append((entry, after))

    def stream_offsets(self, number: int) -> Offsets:
        """Returns the offsets at which a batch begins. Raises the errors of `find`."""
        with self._lock:
            index = self._index(number)
            return self._batches[index - 1][1] if index else self._begin

    def covered(self, below: int) -> None:
        """Forgets batches of lower numbers."""
        with self._lock:
            count = min(max(0, below - self._first), len(self._batches))
            if count:
                self._begin = self._batches[count - 1][1]
                self._first += count
                del self._batches[:count]

    def _index(self, number: int) -> int:
        last = self._first + len(self._batches)
        if not self._first <= number <= last:
            raise unrecorded(self._stream, number, self._first, last)
        return number - self._first


class LocalStream(ABC, Generic[R]):
    """A `persia.services.Stream` with its record in this process, which a subclass fills while it reads.

    Args:
        names: topics or directories to read.
        record: creates a record from the number of its first batch and the offsets of `names` there.
    """

    def __init__(self, names: tuple[str, ...], record: Callable[[int, Offsets], R]) -> None:
        self.interrupted = False
        self._names = names
        self._new_record = record
        self._record = record(0, {})
        self._stopping: Callable[[], bool] = _never

    @abstractmethod
    def commit(self, offsets: Offsets) -> None:
        """Reports that a checkpoint has all before `offsets`; see `persia.services.Stream`."""

    @abstractmethod
    def observe(self) -> list[Metric]:
        """Returns metrics. Thread-safe."""

    @abstractmethod
    def _read(self, record: R, number: int, stopping: Callable[[], bool]) -> Iterator[Batch]:
        """Yields the recorded batches from `number` on, then new batches, each once it is recorded.

        Raises:
            DataError: the batch was forgotten, or is not recorded; or the source cannot be read.
            Stopped: asked to stop.
        """

    def __iter__(self) -> Iterator[Batch]:
        """Iterates from the beginning, with a separate record."""
        return self._batches(self._new_record(0, {}), 0, _never)

    def batches(self, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        """Iterates from batch `start` of the record on: over recorded batches, then over new batches.

        The epoch is ignored, as a stream has one pass. Blocks until batches arrive.

        Raises:
            DataError: the batch was forgotten, or is not recorded; or the source cannot be read.
        """
        self.interrupted = False
        return self._batches(self._record, start, self._stopping)

    def begin(self, number: int, offsets: Offsets, stopping: Callable[[], bool]) -> None:
        """Starts a new record; see `persia.services.Stream`."""
        self._record = self._new_record(number, {name: of for name, of in offsets.items() if self._reads(name)})
        self._stopping = stopping

    def offsets(self, number: int) -> Offsets:
        """Returns the offsets at which a batch begins; see `persia.services.Stream`."""
        return self._record.stream_offsets(number)

    def forget(self, below: int) -> None:
        """Forgets batches of lower numbers."""
        self._record.covered(below)

    def fingerprint(self) -> SourceFingerprint:
        """Returns the names of the topics or directories; offsets are stored separately."""
        return SourceFingerprint("stream", (SourcePart(", ".join(self._names)),))

    def _reads(self, name: str) -> bool:
        """Returns whether a name in `Offsets` belongs to this stream."""
        return name.partition("@")[0] in self._names

    def _batches(self, record: R, number: int, stopping: Callable[[], bool]) -> Iterator[Batch]:
        try:
            yield from self._read(record, number, stopping)
        except Stopped:
            self.interrupted = True


class LoggedStream(LocalStream[OffsetLog]):
    """A `persia.services.SharedStream` whose shares a subclass reads; has the record if one process reads all.

    Args:
        topics: topics to read.
    """

    def __init__(self, topics: tuple[str, ...]) -> None:
        super().__init__(topics, OffsetLog)
        self.topics = topics

    @abstractmethod
    def share(self, log: StreamLog, loader: int, loaders: int, stopping: Callable[[], bool]) -> StreamShare:
        """Opens the share of a data loader; see `persia.services.SharedStream`."""

    def _read(self, record: OffsetLog, number: int, stopping: Callable[[], bool]) -> Iterator[Batch]:
        record.stream_offsets(number)  # Raises for an unknown number.
        with closing(self.share(record, 0, 1, stopping)) as share:
            while True:
                recorded = record.lookup(number, number, 0.0)
                if recorded.range is not None:
                    batch = share.read(recorded.range)
                elif recorded.over:
                    return
                elif (new := share.poll()) is not None:
                    batch = new.batch
                else:
                    continue
                number += 1
                yield batch


class RecordedStream:
    """The position of a run in a stream with a remote record: a `persia.services.StreamPosition`.

    Args:
        log: the record.
        begins: whether `begin` starts a record; otherwise another process has started it.
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
        self.stopping: Callable[[], bool] = _never
        self._begins = begins
        self._commit = commit
        self._observe = observe

    @property
    def interrupted(self) -> bool:
        """Whether an NN worker that was asked to stop closed the record before the end of the stream."""
        return self.log.lookup(BEYOND, BEYOND, 0.0).interrupted

    def begin(self, number: int, offsets: Offsets, stopping: Callable[[], bool]) -> None:
        """Starts reading; see `persia.services.StreamPosition`."""
        self.stopping = stopping
        if self._begins:
            self.log.begin_stream(number, offsets, True)

    def offsets(self, number: int) -> Offsets:
        """Returns the offsets at which a batch begins."""
        return self.log.stream_offsets(number)

    def forget(self, below: int) -> None:
        """Forgets batches of lower numbers."""
        self.log.covered(below - RETAINED)

    def commit(self, offsets: Offsets) -> None:
        """Reports the offsets of a complete checkpoint."""
        self._commit(offsets)

    def observe(self) -> list[Metric]:
        """Returns metrics."""
        return self._observe()


def _never() -> bool:
    return False
