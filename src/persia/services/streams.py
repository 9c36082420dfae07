"""The interfaces of streams: sources whose batches depend on what has arrived."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

from persia import rpc
from persia.batching.batch import Batch
from persia.services.data import DataLoader, Seekable
from persia.telemetry.metrics import Metric
from persia.types import Delivery, OffsetRange, Offsets, Partition, PartitionBounds, RecordedBatch

__all__ = [
    "FedStream",
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
    """The position of a run in a stream. `offsets` is its position beyond the process, and part of checkpoints."""

    @property
    def interrupted(self) -> bool:
        """Whether the last iteration ended because `stopping` was true, rather than at the end of the stream."""

    def begin(self, number: int, offsets: Offsets, stopping: Callable[[], bool]) -> None:
        """Starts a new record.

        Args:
            number: number of the first batch.
            offsets: where it begins; topics that are not read are ignored, partitions that are missing begin where the
                source says.
            stopping: polled while the source waits for data; once true, iterations end.
        """

    def offsets(self, number: int) -> Offsets:
        """Returns where a batch begins that is recorded, or that will be recorded next."""

    def forget(self, below: int) -> None:
        """Forgets batches of lower numbers, which are not read again."""

    def commit(self, offsets: Offsets) -> None:
        """Reports to whoever monitors the stream that a checkpoint has all before `offsets`. Never raises."""

    def observe(self) -> list[Metric]:
        """Returns metrics. Thread-safe."""


@runtime_checkable
class Stream(Seekable, StreamPosition, Protocol):
    """A source whose batches depend on what has arrived, perhaps without an end.

    It records the content of each batch before it hands it out, so `batches` yields the same ones again until they are
    forgotten.
    """


class StreamLog(Protocol):
    """The record of a stream's batches, an offset range for each number. On a cluster it is at the coordinator.

    Ranges are recorded before their batches are handed out. Each begins where the last one of its partition ended, so
    no message is in two batches, and none is left out, whoever records. Calls may be repeated.
    """

    def begin_stream(self, number: int, offsets: Offsets, fresh: bool) -> None:
        """Begins a record at batch `number`, or continues the one that there is.

        Args:
            number: number of the first batch that is wanted.
            offsets: where it begins; partitions that are missing begin where the source says.
            fresh: False to keep the record if it has this number, so that the batches from there on are the same again.
        """

    def assign(self, bounds: list[PartitionBounds]) -> list[PartitionBounds]:
        """Adds partitions that are not known, and returns all known ones, with the offsets of their next batches."""

    def record(self, found: OffsetRange) -> int | None:
        """Records the range of the next batch. Returns its number.

        Returns None, and records nothing, if the record is closed, or the range does not begin where the last one of
        its partition ended, because another data loader has recorded that.
        """

    @rpc.waits
    def lookup(self, number: int, last: int, timeout: float) -> RecordedBatch:
        """Returns what is recorded of a batch, once batch `last` is recorded, or nothing more will be.

        Args:
            number: of the batch.
            last: of the step that the batch is in: all NN workers begin a step, or none does.
            timeout: maximum wait in seconds; then an empty record comes back.

        Raises:
            DataError: the batch was forgotten; or reading the stream has failed, see `fail_stream`.
            DeadlineError: likewise, as the brokers were late.
        """

    def recorded(self, number: int, most: int) -> list[OffsetRange]:
        """Returns the ranges of batch `number` and the next ones, `most` at most.

        Raises:
            DataError: the batch was forgotten, or is not recorded.
        """

    def exhaust(self, partitions: list[Partition]) -> None:
        """Reports that partitions of a bounded stream are read to their ends. Once all are, the stream is over."""

    def close_stream(self) -> None:
        """Closes the record until it begins again: what is recorded may be read, nothing is added."""

    def fail_stream(self, late: bool, message: str) -> None:
        """Reports that reading has failed, so that whoever waits for batches learns of it.

        Args:
            late: whether the brokers were late, so that it is a DeadlineError, rather than a DataError.
            message: of the error.
        """

    def stream_offsets(self, number: int | None) -> Offsets:
        """Returns the offsets at which a batch begins: those of batches before it are all lower.

        Args:
            number: of the batch; None for the next one to be recorded.

        Raises:
            DataError: the batch was forgotten, or batches before it are not recorded.
        """

    def covered(self, below: int) -> None:
        """Forgets batches of lower numbers, as a checkpoint or a recovery point has them."""

    def awaited(self) -> bool:
        """Returns whether somebody waits for a batch that is not recorded, so that the stream is idle."""


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
    """Reads the partitions of a stream that are one data loader's. For one thread."""

    def read(self, found: OffsetRange) -> Batch:
        """Reads a recorded batch, of any partition. Blocks.

        Raises:
            DataError: its messages have been deleted.
            DeadlineError: the source was late.
        """

    def poll(self) -> NewBatch | None:
        """Reads on and records a batch; None if there is none yet. Blocks for a short time only.

        Raises:
            DataError: the source cannot be read.
            DeadlineError: the source was late.
        """

    def close(self) -> None:
        """Closes connections."""


@runtime_checkable
class SharedStream(Stream, Protocol):
    """A stream that several data loaders can share, with a record outside of it.

    Attributes:
        topics: topics that it reads.
    """

    topics: tuple[str, ...]

    def share(self, log: StreamLog, loader: int, loaders: int, stopping: Callable[[], bool]) -> StreamShare:
        """Opens the share of a data loader; see `persia.types.loader_of`.

        Args:
            log: the record.
            loader: number of the data loader.
            loaders: number of data loaders.
            stopping: polled while the source waits; once true, calls of the share raise `Stopped` of the source.
        """


class StreamDataLoader(DataLoader, Protocol):
    """The data loaders of a stream as one."""

    def take_on_demand(self, epoch: int, number: int) -> Delivery:
        """Returns a batch to whichever NN worker has drawn its number; waits until it is recorded."""

    def awaited(self) -> bool:
        """Returns whether an NN worker waits for the stream, which is idle."""


class FedStream(NamedTuple):
    """A stream that data loaders read.

    Attributes:
        stream: the position of the run in it.
        loader: the data loaders as one.
    """

    stream: StreamPosition
    loader: StreamDataLoader
