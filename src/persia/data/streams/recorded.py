"""Base of streams: a record of batches in this process, and iteration over them by number."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import closing

from persia.batching.batch import Batch
from persia.data.streams.broker import Stopped
from persia.services import StreamLog, StreamShare
from persia.streams import OffsetLog
from persia.telemetry.metrics import Metric
from persia.types import Offsets, SourceFingerprint, SourcePart

__all__ = ["LoggedStream"]


class LoggedStream(ABC):
    """A `persia.services.SharedStream` of which a subclass reads shares; it has the record where one process reads all.

    Args:
        topics: topics that are read.
    """

    def __init__(self, topics: tuple[str, ...]) -> None:
        self.topics = topics
        self.interrupted = False
        self._log = OffsetLog()
        self._stopping: Callable[[], bool] = _never

    @abstractmethod
    def share(self, log: StreamLog, loader: int, loaders: int, stopping: Callable[[], bool]) -> StreamShare:
        """Opens the share of a data loader; see `persia.services.SharedStream`."""

    @abstractmethod
    def commit(self, offsets: Offsets) -> None:
        """Reports that a checkpoint has all before `offsets`; see `persia.services.Stream`."""

    @abstractmethod
    def observe(self) -> list[Metric]:
        """Returns metrics. Thread-safe."""

    def __iter__(self) -> Iterator[Batch]:
        """Iterates from the beginning on, with a record of its own."""
        return self._batches(OffsetLog(), 0, _never)

    def batches(self, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        """Iterates from batch `start` of the record on: over recorded batches, then over new ones.

        The epoch is ignored: a stream has one pass. Blocks while nothing comes.

        Raises:
            DataError: the batch was forgotten, or is not recorded; or the source cannot be read.
        """
        self.interrupted = False
        return self._batches(self._log, start, self._stopping)

    def begin(self, number: int, offsets: Offsets, stopping: Callable[[], bool]) -> None:
        """Starts a new record; see `persia.services.Stream`."""
        self._log = OffsetLog(number, {t: of for t, of in offsets.items() if t.partition("@")[0] in self.topics})
        self._stopping = stopping

    def offsets(self, number: int) -> Offsets:
        """Returns where a batch begins; see `persia.services.Stream`."""
        return self._log.stream_offsets(number)

    def fingerprint(self) -> SourceFingerprint:
        """Returns the topics; offsets say what of them was read."""
        return SourceFingerprint("stream", (SourcePart(", ".join(self.topics)),))

    def forget(self, below: int) -> None:
        """Forgets batches of lower numbers."""
        self._log.covered(below)

    def _batches(self, log: OffsetLog, number: int, stopping: Callable[[], bool]) -> Iterator[Batch]:
        log.stream_offsets(number)  # Raises for an unknown number.
        try:
            with closing(self.share(log, 0, 1, stopping)) as share:
                while True:
                    recorded = log.lookup(number, number, 0.0)
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
        except Stopped:
            self.interrupted = True


def _never() -> bool:
    return False
