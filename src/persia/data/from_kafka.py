"""Reads topics of Kafka."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, TypeAlias

from persia.batching.batch import Batch
from persia.checks import check_integer, plain
from persia.data.broker import Broker, BrokerOptions, Buffer, Stopped, client, committed, require_library
from persia.data.expressions import Rule
from persia.data.files import File
from persia.data.messages import MessageDecoder, StreamMessage, ValuesFormat
from persia.data.offset_log import OffsetLog, OffsetRange, Partition
from persia.data.rows import Conversion, DayUnit, Piece
from persia.errors import ConfigError, DataError
from persia.schema import Schema
from persia.telemetry.metrics import Metric
from persia.types import Offsets

__all__ = ["KafkaReader", "kafka"]

LOG = logging.getLogger("persia.data")

COMMIT_SECONDS = 10.0
"""Maximum time to commit offsets to a group."""

DEAD_LETTER_SECONDS = 30.0
"""Maximum time to write messages to the dead-letter topic."""

MOST_BUFFERED = 4
"""Batches to buffer of a partition while another one is waited for."""

FIRST_FETCH = 64
"""Messages to fetch at once as long as their rows are unknown."""

LEAST_FETCH = 16
"""Messages to fetch at once, however many rows they have."""

MEASURE_SECONDS = 1.0
"""Interval of measuring the lag."""

POISONED = 16
"""Messages of a batch of which not all can be poison: the schema is wrong then."""

Begin: TypeAlias = Literal["earliest", "latest"] | datetime
Until: TypeAlias = Literal["now"] | datetime | None


def kafka(
    topics: str | Sequence[str],
    schema: Schema,
    batch_size: int = 1024,
    *,
    bootstrap: str,
    values: ValuesFormat = "json",
    start: Begin = "earliest",
    until: Until = None,
    linger: float = 1.0,
    poison: Literal["error", "skip"] = "error",
    dead_letters: str | None = None,
    group: str | None = None,
    timeout: float = 600.0,
    rename: Mapping[str, str] | None = None,
    labels: Mapping[str, Rule] | None = None,
    fill: Mapping[str, float] | None = None,
    day: str | None = None,
    day_unit: DayUnit = "day",
    config: Mapping[str, Any] | None = None,
) -> KafkaReader:
    """Reads topics of Kafka, as they grow or up to where they are now.

    A batch is a range of offsets of one partition. It is recorded before it is handed out, so it can be read again
    exactly. The position of each partition is part of the trainer's checkpoints: a resumed run, and the next call of
    `fit`, go on there. The group of the broker decides nothing.

    A partition with a whole batch is read at once, the one with the earliest message first; others wait for `linger`.
    Idle partitions hold nobody up. While nothing comes, reading waits; `Trainer.stop` and signals end that.

    `kafka.timestamp` is a column with the time of a message in milliseconds, for `day`, `rename` and `labels`.

    Args:
        topics: topic, or several that have the same columns.
        schema: columns to read.
        batch_size: samples per batch at most. A message with more rows is a batch by itself.
        bootstrap: addresses of some brokers, `host:port,host:port`.
        values: content of a message: "json" or "msgpack" for one row as an object or map by column, "arrow" for any
            number of rows as an Arrow IPC stream, which is many times as fast.
        start: where partitions begin that have no position yet. Partitions that are added later begin at their first
            message.
        until: None for a stream without an end; "now" for what there is when reading begins; or a time in the past.
            It bounds the offsets of each partition by the time of messages.
        linger: seconds that a message waits for others of its partition to fill a batch.
        poison: for a message that cannot be converted, "error" raises, and "skip" counts it and goes on.
        dead_letters: topic that gets skipped messages, with headers that tell where they are from and what is wrong. A
            message may be written there again if its batch is read again.
        group: consumer group to commit offsets to, once a checkpoint with them is complete; for lag monitors only.
        timeout: seconds for which brokers may be out of reach; then reading fails.
        rename: column of the message by name in the schema, where they differ.
        labels: rule by label, for labels that are not a column; see `parquet`.
        fill: replacement of missing values, by dense feature or label; without it, a missing value is an error.
        day: column that gives `Batch.day`: whole numbers, dates, timestamps.
        day_unit: unit of whole numbers in `day`.
        config: further settings of librdkafka, for example of SASL and TLS.

    Raises:
        MissingExtraError: confluent-kafka is not installed.
        ConfigError: an argument is invalid.
        DataError: while iterating: a topic cannot be read, messages have been deleted before they were read, or one
            cannot be converted. The message names topic, partition and offset.
        DeadlineError: while iterating: no broker could be reached for `timeout` seconds.
    """
    names = (topics,) if isinstance(topics, str) else tuple(topics)
    batch_size = plain(batch_size)
    check_integer("batch_size", batch_size, 1)
    for name, value, choices in (
        ("values", values, ("json", "msgpack", "arrow")),
        ("poison", poison, ("error", "skip")),
        ("start", start, ("earliest", "latest")),
        ("until", until, (None, "now")),
    ):
        if value not in choices and not (name in ("start", "until") and isinstance(value, datetime)):
            listed = ", ".join(map(repr, choices))
            raise ConfigError(f"Invalid {name} = {value!r}; expected one of: {listed}.", field=name)
    if not names or not all(isinstance(name, str) and name for name in names) or len(set(names)) < len(names):
        raise ConfigError(f"topics = {topics!r}; give a name, or a list of different names.", field="topics")
    if isinstance(until, datetime) and until.timestamp() > time.time():
        raise ConfigError(f"until = {until} is in the future; give a time in the past, or None.", field="until")
    if dead_letters is not None and poison != "skip":
        raise ConfigError('dead_letters needs poison="skip".', field="dead_letters")
    taken = {"bootstrap.servers", "group.id", "enable.auto.commit", "auto.offset.reset", "enable.partition.eof"}
    for name in taken & set(config or {}):
        raise ConfigError(f"config has {name!r}, which this reader sets; leave it out.", field="config")
    options = KafkaOptions(
        BrokerOptions(bootstrap, names, group, timeout, dict(config or {})),
        values,
        start,
        until,
        linger,
        poison,
        dead_letters,
    )
    conversion = Conversion(schema, dict(rename or {}), day, day_unit, labels=dict(labels or {}), fill=dict(fill or {}))
    require_library()
    return KafkaReader(conversion, batch_size, options)


@dataclass(frozen=True)
class KafkaOptions:
    """Arguments of `kafka`."""

    broker: BrokerOptions
    values: ValuesFormat
    start: Begin
    until: Until
    linger: float
    poison: Literal["error", "skip"]
    dead_letters: str | None


class KafkaReader:
    """A `Reader` of topics of Kafka, and a `persia.services.Stream`. Picklable; its record is not pickled.

    Args:
        conversion: makes batches of rows.
        batch_size: samples per batch at most.
        options: arguments of `kafka`.
    """

    def __init__(self, conversion: Conversion, batch_size: int, options: KafkaOptions) -> None:
        self.batch_size = batch_size
        self.interrupted = False
        self._conversion = conversion
        self._options = options
        columns = [*conversion.wanted.values(), *conversion.rule_columns, *([conversion.day] if conversion.day else [])]
        self._decoder = MessageDecoder(options.values, list(dict.fromkeys(columns)))
        self._log = OffsetLog(0, {})
        self._stopping: Callable[[], bool] = _never
        self._counts: Counter[str] = Counter()
        self._lags: dict[Partition, int] = {}
        self._measured = 0.0
        """Time of the last measurement of the lag."""
        self._fetch = min(batch_size, FIRST_FETCH)
        """Messages that make a batch, about."""
        self._time = 0
        """Time of the last message that was handed out, in milliseconds since 1970."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles without the record."""
        return KafkaReader, (self._conversion, self.batch_size, self._options)

    @property
    def schema(self) -> Schema:
        """The schema of the batches."""
        return self._conversion.schema

    def __iter__(self) -> Iterator[Batch]:
        """Iterates from `start` on, with a record of its own."""
        return self._batches(OffsetLog(0, {}), 0, _never)

    def batches(self, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        """Iterates from batch `start` of the record on: over recorded batches, then over new ones.

        The epoch is ignored: a stream has one pass. Blocks while nothing comes.

        Raises:
            DataError: the batch was forgotten, or is not recorded; also see `kafka`.
        """
        self.interrupted = False
        return self._batches(self._log, start, self._stopping)

    # --- Stream -------------------------------------------------------------------------------------------------

    def begin(self, number: int, offsets: Offsets, stopping: Callable[[], bool]) -> None:
        """Starts a new record; see `persia.services.Stream`."""
        topics = self._options.broker.topics
        self._log = OffsetLog(number, {topic: offsets[topic] for topic in topics if topic in offsets})
        self._stopping = stopping

    def offsets(self, number: int) -> Offsets:
        """Returns where a batch begins; see `persia.services.Stream`."""
        return self._log.offsets(number)

    def forget(self, below: int) -> None:
        """Forgets batches of lower numbers."""
        self._log.forget(below)

    def commit(self, offsets: Offsets) -> None:
        """Commits offsets to the group, if there is one; logs a failure."""
        options = self._options.broker
        mine = {topic: offsets[topic] for topic in options.topics if topic in offsets}
        if options.group is None or not mine:
            return
        try:
            committed(options, mine, COMMIT_SECONDS)
        except Exception as error:
            LOG.warning(
                "Offsets were not committed to group %s of Kafka at %s, so its lag looks larger than it is: %s",
                options.group, options.bootstrap, error,
            )  # fmt: skip

    def observe(self) -> list[Metric]:
        """Returns rows, batches, poison messages, and the lag of each partition. Thread-safe."""
        found = [Metric(f"stream_{name}", self._counts[name], {}) for name in ("rows", "batches", "poison")]
        if self._time:
            found.append(Metric("stream_delay_seconds", max(0.0, time.time() - self._time / 1000), {}))
        for (topic, number), lag in dict(self._lags).items():
            found.append(Metric("stream_lag", lag, {"topic": topic, "partition": str(number)}))
        return found

    # --- reading ------------------------------------------------------------------------------------------------

    def _batches(self, log: OffsetLog, number: int, stopping: Callable[[], bool]) -> Iterator[Batch]:
        log.find(number)
        try:
            with closing(Broker(self._options.broker, self._decoder, stopping)) as broker:
                self._open(broker, log, number)
                while True:
                    recorded = log.find(number)
                    if recorded is not None:
                        batch = self._read_again(broker, log, recorded)
                    elif (new := self._read_new(broker, log)) is not None:
                        batch = new
                    else:
                        return
                    number += 1
                    yield batch
        except Stopped:
            self.interrupted = True

    def _open(self, broker: Broker, log: OffsetLog, number: int) -> None:
        """Finds the partitions and their ends, and begins to fetch at batch `number`."""
        partitions, start, until = broker.partitions(), self._options.start, self._options.until
        marks = {partition: broker.watermarks(partition) for partition in partitions}
        begins = {partition: low for partition, (low, _) in marks.items()}
        ends = {partition: high for partition, (_, high) in marks.items()}
        known = {partition.topic for partition in log.partitions()}
        # A partition that a known topic lacks was added since, and begins with its first message.
        if new := [partition for partition in partitions if partition.topic not in known]:
            if isinstance(start, datetime):
                begins |= broker.offsets_at(new, _milliseconds(start))
            elif start == "latest":
                begins |= {partition: ends[partition] for partition in new}
        for partition, offset in begins.items():
            log.add_partition(partition, offset)
        if log.ends is None and until is not None:
            log.ends = broker.offsets_at(partitions, _milliseconds(until)) if isinstance(until, datetime) else ends
        offsets = {Partition(topic, p): o for topic, of in log.offsets(number).items() for p, o in of.items()}
        for partition, offset in offsets.items():
            low, high = marks.get(partition, (0, -1))
            if not low <= offset <= high:
                raise broker.deleted(partition, offset)
        broker.assign(offsets)

    def _read_again(self, broker: Broker, log: OffsetLog, recorded: OffsetRange) -> Batch:
        """Reads a recorded batch."""
        partition, begin, end = recorded
        buffer = broker.buffers[partition]
        while buffer.position < end:
            self._poll(broker, partition)
        messages = buffer.take_below(end)
        batch = self._converted(partition, messages) if messages else None
        # Messages at the beginning may be missing as the topic was compacted, but not as they are too old.
        if batch is None or (messages[0].offset > begin and broker.watermarks(partition)[0] > begin):
            raise broker.deleted(partition, begin)
        return self._counted(batch, messages)

    def _read_new(self, broker: Broker, log: OffsetLog) -> Batch | None:
        """Reads the next batch, and records it; None at the end of a bounded stream."""
        while True:
            partition = self._ready(broker, log)
            if partition is None:
                if log.ends is not None and all(
                    not buffer.messages and buffer.position >= log.ends.get(partition, 0)
                    for partition, buffer in broker.buffers.items()
                ):
                    self._measured = 0.0
                    self._measure(broker, log)
                    return None
                self._poll(broker, None)
                self._measure(broker, log)
                if log.ends is None:
                    for added in broker.new_partitions():
                        log.add_partition(added, broker.watermarks(added)[0])
                        broker.assign({added: log.next_offset(added)})
                continue
            messages = broker.buffers[partition].take(self.batch_size)
            batch = self._converted(partition, messages)
            if batch is None:  # All were skipped; they belong to the partition's next batch.
                continue
            log.append(OffsetRange(partition, log.next_offset(partition), messages[-1].offset + 1))
            self._fetch = max(LEAST_FETCH, self.batch_size * len(messages) // len(batch))
            self._measure(broker, log)
            return self._counted(batch, messages)

    def _ready(self, broker: Broker, log: OffsetLog) -> Partition | None:
        """Returns the partition of the next batch, if there is one: with enough rows, or rows that waited for long."""
        late = time.monotonic() - self._options.linger
        ready: list[tuple[int, Partition]] = []
        for partition, buffer in broker.buffers.items():
            if log.ends is not None:
                _cut(buffer, log.ends.get(partition, 0))
            if not buffer.messages:
                continue
            over = log.ends is not None and buffer.position >= log.ends.get(partition, 0)
            waited = buffer.caught_up and buffer.since <= late  # Else more are on their way.
            if over or buffer.rows >= self.batch_size or waited:
                ready.append((buffer.messages[0].time, partition))
        return min(ready)[1] if ready else None

    def _poll(self, broker: Broker, wanted: Partition | None) -> None:
        """Fetches messages; of partitions other than the wanted one, only as long as few are buffered."""
        for partition, buffer in broker.buffers.items():
            full = buffer.rows >= MOST_BUFFERED * self.batch_size
            broker.pause(partition, wanted is not None and partition != wanted and full)
        broker.poll(self._fetch)

    def _converted(self, partition: Partition, messages: list[StreamMessage]) -> Batch | None:
        """Converts messages to a batch; None if all were skipped.

        Raises:
            DataError: one cannot be converted, and is not to be skipped.
        """
        try:
            return self._convert(partition, messages)
        except DataError:
            bad: list[tuple[StreamMessage, DataError]] = []
            parts = self._salvaged(partition, messages, bad)
        first, reason = bad[0]
        where = f"Offset {first.offset} of partition {partition.number} of topic {partition.topic!r}"
        if self._options.poison == "error" or len(bad) == len(messages) >= POISONED:
            others = f" So is every other of {len(bad)} messages." if len(bad) > 1 else ""
            raise DataError(
                f"{where} cannot be converted: {reason.message}{others} Correct the schema or the topic's producer; "
                'poison="skip" skips single messages.',
                topic=partition.topic,
                partition=partition.number,
                offset=first.offset,
            ) from reason
        self._counts["poison"] += len(bad)
        LOG.warning("%s: %d messages are skipped; the first: %s", where, len(bad), reason.message)
        if self._options.dead_letters is not None:
            self._bury(partition, bad)
        return Batch.concat(parts) if parts else None

    def _salvaged(
        self, partition: Partition, messages: list[StreamMessage], bad: list[tuple[StreamMessage, DataError]]
    ) -> list[Batch]:
        """Converts messages in as few parts as possible; appends those that cannot be converted to `bad`.

        Where poison is an error, the first one suffices.
        """
        if not messages or (bad and self._options.poison == "error"):
            return []
        try:
            batch = self._convert(partition, messages)
        except DataError as error:
            if len(messages) == 1:
                bad.append((messages[0], error))
                return []
            half = len(messages) // 2
            before = self._salvaged(partition, messages[:half], bad)
            return before + self._salvaged(partition, messages[half:], bad)
        return [batch] if batch is not None else []

    def _convert(self, partition: Partition, messages: list[StreamMessage]) -> Batch | None:
        table = self._decoder.table(messages)
        if not table.num_rows:
            return None
        file = File(f"kafka://{partition.topic}/{partition.number}")
        columns = self._conversion.columns_of(file, table.column_names)
        named = {name: table.column(name).chunk(0) for name in columns}
        return next(self._conversion.batches(iter([Piece(file, 0, named, table.num_rows)]), 0))

    def _bury(self, partition: Partition, bad: list[tuple[StreamMessage, DataError]]) -> None:
        """Writes messages to the dead-letter topic. Blocks until they are there.

        Raises:
            DataError: they could not be written.
        """
        options = self._options
        assert options.dead_letters is not None
        producer = client("Producer", options.broker, **{"message.timeout.ms": int(DEAD_LETTER_SECONDS * 1000)})
        failures: list[str] = []
        for message, error in bad:
            headers = {
                "persia.topic": partition.topic,
                "persia.partition": str(partition.number),
                "persia.offset": str(message.offset),
                "persia.error": error.message,
            }
            producer.produce(
                options.dead_letters,
                value=message.value,
                headers=headers,
                on_delivery=lambda failed, _: failures.append(failed.str()) if failed is not None else None,
            )
        left = producer.flush(DEAD_LETTER_SECONDS)
        if left or failures:
            raise DataError(
                f"{left + len(failures)} messages could not be written to the dead-letter topic "
                f"{options.dead_letters!r} ({'; '.join(failures[:1]) or 'no answer'}); check it, or leave it out.",
                topic=options.dead_letters,
            )

    def _counted(self, batch: Batch, messages: list[StreamMessage]) -> Batch:
        self._counts["rows"] += len(batch)
        self._counts["batches"] += 1
        self._time = messages[-1].time
        return batch

    def _measure(self, broker: Broker, log: OffsetLog) -> None:
        now = time.monotonic()
        if now - self._measured < MEASURE_SECONDS:
            return
        self._measured = now
        for partition in broker.buffers:
            lag = broker.lag(partition, log.next_offset(partition))
            if lag is not None:
                self._lags[partition] = lag


def _cut(buffer: Buffer, end: int) -> None:
    """Drops messages from the end of a bounded stream on."""
    while buffer.messages and buffer.messages[-1].offset >= end:
        buffer.rows -= buffer.messages.pop().rows


def _milliseconds(time: datetime) -> int:
    return int(time.timestamp() * 1000)


def _never() -> bool:
    return False
