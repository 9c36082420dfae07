"""The record of a stream's batches: an offset range of one partition for each batch number, and its file."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeAlias, TypeVar

import msgspec

from persia.errors import DataError, DeadlineError, PersiaError
from persia.types import OffsetRange, Offsets, Partition, PartitionBounds, RecordedBatch

__all__ = ["EVENT_TIME", "OffsetLog", "partitions_of", "unrecorded"]

E = TypeVar("E")

AWAITED_SECONDS = 5.0
"""Seconds after a lookup for which its caller counts as waiting; callers repeat a lookup after one second."""

EVENT_TIME = "@event_time"
"""Suffix of a topic in `Offsets`: event times of its partitions. No topic has an "@" in its name."""

COMPACT = 4096
"""Number of forgotten batches after which the file is rewritten."""

LENGTH_BYTES = 4


class _Begun(msgspec.Struct, tag="begun", array_like=True):
    number: int
    offsets: Offsets


class _Assigned(msgspec.Struct, tag="assigned", array_like=True):
    bounds: list[PartitionBounds]


class _Ranges(msgspec.Struct, tag="ranges", array_like=True):
    ranges: list[OffsetRange]


class _Exhausted(msgspec.Struct, tag="exhausted", array_like=True):
    partitions: list[Partition]


class _Closed(msgspec.Struct, tag="closed", array_like=True):
    pass


_Entry: TypeAlias = _Begun | _Assigned | _Ranges | _Exhausted | _Closed


class _LogFile(Generic[E]):
    """Entries in a file, each after its length. They survive the process, but not a loss of power.

    For one thread at a time.

    Args:
        path: path of the file; None for no file.
        kind: type of an entry.
    """

    def __init__(self, path: str | None, kind: type[E]) -> None:
        self._path = path
        self._decoder = msgspec.msgpack.Decoder(kind)

    def load(self) -> Iterator[E]:
        """Yields the entries of an earlier process. An incomplete last entry is dropped.

        Raises:
            PersiaError: the file is damaged.
        """
        if self._path is None or not os.path.exists(self._path):
            return
        with open(self._path, "rb") as file:
            data = memoryview(file.read())
        at = 0
        while at + LENGTH_BYTES <= len(data):
            end = at + LENGTH_BYTES + int.from_bytes(data[at : at + LENGTH_BYTES], "big")
            if end > len(data):
                break
            try:
                yield self._decoder.decode(data[at + LENGTH_BYTES : end])
            except msgspec.MsgspecError as error:
                raise PersiaError(
                    f"{self._path} is not the record of a stream: {error}. Remove it and resume from a checkpoint.",
                    path=self._path,
                ) from error
            at = end

    def append(self, entry: E) -> None:
        """Adds an entry.

        Raises:
            PersiaError: the entry cannot be written.
        """
        if self._path is not None:
            self._write(self._path, "ab", [entry])

    def replace(self, entries: Iterable[E]) -> None:
        """Replaces all entries, atomically.

        Raises:
            PersiaError: the entries cannot be written.
        """
        if self._path is not None:
            self._write(f"{self._path}.new", "wb", entries)
            os.replace(f"{self._path}.new", self._path)

    def _write(self, path: str, mode: str, entries: Iterable[E]) -> None:
        encoded = [msgspec.msgpack.encode(entry) for entry in entries]
        try:
            with open(path, mode) as file:
                file.write(b"".join(len(entry).to_bytes(LENGTH_BYTES, "big") + entry for entry in encoded))
        except OSError as error:
            raise PersiaError(
                f"The record of the stream cannot be written to {self._path}: {error.strerror}. Free space there, or "
                "choose another directory for `regions`.",
                path=self._path,
            ) from error


class OffsetLog:
    """Maps batch numbers to offset ranges: implements `persia.services.StreamLog`. Thread-safe; only `lookup` waits.

    Args:
        number: number of the first batch.
        offsets: offsets at which the batch begins, by topic and partition.
        path: file of the record, from which it is restored if the file exists; None for no file.
        clock: clock in seconds.

    Raises:
        PersiaError: the file is damaged.
    """

    def __init__(
        self,
        number: int = 0,
        offsets: Offsets | None = None,
        path: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._changed = threading.Condition()
        self._clock = clock
        self._looked_up = -AWAITED_SECONDS
        """Time of the last lookup of a batch that was not recorded."""
        self._waiting = 0
        self._failure: tuple[bool, str] | None = None
        self._forgotten = 0
        self._begin(number, offsets or {})
        self._file: _LogFile[_Entry] = _LogFile(path, _Entry)  # type: ignore[arg-type]
        for entry in self._file.load():
            self._apply(entry)
        self._file.replace(self._entries())

    # --- StreamLog ----------------------------------------------------------------------------------------------

    def begin_stream(self, number: int, offsets: Offsets, fresh: bool) -> None:
        """Begins a record, or continues this one; see `persia.services.StreamLog`."""
        with self._changed:
            self._failure = None
            if fresh or not self._first <= number <= self._end:
                self._begin(number, offsets)
            self._closed = False
            self._file.replace(self._entries())
            self._changed.notify_all()

    def assign(self, bounds: list[PartitionBounds]) -> list[PartitionBounds]:
        """Adds unknown partitions; returns all partitions; see `persia.services.StreamLog`."""
        with self._changed:
            added = [bound for bound in bounds if bound.partition not in self._ends]
            if added:
                self._enter(_Assigned(added))
            return [
                PartitionBounds(p, self._next[p], end, self._newest.get(p)) for p, end in sorted(self._ends.items())
            ]

    def record(self, messages: OffsetRange) -> int | None:
        """Records the range of the next batch; see `persia.services.StreamLog`."""
        partition, begin, end = messages[:3]
        with self._changed:
            last = self._last.get(partition)
            if last is not None and last[1] == messages:  # A repeated call.
                return last[0]
            if self._closed or self._next.get(partition) != begin or end <= begin:
                return None
            self._enter(_Ranges([messages]))
            return self._end - 1

    def lookup(self, number: int, last: int, timeout: float) -> RecordedBatch:
        """Returns the record of a batch; see `persia.services.StreamLog`."""
        with self._changed:
            if last >= self._end:
                self._looked_up = self._clock()
            self._waiting += last >= self._end
            waits = last >= self._end
            try:
                self._changed.wait_for(lambda: last < self._end or self._over or self._failure is not None, timeout)
            finally:
                self._waiting -= waits
            if number < self._first:
                raise self._unknown(number)
            if last < self._end or (self._over and number < self._end):
                return RecordedBatch(self._ranges[number - self._first])
            if self._over:
                return RecordedBatch(None, over=True, interrupted=not self._ended)
            if self._failure is not None:
                late, message = self._failure
                raise (DeadlineError if late else DataError)(message)
            return RecordedBatch(None)

    def recorded(self, number: int, most: int) -> list[OffsetRange]:
        """Returns the ranges of some batches; see `persia.services.StreamLog`."""
        with self._changed:
            if not self._first <= number < self._end:
                raise self._unknown(number)
            begin = number - self._first
            return list(itertools.islice(self._ranges, begin, begin + most))

    def exhaust(self, partitions: list[Partition]) -> None:
        """Reports that partitions are read to their ends; see `persia.services.StreamLog`."""
        with self._changed:
            if not self._closed:
                self._enter(_Exhausted(partitions))

    def close_stream(self) -> None:
        """Closes the record; see `persia.services.StreamLog`."""
        with self._changed:
            if not self._over:
                self._enter(_Closed())

    def fail_stream(self, late: bool, message: str) -> None:
        """Reports that reading has failed; see `persia.services.StreamLog`."""
        with self._changed:
            self._failure = late, message
            self._changed.notify_all()

    def stream_offsets(self, number: int | None) -> Offsets:
        """Returns the offsets at which a batch begins; see `persia.services.StreamLog`."""
        with self._changed:
            if number is None:
                number = self._end
            if self._over:  # NN workers that join a step without a batch count numbers beyond the last one.
                number = min(number, self._end)
            if not self._first <= number <= self._end:
                raise self._unknown(number)
            at, newest = dict(self._begins), dict(self._oldest)
            for recorded in itertools.islice(self._ranges, number - self._first):
                at[recorded.partition] = recorded.end
                if recorded.newest_after is not None:
                    newest[recorded.partition] = recorded.newest_after
        return _offsets(at, newest)

    def covered(self, below: int) -> None:
        """Forgets batches of lower numbers; see `persia.services.StreamLog`."""
        with self._changed:
            while self._first < below and self._ranges:
                gone = self._ranges.popleft()
                self._begins[gone.partition] = gone.end
                if gone.newest_after is not None:
                    self._oldest[gone.partition] = gone.newest_after
                self._first += 1
                self._forgotten += 1
            if self._forgotten >= COMPACT:
                self._forgotten = 0
                self._file.replace(self._entries())

    def awaited(self) -> bool:
        """Returns whether an NN worker waits for a batch; see `persia.services.StreamLog`."""
        with self._changed:
            return self._waiting > 0 or self._clock() - self._looked_up < AWAITED_SECONDS

    # --- under the lock -----------------------------------------------------------------------------------------

    @property
    def _end(self) -> int:
        """Number of the next batch to be recorded."""
        return self._first + len(self._ranges)

    @property
    def _ended(self) -> bool:
        """Whether all partitions of a bounded stream are read to their ends."""
        return bool(self._ends) and all(p in self._exhausted for p in self._ends)

    @property
    def _over(self) -> bool:
        return self._closed or self._ended

    def _begin(self, number: int, offsets: Offsets) -> None:
        self._first = number
        self._begins = partitions_of(offsets)
        """Offset of each partition at batch `_first`."""
        self._next = dict(self._begins)
        self._oldest = partitions_of(offsets, EVENT_TIME)
        """Latest known event time of each partition before batch `_first`."""
        self._newest = dict(self._oldest)
        self._ends: dict[Partition, int | None] = {}
        """End offsets of the partitions that are read; None without an end."""
        self._ranges: deque[OffsetRange] = deque()
        self._last: dict[Partition, tuple[int, OffsetRange]] = {}
        """The last batch of each partition."""
        self._exhausted: set[Partition] = set()
        self._closed = False

    def _enter(self, entry: _Entry) -> None:
        self._file.append(entry)
        self._apply(entry)
        self._changed.notify_all()

    def _apply(self, entry: _Entry) -> None:
        match entry:
            case _Begun(number, offsets):
                self._begin(number, offsets)
            case _Assigned(bounds):
                for partition, begin, end, _ in bounds:
                    self._begins.setdefault(partition, begin)
                    self._next.setdefault(partition, begin)
                    self._ends[partition] = end
            case _Ranges(ranges):
                for recorded in ranges:
                    self._last[recorded.partition] = self._end, recorded
                    self._ranges.append(recorded)
                    self._next[recorded.partition] = recorded.end
                    if recorded.newest_after is not None:
                        self._newest[recorded.partition] = recorded.newest_after
            case _Exhausted(partitions):
                self._exhausted.update(partitions)
            case _Closed():
                self._closed = True

    def _entries(self) -> Iterator[_Entry]:
        """Returns entries that restore this state."""
        yield _Begun(self._first, _offsets(self._begins, self._oldest))
        yield _Assigned([PartitionBounds(p, self._begins[p], end) for p, end in self._ends.items()])
        yield _Ranges(list(self._ranges))
        yield _Exhausted(list(self._exhausted))
        if self._closed:
            yield _Closed()

    def _unknown(self, number: int) -> PersiaError:
        return unrecorded("stream", number, self._first, self._end)


def unrecorded(stream: str, number: int, first: int, last: int) -> DataError:
    """Returns the error for a batch that is not among the recorded ones, `first` to before `last`."""
    return DataError(
        f"Batch {number} of the {stream} is not recorded; batches {first} to {last} are. Continue from a checkpoint, "
        "which stores the offsets.",
        number=number,
    )


def partitions_of(offsets: Offsets, suffix: str = "") -> dict[Partition, int]:
    """Returns the numbers in `Offsets` of topics with this suffix; by default the offsets themselves."""
    return {
        Partition(name.removesuffix(suffix), number): value
        for name, of in offsets.items()
        if (name.endswith(suffix) if suffix else "@" not in name)
        for number, value in of.items()
    }


def _offsets(at: dict[Partition, int], newest: dict[Partition, int]) -> Offsets:
    offsets: Offsets = {}
    for partition in sorted(at):
        offsets.setdefault(partition.topic, {})[partition.number] = at[partition]
    for partition in sorted(newest):
        offsets.setdefault(partition.topic + EVENT_TIME, {})[partition.number] = newest[partition]
    return offsets
