"""Records of streams: partitions, offset ranges, and entries of the log of a stream's batches."""

from __future__ import annotations

import zlib
from typing import NamedTuple

from persia.types.batches import Offsets

__all__ = ["OffsetRange", "Partition", "PartitionBounds", "RecordedBatch", "StreamStart", "loader_of"]


class Partition(NamedTuple):
    """A partition of a topic."""

    topic: str
    number: int


class OffsetRange(NamedTuple):
    """Messages of one partition from offset `begin` to before `end`; not every offset between has a message.

    Attributes:
        partition: the partition.
        begin: first offset.
        end: offset after the last one.
        newest: latest event time of the partition before `begin`, in milliseconds; None without one.
        newest_after: latest event time before `end`.
    """

    partition: Partition
    begin: int
    end: int
    newest: int | None = None
    newest_after: int | None = None


class PartitionBounds(NamedTuple):
    """The part of a partition to read.

    Attributes:
        partition: the partition.
        begin: offset of the start of its next batch.
        end: offset before which a bounded stream ends; None without an end.
        newest: latest event time before `begin`, in milliseconds; None without one.
    """

    partition: Partition
    begin: int
    end: int | None = None
    newest: int | None = None


class RecordedBatch(NamedTuple):
    """The messages of a batch number.

    Attributes:
        range: the messages of the batch; None if it is not recorded yet, or the stream is over.
        over: whether the stream ends before this number.
        interrupted: whether the stream is over only because it was closed, and not at the end of a bounded stream.
    """

    range: OffsetRange | None
    over: bool = False
    interrupted: bool = False


class StreamStart(NamedTuple):
    """Start of a run in a stream.

    Attributes:
        offsets: offsets of its first batch in all partitions that have been read.
        fresh: False to retain the recorded batches after a restart.
    """

    offsets: Offsets
    fresh: bool


def loader_of(partition: Partition, loaders: int) -> int:
    """Returns the number of the data loader, of `loaders`, that reads a partition. Independent of other partitions."""
    return (zlib.crc32(partition.topic.encode()) + partition.number) % loaders
