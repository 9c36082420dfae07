"""Records of streams: partitions, offset ranges, and what the record of a stream's batches answers."""

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
    """Messages of one partition from offset `begin` to before `end`; offsets between need not all have a message.

    Attributes:
        partition: the partition.
        begin: first offset.
        end: offset after the last one.
        newest: latest event time of the partition before `begin`, in milliseconds; None without one.
        newest_after: the same, before `end`.
    """

    partition: Partition
    begin: int
    end: int
    newest: int | None = None
    newest_after: int | None = None


class PartitionBounds(NamedTuple):
    """The part of a partition that is to be read.

    Attributes:
        partition: the partition.
        begin: offset at which its next batch begins.
        end: offset before which a bounded stream ends; None without an end.
        newest: latest event time before `begin`, in milliseconds; None without one.
    """

    partition: Partition
    begin: int
    end: int | None = None
    newest: int | None = None


class RecordedBatch(NamedTuple):
    """The record of a batch number.

    Attributes:
        range: the messages of the batch; None if there is none yet, or the stream is over.
        over: whether there is no batch of this number, nor will there be.
        interrupted: whether it is over only because it was closed, rather than at the end of a bounded stream.
    """

    range: OffsetRange | None
    over: bool = False
    interrupted: bool = False


class StreamStart(NamedTuple):
    """Where a run begins in a stream.

    Attributes:
        offsets: of its first batch, of all partitions that have been read.
        fresh: False to keep the batches that are recorded, after a restart.
    """

    offsets: Offsets
    fresh: bool


def loader_of(partition: Partition, loaders: int) -> int:
    """Returns which of `loaders` data loaders reads a partition. It depends on no other partition."""
    return (zlib.crc32(partition.topic.encode()) + partition.number) % loaders
