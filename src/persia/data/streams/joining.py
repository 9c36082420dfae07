"""Joins two streams by key: impressions and clicks."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Literal, NamedTuple

import numpy as np

from persia.batching.batch import Batch
from persia.checks import check_integer, check_number
from persia.data.streams.events import EventShare, EventStream, KeyedEvents
from persia.data.streams.join_buffer import Emitted, JoinBuffer
from persia.data.streams.offset_log import EVENT_TIME, partitions_of
from persia.data.streams.recorded import BatchRecord, LocalStream
from persia.errors import ConfigError
from persia.schema import InputRules, Schema, input_rules_of
from persia.telemetry.metrics import Metric
from persia.types import OffsetRange, Offsets, Partition, PartitionBounds

__all__ = ["JoinedStream", "join"]

FROM = "@join_from"
"""Suffix of a topic in `Offsets`: offsets of the first messages that a resumed join reads again."""

NEWEST = "@join_newest"
"""Suffix of a topic in `Offsets`: latest event times before these messages, in milliseconds."""

TIME = "@join_time"
"""Suffix of the first topic of the impressions in `Offsets`: the time up to which windows have ended."""

OF_CLICKS = {
    "stream_lag": "stream_lag",
    "stream_late": "join_clicks_late",
    "stream_poison": "join_clicks_poison",
    "stream_too_large": "join_clicks_too_large",
}
"""Exported names of metrics of the clicks, by name in their stream. Lag has the topic as a label."""


def join(
    impressions: EventStream,
    clicks: EventStream,
    *,
    on: str,
    window: float,
    late: Literal["correct", "drop"] = "correct",
    label: str | None = None,
    limit: int = 1_000_000,
    flush: bool = False,
) -> JoinedStream:
    """Joins impressions and clicks by key, for labels that arrive later than their samples.

    An impression becomes a sample once its window has ended by the event times of both streams: a positive sample if a
    click came within `window` after it, else a negative one. The result depends only on the two streams, as long as no
    event is later than its stream's `allowed_lateness`. Clicks that come after their impression was emitted as a
    negative are corrections, or dropped; both are counted. A click counts for every impression of its key whose window
    contains it.

    A partition without new messages for `linger` seconds does not delay others. Offsets of both streams are part of
    checkpoints: a resumed run reads the open impressions and their clicks again, repeats nothing and loses nothing.

    Args:
        impressions: stream with the samples, such as `kafka(..., event_time="time", fill={"click": 0})`. Its own `late`
            applies to late impressions.
        clicks: stream with the clicks; only their keys and times are read. Its own `late` has no effect: late clicks
            are read.
        on: key column of both streams: numbers or texts. Impressions without a key are negatives; clicks without a key
            are dropped.
        window: seconds after an impression in which a click counts.
        late: "correct" emits an impression again, with label 1, if its click is late by at most another `window`; the
            trained negative is not undone. "drop" drops such clicks.
        label: label that says whether there was a click; may be omitted if the schema has only one label.
        limit: maximum number of open impressions, and of clicks. Beyond it, the oldest impressions are emitted early,
            and the oldest clicks dropped.
        flush: whether to emit impressions whose windows are open at the end of bounded streams. If False, the next run
            emits them.

    Raises:
        ConfigError: an argument is invalid.
    """
    for name, stream in (("impressions", impressions), ("clicks", clicks)):
        if not isinstance(stream, EventStream):
            raise ConfigError(
                f"{name} is a {type(stream).__name__}; give persia.data.kafka(..., event_time=...) or EventBatches.",
                field=name,
            )
    if set(impressions.topics) & set(clicks.topics):
        raise ConfigError("impressions and clicks have a topic in common; give them different topics.", field="clicks")
    check_number("window", window, 0, open_low=True)
    check_integer("limit", limit, 1)
    if late not in ("correct", "drop"):
        raise ConfigError(f'Invalid late = {late!r}; expected "correct" or "drop".', field="late")
    labels = list(impressions.schema.label_names)
    if label is None and len(labels) != 1:
        raise ConfigError(f"label is missing; give one of: {', '.join(labels)}.", field="label")
    if label is not None and label not in labels:
        raise ConfigError(f"Invalid label = {label!r}; expected one of: {', '.join(labels)}.", field="label")
    column = 0 if label is None else labels.index(label)
    options = _Options(on, round(window * 1000), late == "correct", column, limit, flush)
    return JoinedStream(impressions, clicks, options)


class _Options(NamedTuple):
    on: str
    window: int
    corrects: bool
    label: int
    limit: int
    flush: bool


class _Recorded(NamedTuple):
    """A batch: the events that were added before it, and the time up to which windows ended."""

    ranges: list[tuple[bool, OffsetRange]]
    time: int


class _JoinRecord(BatchRecord[_Recorded]):
    """The batches of a join, and the ends of the partitions of bounded streams."""

    def __init__(self, number: int, offsets: Offsets) -> None:
        super().__init__("joined stream", number, offsets)
        self.ends: dict[Partition, int | None] = {}


class JoinedStream(LocalStream[_JoinRecord]):
    """The stream that `join` returns: a `persia.services.Stream`, for a single NN worker in its own process.

    Args:
        impressions: stream with the samples.
        clicks: stream with the clicks.
        options: the other arguments of `join`.
    """

    def __init__(self, impressions: EventStream, clicks: EventStream, options: _Options) -> None:
        super().__init__((*impressions.topics, *clicks.topics), _JoinRecord)
        self.batch_size = impressions.batch_size
        self._impressions = impressions
        self._clicks = clicks
        self._options = options
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    @property
    def schema(self) -> Schema:
        """The schema of the impressions."""
        return self._impressions.schema

    @property
    def input_rules(self) -> InputRules | None:
        """The rules of the impressions for missing values and lists."""
        return input_rules_of(self._impressions)

    def commit(self, offsets: Offsets) -> None:
        """Reports that a checkpoint has all before `offsets`."""
        self._impressions.commit(offsets)
        self._clicks.commit(offsets)

    def observe(self) -> list[Metric]:
        """Returns metrics of the impressions, some of the clicks, and counts of the join. Thread-safe."""
        clicks = [
            metric._replace(name=OF_CLICKS[metric.name])
            for metric in self._clicks.observe()
            if metric.name in OF_CLICKS
        ]
        with self._lock:
            names = ("positives", "negatives", "corrections", "late_clicks", "unmatched_clicks", "open")
            counts = [Metric(f"join_{name}", self._counts[name], {}) for name in names]
        return [*self._impressions.observe(), *clicks, *counts]

    def statistics(self) -> dict[str, int]:
        """Returns the counts of the join. Thread-safe.

        `positives` and `negatives` are impressions, `corrections` impressions that were emitted again, `late_clicks`
        impressions that a click matched after they were emitted (corrected or not), `unmatched_clicks` clicks without
        an impression, and `open` impressions whose windows have not ended. Batches that are read again count again.
        """
        with self._lock:
            return dict(self._counts)

    # --- reading ------------------------------------------------------------------------------------------------

    def _read(self, record: _JoinRecord, number: int, stopping: Callable[[], bool]) -> Iterator[Batch]:
        with closing(_Join(self._impressions, self._clicks, self._options, record, number, stopping)) as join:
            while (emitted := join.next(number)) is not None:
                self._count(emitted, join)
                number += 1
                yield self._labelled(emitted)
            self._count(None, join)

    def _count(self, emitted: Emitted | None, join: _Join) -> None:
        with self._lock:
            if emitted is not None:
                self._counts["positives"] += emitted.positives
                self._counts["negatives"] += len(emitted.clicked) - emitted.corrections - emitted.positives
                self._counts["corrections"] += emitted.corrections
            self._counts["late_clicks"] += join.buffer.take_late()
            self._counts["unmatched_clicks"] += join.buffer.take_unmatched()
            self._counts["open"] = join.buffer.open

    def _labelled(self, emitted: Emitted) -> Batch:
        labels = np.array(emitted.batch.labels, np.float32)
        labels[:, self._options.label] = emitted.clicked
        return dataclasses.replace(emitted.batch, labels=labels)


class _Join:
    """Reads both streams from a batch on, with the buffer restored to its state there. For one thread."""

    def __init__(
        self,
        impressions: EventStream,
        clicks: EventStream,
        options: _Options,
        record: _JoinRecord,
        number: int,
        stopping: Callable[[], bool],
    ) -> None:
        self._batch_size = impressions.batch_size
        self._options = options
        self._record = record
        begin, last = record.stream_offsets(number), record.last
        self._topics = [*impressions.topics, *clicks.topics]
        time = begin.get(impressions.topics[0] + TIME, {}).get(0)
        self.buffer = JoinBuffer(options.window, time)
        self._time_name = impressions.topics[0] + TIME
        self._consumed: dict[Partition, int] = partitions_of(begin)
        self._newest: dict[Partition, int | None] = {**partitions_of(begin, EVENT_TIME)}
        self._chunks: dict[Partition, list[tuple[int, int | None]]] = {}
        """For each partition, the first offsets of messages read together, and the newest time before them."""
        self._pending: list[tuple[bool, OffsetRange]] = []
        self._turn = True
        self._sides: dict[bool, EventShare] = {}
        try:
            for side, stream in ((True, impressions), (False, clicks)):
                ends = [
                    PartitionBounds(partition, offset, record.ends[partition])
                    for partition, offset in partitions_of(last).items()
                    if partition.topic in stream.topics and partition in record.ends
                ]
                self._sides[side] = stream.open_events(options.on, side, ends, last, stopping)
                for bounds in self._sides[side].positions():
                    record.ends.setdefault(bounds.partition, bounds.end)
            self._restore(begin, impressions.topics)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Closes connections."""
        for side in self._sides.values():
            side.close()

    def next(self, number: int) -> Emitted | None:
        """Returns a batch: the recorded one, or a new one, which is recorded; None at the end."""
        recorded = self._record.find(number)
        if recorded is not None:
            for side, offsets in recorded.ranges:
                self._add(side, offsets, self._sides[side].read(offsets))
            self._pending.clear()
            return self._emitted(recorded.time)
        while True:
            complete, over = self._complete()
            if complete is not None:
                time = self.buffer.time_to_emit(complete, self._batch_size, self._options.corrects)
                if time is not None:
                    return self._new(time)
            if self.buffer.open > self._options.limit or (over and self._options.flush and self.buffer.open):
                return self._new(self.buffer.first_end(self._batch_size))
            if over:
                return None
            if self.buffer.clicks > self._options.limit:
                self.buffer.drop_clicks(complete or 0, self._options.limit)
            self._read()

    def _new(self, time: int) -> Emitted:
        """Emits and records a batch."""
        emitted = self._emitted(time)
        self._record.append(_Recorded(self._pending, time), self._position())
        self._pending = []
        return emitted

    def _emitted(self, time: int) -> Emitted:
        emitted = self.buffer.emit(time, self._options.corrects)
        assert emitted is not None  # `time_to_emit` returned a time with samples.
        return emitted

    def _read(self) -> None:
        """Reads from the stream that is behind while both have messages, else from both in turn."""
        progress = {side: share.progress() for side, share in self._sides.items()}
        side = _behind(progress[True].newest, progress[False].newest)
        if side is None or progress[side].complete is None:
            self._turn = not self._turn
            side = self._turn
        if progress[side].over:
            side = not side
        new = self._sides[side].poll()
        if new is not None:
            self._add(side, *new)

    def _complete(self) -> tuple[int | None, bool]:
        """Returns the time before which no event is expected, and whether both streams are over."""
        progress = [share.progress() for share in self._sides.values()]
        over = all(each.over for each in progress)
        if any(each.unknown for each in progress):
            return None, over
        complete_times = [each.complete for each in progress if each.complete is not None]
        if complete_times:
            return min(complete_times), over
        # All partitions are read to their ends, so no older events are expected.
        return max((each.newest for each in progress if each.newest is not None), default=None), over

    def _add(self, side: bool, offsets: OffsetRange, events: KeyedEvents) -> None:
        partition = offsets.partition
        self._chunks.setdefault(partition, []).append((offsets.begin, offsets.newest))
        self._consumed[partition] = offsets.end
        if offsets.newest_after is not None:
            self._newest[partition] = offsets.newest_after
        self._pending.append((side, offsets))
        self.buffer.add(side, self._code(partition), offsets.begin, events)

    # --- position -----------------------------------------------------------------------------------------------

    def _position(self) -> Offsets:
        """Returns the position after the last emitted batch."""
        begins = self.buffer.begins()
        position: Offsets = {}
        assert self.buffer.time is not None
        position[self._time_name] = {0: self.buffer.time}
        for partition, consumed in self._consumed.items():
            topic, number = partition
            position.setdefault(topic, {})[number] = consumed
            newest = self._newest.get(partition)
            if newest is not None:
                position.setdefault(topic + EVENT_TIME, {})[number] = newest
            begin = begins.get(self._code(partition))
            chunks = self._chunks.get(partition, [])
            while chunks and (begin is None or chunks[0][0] < begin):
                chunks.pop(0)
            if begin is not None:
                position.setdefault(topic + FROM, {})[number] = begin
                if chunks and chunks[0][1] is not None:
                    position.setdefault(topic + NEWEST, {})[number] = chunks[0][1]
        return position

    def _restore(self, position: Offsets, impressions: tuple[str, ...]) -> None:
        """Reads the events that the buffer had at a position again."""
        newest = partitions_of(position, NEWEST)
        for partition, begin in partitions_of(position, FROM).items():
            side = partition.topic in impressions
            end = self._consumed[partition]
            offsets = OffsetRange(partition, begin, end, newest.get(partition), self._newest.get(partition))
            self._chunks[partition] = [(begin, newest.get(partition))]
            self.buffer.restore(side, self._code(partition), begin, self._sides[side].read(offsets))
        self.buffer.restored()

    def _code(self, partition: Partition) -> int:
        """Returns the number of a partition, the same in every run."""
        return self._topics.index(partition.topic) << 32 | partition.number


def _behind(impressions: int | None, clicks: int | None) -> bool | None:
    """Returns the stream whose newest event is older (True for the impressions); None if a stream has no events."""
    if impressions is None or clicks is None:
        return None
    return impressions <= clicks
