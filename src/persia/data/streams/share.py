"""Reads the partitions of one data loader, or of a join: cuts, records and reads batches again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np

from persia.batching.batch import Batch
from persia.data.streams.broker import POLL_SECONDS, Broker
from persia.data.streams.events import KeyedEvents, NewEvents, Progress
from persia.data.streams.message_decoding import MAX_BATCH_BYTES
from persia.data.streams.message_rows import Converted, MessageConverter
from persia.data.streams.offset_log import OffsetLog
from persia.data.streams.options import KafkaOptions, StreamCounts
from persia.data.streams.partition_bounds import partition_bounds
from persia.services import NewBatch, StreamLog
from persia.types import OffsetRange, Partition, PartitionBounds, loader_of

__all__ = ["KafkaEvents", "KafkaShare"]

MOST_BUFFERED = 4
"""Maximum batches to buffer of a partition while waiting for another one."""

FIRST_FETCH = 64
"""Messages per fetch as long as their number of rows is unknown."""

LEAST_FETCH = 16
"""Minimum messages per fetch, for any number of rows."""

MEASURE_SECONDS = 1.0
"""Interval of measuring the lag."""


class KafkaShare:
    """Implements `persia.services.StreamShare`: the partitions of one data loader. For one thread.

    Args:
        options: arguments of `kafka`.
        batch_size: maximum samples per batch.
        converter: converts messages to batches.
        counts: counters of the reader.
        log: the record of all data loaders.
        loader: number of this data loader.
        loaders: number of data loaders.
        stopping: polled while waiting.

    Raises:
        DataError: a topic cannot be read, or messages have been deleted before they were read.
        DeadlineError: no broker could be reached.
        Stopped: asked to stop.
    """

    def __init__(
        self,
        options: KafkaOptions,
        batch_size: int,
        converter: MessageConverter,
        counts: StreamCounts,
        log: StreamLog,
        loader: int,
        loaders: int,
        stopping: Callable[[], bool],
    ) -> None:
        self._options = options
        self._batch_size = batch_size
        self._converter = converter
        self._counts = counts
        self._log = log
        self._share = loader, loaders
        self._stopping = stopping
        self._next: dict[Partition, PartitionBounds] = {}
        """Bounds of each partition of this share; its next batch starts at `begin`."""
        self._heads: dict[Partition, int] = {}
        """Offset of each partition up to which messages have left its buffer."""
        self._newest: dict[Partition, int | None] = {}
        """Latest event time of each partition before its head."""
        self._exhausted = self._closed = False
        self.last = Converted(None, None)
        """Rows of the messages that were read last."""
        self._measured = 0.0
        """Time of the last measurement of the lag."""
        self._fetch = min(batch_size, FIRST_FETCH)
        """Approximate number of messages per batch."""
        self._broker = Broker(options.broker, converter.decoder, stopping)
        try:
            self._open()
        except BaseException:
            self._broker.close()
            raise

    def close(self) -> None:
        """Closes the connection."""
        self._broker.close()

    def read(self, offsets: OffsetRange) -> Batch:
        """Reads a recorded batch; see `persia.services.StreamShare`."""
        broker, partition = self._broker, offsets.partition
        if self._heads.get(partition) != offsets.begin:
            self._seek(partition, offsets.begin)
        buffer = broker.buffers[partition]
        while buffer.position < offsets.end:
            self._poll(partition)
        messages = buffer.take_below(offsets.end)
        self._heads[partition], self._newest[partition] = offsets.end, offsets.newest_after
        self.last = self._converter.convert(partition, messages, offsets.newest) if messages else Converted(None, None)
        batch = self.last.batch
        # The first messages may be missing because the topic was compacted, but not because retention deleted them.
        if batch is None or (messages[0].offset > offsets.begin and broker.watermarks(partition)[0] > offsets.begin):
            raise broker.deleted(partition, offsets.begin)
        self._counts.batch(len(batch), messages[-1].time)
        return batch

    def past(self, messages: OffsetRange) -> Iterator[tuple[int, Batch]]:
        """Reads messages without counting them; see `persia.services.StreamShare`."""
        broker, partition, newest = self._broker, messages.partition, messages.newest
        converter, first = self._converter.without_effects(), True
        self._seek(partition, messages.begin)
        self._heads[partition] = -1  # The next batch of the partition is sought, as its messages may be dropped here.
        buffer = broker.buffers[partition]
        while True:
            while buffer.position < messages.end and not buffer.holds(self._batch_size, MAX_BATCH_BYTES):
                self._poll(partition)
            buffer.drop_from(messages.end)
            taken = buffer.take(self._batch_size, MAX_BATCH_BYTES)
            begin = taken[0].offset if taken else messages.end
            if first and begin > messages.begin and broker.watermarks(partition)[0] > messages.begin:
                raise broker.deleted(partition, messages.begin)
            if not taken:
                return
            converted = converter.convert(partition, taken, newest)
            newest, first = converted.newest, False
            if converted.batch is not None:
                yield begin, converted.batch

    def poll(self) -> NewBatch | None:
        """Reads and records the next batch; see `persia.services.StreamShare`."""
        if self._closed:
            time.sleep(POLL_SECONDS)
            return None
        for partition, bounds in self._next.items():
            if self._heads[partition] < bounds.begin:  # Batches before it were read again.
                self._seek(partition, bounds.begin)
                self._newest[partition] = bounds.newest
        partition_ready = self._ready()
        if partition_ready is None:
            self._report_end()
            self._poll(None)
            self._measure()
            self._add_partitions()
            return None
        partition = partition_ready
        messages = self._broker.buffers[partition].take(self._batch_size, MAX_BATCH_BYTES)
        self._heads[partition] = messages[-1].offset + 1
        converted = self.last = self._converter.convert(partition, messages, self._newest[partition])
        self._newest[partition] = converted.newest
        batch = converted.batch
        if batch is None:  # All messages were skipped; they belong to the partition's next batch.
            return None
        before = self._next[partition]
        offsets = OffsetRange(partition, before.begin, messages[-1].offset + 1, before.newest, converted.newest)
        number = self._log.record(offsets)
        if number is None:
            self._adopt_record(partition)
            return None
        self._next[partition] = before._replace(begin=offsets.end, newest=converted.newest)
        self._fetch = max(LEAST_FETCH, self._batch_size * len(messages) // len(batch))
        self._measure()
        self._counts.batch(len(batch), messages[-1].time)
        return NewBatch(number, offsets, batch)

    def positions(self) -> list[PartitionBounds]:
        """Returns the next position of each partition."""
        return list(self._next.values())

    def progress(self) -> Progress:
        """Returns the progress of the partitions, by event time."""
        quiet = time.monotonic() - self._options.linger
        event_time = self._options.event_time
        lateness = event_time.allowed or 0 if event_time is not None else 0
        complete: list[int] = []
        newest: list[int] = []
        unknown, over = False, True
        for partition, bounds in self._next.items():
            buffer, latest = self._broker.buffers[partition], bounds.newest
            if latest is not None:
                newest.append(latest)
            ended = bounds.end is not None and not buffer.messages and buffer.position >= bounds.end
            over = over and ended
            if ended or (buffer.caught_up and not buffer.messages and buffer.since <= quiet):
                continue
            if latest is None:
                unknown = True
            else:
                complete.append(latest - lateness)
        return Progress(min(complete, default=None), max(newest, default=None), unknown, over)

    # --- partitions ---------------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Determines the partitions and their ends, and starts fetching the partitions of this share."""
        broker = self._broker
        bounds_of_all, marks = partition_bounds(broker, self._options, self._log)
        own_bounds = [bounds for bounds in bounds_of_all if self._belongs(bounds.partition)]
        for partition, offset, _, newest in own_bounds:
            low, high = marks.get(partition, (0, -1))
            if not low <= offset <= high:
                raise broker.deleted(partition, offset)
            self._heads[partition], self._newest[partition] = offset, newest
        self._next = {bounds.partition: bounds for bounds in own_bounds}
        broker.assign({bounds.partition: bounds.begin for bounds in own_bounds})

    def _belongs(self, partition: Partition) -> bool:
        loader, loaders = self._share
        return loader_of(partition, loaders) == loader

    def _add_partitions(self) -> None:
        """Adds partitions that were created in topics of an unbounded stream."""
        if self._options.until is not None:
            return
        added = [
            PartitionBounds(p, self._broker.watermarks(p)[0]) for p in self._broker.new_partitions() if self._belongs(p)
        ]
        if not added:
            return
        names = {bounds.partition for bounds in added}
        for bounds in self._log.assign(added):
            if bounds.partition in names:
                self._next[bounds.partition] = bounds
                self._seek(bounds.partition, bounds.begin)
                self._newest[bounds.partition] = bounds.newest

    def _adopt_record(self, partition: Partition) -> None:
        """Continues at the record of a partition, after another data loader recorded a batch, or the record closed."""
        (bounds,) = (bounds for bounds in self._log.assign([]) if bounds.partition == partition)
        self._closed = bounds.begin == self._next[partition].begin
        self._next[partition] = bounds
        self._seek(partition, bounds.begin)
        self._newest[partition] = bounds.newest

    def _seek(self, partition: Partition, offset: int) -> None:
        self._broker.assign({partition: offset})
        self._heads[partition] = offset

    def _report_end(self) -> None:
        """Reports once that this share of a bounded stream is read to its end."""
        if self._exhausted:
            return
        for partition, bounds in self._next.items():
            buffer = self._broker.buffers[partition]
            if bounds.end is None or buffer.messages or buffer.position < bounds.end:
                return
        self._exhausted = True
        self._measured = 0.0
        self._measure()
        self._log.exhaust(list(self._next))

    # --- messages -----------------------------------------------------------------------------------------------

    def _ready(self) -> Partition | None:
        """Returns the partition of the next batch, if one has enough rows, or rows that waited for `linger`."""
        late = time.monotonic() - self._options.linger
        ready: list[tuple[int, Partition]] = []
        for partition, bounds in self._next.items():
            buffer, end = self._broker.buffers[partition], bounds.end
            if end is not None:
                buffer.drop_from(end)
            if not buffer.messages:
                continue
            over = end is not None and buffer.position >= end
            waited = buffer.caught_up and buffer.since <= late  # Else more messages can be fetched immediately.
            if over or buffer.holds(self._batch_size, MAX_BATCH_BYTES) or waited:
                ready.append((buffer.messages[0].time, partition))
        return min(ready)[1] if ready else None

    def _poll(self, needed: Partition | None) -> None:
        """Fetches messages; of partitions other than `needed`, only while few are buffered."""
        for partition, buffer in self._broker.buffers.items():
            bounds = self._next.get(partition)
            # Brokers delay the answer to a request for partitions without messages, which would delay other partitions.
            ended = bounds is not None and bounds.end is not None and buffer.position >= bounds.end
            full = buffer.holds(MOST_BUFFERED * self._batch_size, MAX_BATCH_BYTES)
            other = needed is not None and partition != needed and full
            self._broker.pause(partition, other or ended or (bounds is None and partition != needed))
        self._broker.poll(self._fetch)

    def _measure(self) -> None:
        now = time.monotonic()
        if now - self._measured < MEASURE_SECONDS:
            return
        self._measured = now
        self._counts.set_lags({each: self._broker.lag(each, bounds.begin) for each, bounds in self._next.items()})


