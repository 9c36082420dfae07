"""Events with a key and a time, as `join` reads them from Kafka or from memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from persia.batching.batch import Batch
from persia.errors import ConfigError
from persia.schema import Schema
from persia.telemetry.metrics import Metric
from persia.types import BoolArray, Ids, Int64Array, OffsetRange, Offsets, Partition, PartitionBounds

__all__ = ["EventBatches", "EventShare", "EventStream", "KeyedEvents", "NewEvents", "Progress"]


class KeyedEvents(NamedTuple):
    """Events in the order of one partition.

    Attributes:
        keys: uint64 `[n]`, the key that joins events of two streams.
        times: int64 `[n]`, milliseconds since 1970.
        batch: rows of the events, `n` samples; None if only keys and times are needed.
        keyed: bool `[n]`, whether an event has a key; None if all have one.
    """

    keys: Ids
    times: Int64Array
    batch: Batch | None = None
    keyed: BoolArray | None = None


class NewEvents(NamedTuple):
    """Events that have just been read, and the offsets of their messages."""

    range: OffsetRange
    events: KeyedEvents


class Progress(NamedTuple):
    """Progress of reading the partitions of a stream.

    Attributes:
        complete: time in milliseconds before which no more events are expected; None if no partition has more to read
            at present.
        newest: latest time of an event; None before the first event.
        unknown: whether a partition has events of which none has been read.
        over: whether the end of a bounded stream has been reached.
    """

    complete: int | None
    newest: int | None
    unknown: bool
    over: bool


class EventShare(Protocol):
    """Reads the events of a stream. For one thread."""

    def read(self, offsets: OffsetRange) -> KeyedEvents:
        """Reads events again. Blocks."""

    def poll(self) -> NewEvents | None:
        """Reads the next events; None if there are none yet. Blocks only briefly."""

    def positions(self) -> list[PartitionBounds]:
        """Returns the next position of each partition."""

    def progress(self) -> Progress:
        """Returns the progress of the partitions."""

    def close(self) -> None:
        """Closes connections."""


@runtime_checkable
class EventStream(Protocol):
    """A stream of events with a time."""

    topics: tuple[str, ...]
    batch_size: int

    @property
    def schema(self) -> Schema:
        """The schema of the rows."""

    def open_events(
        self,
        on: str,
        rows: bool,
        positions: list[PartitionBounds],
        earlier: Offsets,
        stopping: Callable[[], bool],
    ) -> EventShare:
        """Opens the stream.

        Args:
            on: column with the key.
            rows: whether events need their rows. Clicks do not, and late clicks are not dropped.
            positions: next position and end of each partition that has been read.
            earlier: offsets of partitions in an earlier run.
            stopping: polled while waiting; once true, calls raise `Stopped`.
        """

    def commit(self, offsets: Offsets) -> None:
        """Reports that a checkpoint has all before `offsets`."""

    def observe(self) -> list[Metric]:
        """Returns metrics. Thread-safe."""


class EventBatches:
    """Events in memory as a bounded stream of one partition: for tests, and data of other systems.

    Args:
        name: name of the stream.
        events: events in any order of their times. Only the first stream of a `join` needs their rows.
        schema: schema of the rows.
        batch_size: samples per joined batch.
        allowed_lateness: milliseconds by which an event may be older than the newest event before it.

    Raises:
        ConfigError: the arrays of an item have different lengths.
    """

    def __init__(
        self,
        name: str,
        events: Sequence[KeyedEvents],
        schema: Schema,
        batch_size: int = 1024,
        allowed_lateness: int = 0,
    ) -> None:
        for number, (keys, times, batch, _) in enumerate(events):
            lengths = {len(keys), len(times), *([len(batch)] if batch is not None else [])}
            if len(lengths) > 1:
                raise ConfigError(
                    f"events[{number}] has arrays of lengths {sorted(lengths)}; all must have the same.", field="events"
                )
        self.topics = (name,)
        self.batch_size = batch_size
        self._events = list(events)
        self._schema = schema
        self._lateness = allowed_lateness

    @property
    def schema(self) -> Schema:
        """The schema of the rows."""
        return self._schema

    def open_events(
        self,
        on: str,
        rows: bool,
        positions: list[PartitionBounds],
        earlier: Offsets,
        stopping: Callable[[], bool],
    ) -> EventShare:
        """Opens the stream; see `EventStream`."""
        partition = Partition(self.topics[0], 0)
        at = next((bounds.begin for bounds in positions), earlier.get(self.topics[0], {}).get(0, 0))
        return _MemoryShare(partition, self._events, at, self._lateness)

    def commit(self, offsets: Offsets) -> None:
        """No-op: there are no lag monitors."""

    def observe(self) -> list[Metric]:
        """Returns no metrics."""
        return []


class _MemoryShare:
    """Reads an `EventBatches`; an offset is the number of an item."""

    def __init__(self, partition: Partition, events: list[KeyedEvents], at: int, lateness: int) -> None:
        self._partition = partition
        self._events = events
        self._at = at
        self._lateness = lateness
        self._newest = max((int(e.times.max()) for e in events[:at] if len(e.times)), default=None)

    def read(self, offsets: OffsetRange) -> KeyedEvents:
        """See `EventShare`."""
        items = self._events[offsets.begin : offsets.end]
        batches = [item.batch for item in items if item.batch is not None]
        keyed = [np.ones(len(item.keys), bool) if item.keyed is None else item.keyed for item in items]
        return KeyedEvents(
            np.concatenate([item.keys for item in items]),
            np.concatenate([item.times for item in items]),
            Batch.concat(batches) if batches else None,
            np.concatenate(keyed),
        )

    def poll(self) -> NewEvents | None:
        """See `EventShare`."""
        if self._at >= len(self._events):
            return None
        offsets = OffsetRange(self._partition, self._at, self._at + 1)
        events = self._events[self._at]
        self._at += 1
        if len(events.times):
            newest = int(events.times.max())
            self._newest = newest if self._newest is None else max(self._newest, newest)
        return NewEvents(offsets, events)

    def positions(self) -> list[PartitionBounds]:
        """See `EventShare`."""
        return [PartitionBounds(self._partition, self._at, len(self._events))]

    def progress(self) -> Progress:
        """See `EventShare`."""
        over = self._at >= len(self._events)
        known = not over and self._newest is not None
        complete = self._newest - self._lateness if known and self._newest is not None else None
        return Progress(complete, self._newest, not over and self._newest is None, over)

    def close(self) -> None:
        """See `EventShare`."""
