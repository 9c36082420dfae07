"""The record of a stream's batches: an offset range of one partition for each batch number."""

from __future__ import annotations

import threading
from collections import deque
from typing import NamedTuple

from persia.errors import DataError
from persia.types import Offsets

__all__ = ["OffsetLog", "OffsetRange", "Partition"]


class Partition(NamedTuple):
    """A partition of a topic."""

    topic: str
    number: int


class OffsetRange(NamedTuple):
    """Messages of one partition from offset `begin` to before `end`; offsets between need not all have a message."""

    partition: Partition
    begin: int
    end: int


class OffsetLog:
    """Maps batch numbers to offset ranges, so that a batch can be read again exactly. Thread-safe.

    Ranges are appended before their batches are handed out. Each begins where the last range of its partition ended,
    so no message is in two batches, and none is left out.

    Args:
        number: number of the first batch.
        offsets: offsets at which it begins, by topic and partition.
    """

    def __init__(self, number: int, offsets: Offsets) -> None:
        self._lock = threading.Lock()
        self._first = number
        self._begins = {Partition(topic, p): o for topic, of in offsets.items() for p, o in of.items()}
        """Offset of each partition at batch `_first`."""
        self._next = dict(self._begins)
        self._ranges: deque[OffsetRange] = deque()
        self.ends: dict[Partition, int] | None = None
        """Offsets at which a bounded stream ends; None before they are known, and for a stream without an end."""

    @property
    def end(self) -> int:
        """Number of the next batch to be recorded."""
        with self._lock:
            return self._first + len(self._ranges)

    def partitions(self) -> set[Partition]:
        """Returns the known partitions."""
        with self._lock:
            return set(self._next)

    def next_offset(self, partition: Partition) -> int:
        """Returns the offset at which the next range of a partition begins."""
        with self._lock:
            return self._next[partition]

    def add_partition(self, partition: Partition, offset: int) -> None:
        """Adds a partition whose first range will begin at `offset`. No-op for a known one."""
        with self._lock:
            self._begins.setdefault(partition, offset)
            self._next.setdefault(partition, offset)

    def find(self, number: int) -> OffsetRange | None:
        """Returns the range of a batch; None if it is the next to be recorded.

        Raises:
            DataError: the batch was forgotten, or batches before it are not recorded.
        """
        with self._lock:
            index = number - self._first
            if not 0 <= index <= len(self._ranges):
                raise self._unknown(number)
            return self._ranges[index] if index < len(self._ranges) else None

    def append(self, found: OffsetRange) -> None:
        """Records the range of the next batch."""
        with self._lock:
            assert found.begin == self._next[found.partition] < found.end
            self._ranges.append(found)
            self._next[found.partition] = found.end

    def offsets(self, number: int) -> Offsets:
        """Returns the offsets at which a batch begins: those of batches before it are all lower.

        Raises:
            DataError: the batch was forgotten, or batches before it are not recorded.
        """
        with self._lock:
            count = number - self._first
            if not 0 <= count <= len(self._ranges):
                raise self._unknown(number)
            at = dict(self._begins)
            for found, _ in zip(self._ranges, range(count), strict=False):
                at[found.partition] = found.end
        offsets: Offsets = {}
        for partition in sorted(at):
            offsets.setdefault(partition.topic, {})[partition.number] = at[partition]
        return offsets

    def forget(self, below: int) -> None:
        """Forgets batches of lower numbers, which nobody reads again."""
        with self._lock:
            while self._first < below and self._ranges:
                gone = self._ranges.popleft()
                self._begins[gone.partition] = gone.end
                self._first += 1

    def _unknown(self, number: int) -> DataError:
        return DataError(
            f"Batch {number} of the stream is not recorded; batches {self._first} to "
            f"{self._first + len(self._ranges)} are. Continue from a checkpoint, which has the offsets.",
            number=number,
        )