class KafkaEvents:
    """Implements `persia.data.streams.events.EventShare`. For one thread.

    Args:
        share: reads all partitions.
        log: record of the share, which holds one batch only, as the join has its own record.
    """

    def __init__(self, share: KafkaShare, log: OffsetLog) -> None:
        self._share = share
        self._log = log

    def read(self, offsets: OffsetRange) -> KeyedEvents:
        """Reads events again; see `EventShare`."""
        self._share.read(offsets)
        return _events(self._share.last)

    def poll(self) -> NewEvents | None:
        """Reads the next events; see `EventShare`."""
        new = self._share.poll()
        if new is None:
            return None
        self._log.covered(new.number + 1)
        return NewEvents(new.range, _events(self._share.last))

    def positions(self) -> list[PartitionBounds]:
        """Returns the next position of each partition."""
        return self._share.positions()

    def progress(self) -> Progress:
        """Returns the progress of the partitions."""
        return self._share.progress()

    def close(self) -> None:
        """Closes the connection."""
        self._share.close()


def _events(converted: Converted) -> KeyedEvents:
    """Returns the events of messages; each has a time and at most one key."""
    batch, times, ids = converted.batch, converted.times, converted.keys
    assert batch is not None
    assert times is not None
    assert ids is not None
    if ids.offsets is None:
        return KeyedEvents(ids.values, times, batch)
    keyed = np.diff(ids.offsets) == 1
    keys = np.zeros(len(times), np.uint64)
    keys[keyed] = ids.values
    return KeyedEvents(keys, times, batch, keyed)
