"""The interfaces of streams: sources whose batches depend on what has arrived."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol, runtime_checkable

from persia import rpc
from persia.batching.batch import Batch
from persia.services.data import DataLoader, Seekable
from persia.telemetry.metrics import Metric
from persia.types import Delivery, OffsetRange, Offsets, Partition, PartitionBounds, RecordedBatch

__all__ = [
    "LoaderStream",
    "NewBatch",
    "SharedStream",
    "Stream",
    "StreamDataLoader",
    "StreamLog",
    "StreamPosition",
    "StreamShare",
]


@runtime_checkable
class StreamPosition(Protocol):
    """The position of a run in a stream. `offsets` identifies the position outside the process, as in checkpoints."""

    @property
    def interrupted(self) -> bool:
        """Whether the last iteration ended because `stopping` was true, and not at the end of the stream."""

    def begin(self, number: int, offsets: Offsets, stopping: Callable[[], bool]) -> None:
        """Starts a new log.

        Args:
            number: number of the first batch.
            offsets: offsets of its start; topics that are not read are ignored, missing partitions start where the
                source specifies.
            stopping: polled while the source waits for data; once true, iterations end.
        """

    def offsets(self, number: int) -> Offsets:
        """Returns the offsets at the start of a batch that is recorded, or will be recorded next."""

    def forget(self, below: int) -> None:
        """Removes batches with lower numbers, which are not read again."""

    def commit(self, offsets: Offsets) -> None:
        """Commits the offsets that a checkpoint covers to the stream. Never raises."""

    def observe(self) -> list[Metric]:
        """Returns metrics. Thread-safe."""


@runtime_checkable
class Stream(Seekable, StreamPosition, Protocol):
    """A source whose batches depend on what has arrived, possibly without an end.

    It records the content of each batch before it hands out the batch, so `batches` yields the same batches again until
    they are removed.
    """


class StreamLog(Protocol):
    """The log of a stream's batches, with an offset range for each number. On a cluster it is at the coordinator.

    Ranges are recorded before their batches are handed out. Each starts at the end of the previous one of its
    partition, so each message is in exactly one batch, whichever data loader records it. Calls may be repeated.
    """

    def begin_stream(self, number: int, offsets: Offsets, fresh: bool) -> None:
        """Starts a log at batch `number`, or continues the existing one.

        Args:
            number: number of the first requested batch.
            offsets: offsets of its start; missing partitions start where the source specifies.
            fresh: False to continue the log if it has this number, so that the batches from there on do not change.
        """

    def assign(self, bounds: list[PartitionBounds]) -> list[PartitionBounds]:
        """Adds unknown partitions, and returns all known ones with the offsets of their next batches."""

    def record(self, messages: OffsetRange) -> int | None:
        """Records the range of the next batch. Returns its number.

        Returns None and records nothing if the log is closed, or the range does not start at the end of the previous
        one of its partition, because another data loader has recorded these messages.
        """

    @rpc.waits
    def lookup(self, number: int, last: int, timeout: float) -> RecordedBatch:
        """Returns the record of a batch, once batch `last` is recorded, or nothing more will be recorded.

        Args:
            number: number of the batch.
            last: last batch of the step of this batch: either all NN workers start a step, or none does.
            timeout: maximum wait in seconds; after it, returns an empty record.

        Raises:
            DataError: the batch was removed; or reading the stream has failed, see `fail_stream`.
            DeadlineError: reading the stream has failed, as the brokers were late.
        """

    def recorded(self, number: int, most: int) -> list[OffsetRange]:
        """Returns the ranges of batch `number` and the following ones, at most `most`.

        Raises:
            DataError: the batch was removed, or is not recorded.
        """

    def exhaust(self, partitions: list[Partition]) -> None:
        """Reports that partitions of a bounded stream are read to their ends. Once all are, the stream is over."""

    def close_stream(self) -> None:
        """Closes the log until it starts again: recorded batches can be read, but nothing is added."""

    def fail_stream(self, late: bool, message: str) -> None:
        """Reports that reading has failed, to callers that wait for batches.

        Args:
            late: whether the brokers were late: callers get a DeadlineError instead of a DataError.
            message: message of the error.
        """

    def stream_offsets(self, number: int | None) -> Offsets:
        """Returns the offsets at which a batch starts: offsets in earlier batches are all lower.

        Args:
            number: number of the batch; None for the next one to be recorded.

        Raises:
            DataError: the batch was removed, or earlier batches are not recorded.
        """

    def covered(self, below: int) -> None:
        """Removes batches with lower numbers, which a checkpoint or a recovery point covers."""

    def awaited(self) -> bool:
        """Returns whether the stream is idle: a caller waits for a batch that is not recorded."""


class NewBatch(NamedTuple):
    """A batch that has just been recorded.

    Attributes:
        number: its number.
        range: its messages.
        batch: its rows.
    """

    number: int
    range: OffsetRange
    batch: Batch


class StreamShare(Protocol):
    """Reads the partitions of a stream that belong to one data loader. Not thread-safe."""

    def read(self, messages: OffsetRange) -> Batch:
        """Reads a recorded batch, of any partition. Blocks.

        Raises:
            DataError: its messages have been deleted.
            DeadlineError: the source was late.
        """

    def past(self, messages: OffsetRange) -> Iterator[tuple[int, Batch]]:
        """Reads messages that exist, in small batches, each with its first offset. Blocks.

        The messages belong to no batch of the record: they do not count in metrics, and none are written elsewhere.

        Raises:
            DataError: the first of them have been deleted, or cannot be converted.
            DeadlineError: the source was late.
        """

    def poll(self) -> NewBatch | None:
        """Continues reading and records a batch; None if there is none yet. Blocks only for a short time.

        Raises:
            DataError: the source cannot be read.
            DeadlineError: the source was late.
        """

    def close(self) -> None:
        """Closes connections."""


@runtime_checkable
class SharedStream(Stream, Protocol):
    """A stream that several data loaders can share, with an external log.

    Attributes:
        topics: topics that it reads.
    """

    topics: tuple[str, ...]

    def share(self, log: StreamLog, loader: int, loaders: int, stopping: Callable[[], bool]) -> StreamShare:
        """Opens the share of a data loader; see `persia.types.loader_of`.

        Args:
            log: log of the batches.
            loader: number of the data loader.
            loaders: number of data loaders.
            stopping: polled while the source waits; once true, calls of the share raise `Stopped` of the source.
        """


class StreamDataLoader(DataLoader, Protocol):
    """The data loaders of a stream as one."""

    def take_on_demand(self, epoch: int, number: int) -> Delivery:
        """Returns a batch to the NN worker that has drawn its number; waits until the batch is recorded."""

    def awaited(self) -> bool:
        """Returns whether the stream is idle: an NN worker waits for it."""


class LoaderStream(NamedTuple):
    """A stream that data loaders read.

    Attributes:
        stream: the position of the run in the stream.
        loader: the data loaders as one.
    """

    stream: StreamPosition
    loader: StreamDataLoader
