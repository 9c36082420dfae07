"""Reads topics of Kafka."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, Unpack

from persia.checks import MAX_SECONDS, check_integer, check_number, check_seconds, plain
from persia.data.row_options import ColumnOptions, conversion_of, with_options
from persia.data.rows import Conversion
from persia.data.streams.broker import BrokerOptions, committed
from persia.data.streams.first_messages import first_inputs
from persia.data.streams.message_decoding import TIMESTAMP, ValuesFormat
from persia.data.streams.message_rows import MessageConverter
from persia.data.streams.offset_log import OffsetLog
from persia.data.streams.options import Begin, EventTime, KafkaOptions, StreamCounts, Until
from persia.data.streams.recorded import LoggedStream
from persia.data.streams.share import KafkaEvents, KafkaShare
from persia.errors import ConfigError
from persia.kafka_client import require_library
from persia.schema import InputRules, Schema
from persia.services import StreamLog
from persia.telemetry.logs import get_logger
from persia.telemetry.metrics import Metric
from persia.types import Offsets, PartitionBounds

__all__ = ["KafkaReader", "kafka"]

LOG = get_logger("persia.data")

COMMIT_SECONDS = 10.0
"""Maximum time to commit offsets to a group."""


@with_options(ColumnOptions)
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
    event_time: str | None = None,
    event_time_unit: Literal["s", "ms"] = "s",
    allowed_lateness: float | None = None,
    late: Literal["drop", "keep"] = "drop",
    config: Mapping[str, Any] | None = None,
    **columns: Unpack[ColumnOptions],
) -> KafkaReader:
    """Reads topics of Kafka as they grow, or up to their current end.

    A batch is a range of offsets of one partition. It is recorded before it is returned, so it can be read again
    exactly. The position of each partition is part of the trainer's checkpoints: a resumed run, and the next call of
    `fit`, continue there. Offsets committed to the broker's consumer group are ignored.

    A partition with a full batch is read immediately, the partition with the earliest message first; others wait for
    `linger`. Idle partitions do not delay others. Reading waits for messages until `Trainer.stop` or a signal ends it.

    `kafka.timestamp` is a column with the time of a message in milliseconds, for `day`, `rename` and `labels`.

    Args:
        topics: one topic, or several with the same columns.
        schema: columns to read.
        batch_size: maximum samples per batch. A message with more rows is a batch by itself.
        bootstrap: addresses of some brokers, `host:port,host:port`.
        values: content of a message: "json" or "msgpack" for one row as an object or map by column, "arrow" for any
            number of rows as an Arrow IPC stream, which is many times as fast.
        start: start of partitions that have no position yet. Partitions that are added later begin at their first
            message.
        until: None for a stream without an end; "now" for the messages that exist when reading begins; or a time in
            the past. It bounds the offsets of each partition by the time of messages.
        linger: seconds that a message waits for others of its partition to fill a batch.
        poison: for a message that cannot be converted, "error" raises, and "skip" counts the message and continues.
        dead_letters: topic for skipped messages, with headers that name their origin and the problem. A message may be
            written there again if its batch is read again.
        group: consumer group to commit offsets to, once a checkpoint with them is complete; for lag monitors only.
        timeout: seconds for which brokers may be out of reach before reading fails.
        event_time: column with the time of the event: timestamps, or numbers since 1970. For lateness, and for `join`.
        event_time_unit: unit of numbers in `event_time`; the unit of `kafka.timestamp` is always milliseconds.
        allowed_lateness: seconds by which an event may be older than the newest event before it in its partition. Older
            events are late. None: no event is late.
        late: "drop" drops late rows, and "keep" trains them; both count them.
        config: further settings of librdkafka, for example of SASL and TLS.
        **columns: see `ColumnOptions`.

    Raises:
        MissingExtraError: confluent-kafka is not installed.
        ConfigError: an argument is invalid.
        DataError: while iterating: a topic cannot be read, messages were deleted before they were read, or a message
            cannot be converted. Names topic, partition and offset.
        DeadlineError: while iterating: no broker could be reached for `timeout` seconds.
    """
    names = (topics,) if isinstance(topics, str) else tuple(topics)
    batch_size, linger, timeout = plain(batch_size), plain(linger), plain(timeout)
    check_integer("batch_size", batch_size, 1)
    check_number("linger", linger, 0, MAX_SECONDS)
    check_seconds("timeout", timeout)
    for name, value, choices in (
        ("values", values, ("json", "msgpack", "arrow")),
        ("poison", poison, ("error", "skip")),
        ("start", start, ("earliest", "latest")),
        ("until", until, (None, "now")),
        ("event_time_unit", event_time_unit, ("s", "ms")),
        ("late", late, ("drop", "keep")),
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
    if allowed_lateness is not None:
        check_number("allowed_lateness", allowed_lateness, 0, MAX_SECONDS)
        if event_time is None:
            raise ConfigError("allowed_lateness needs event_time, the column with the time.", field="event_time")
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
        None
        if event_time is None
        else EventTime(
            event_time,
            1 if event_time_unit == "ms" or event_time == TIMESTAMP else 1000,
            None if allowed_lateness is None else round(allowed_lateness * 1000),
            late == "drop",
        ),
    )
    conversion = conversion_of(schema, **columns)
    require_library()
    return KafkaReader(conversion, batch_size, options)


class KafkaReader(LoggedStream):
    """A `Reader` of topics of Kafka, and a `persia.services.SharedStream`. Picklable; its record is not pickled.

    Args:
        conversion: converts rows to batches.
        batch_size: maximum samples per batch.
        options: arguments of `kafka`.
    """

    def __init__(self, conversion: Conversion, batch_size: int, options: KafkaOptions) -> None:
        super().__init__(options.broker.topics)
        self.batch_size = batch_size
        self._conversion = conversion
        self._options = options
        self._counts = StreamCounts()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles without the record."""
        return KafkaReader, (self._conversion, self.batch_size, self._options)

    @property
    def schema(self) -> Schema:
        """The schema of the batches."""
        return self._conversion.schema

    def with_schema(self, schema: Schema) -> KafkaReader:
        """Returns a reader of the same rows for another schema, without a record."""
        conversion = dataclasses.replace(self._conversion, schema=schema)
        return KafkaReader(conversion, self.batch_size, self._options)

    def first_inputs(self, names: Sequence[str], rows: int | None) -> Iterator[dict[str, Any]]:
        """Yields columns of the rows from the next batch on; see `InputStream`. Nothing is recorded or committed."""
        return first_inputs(self._conversion, self._options, self._record.stream_offsets(None), names, rows)

    @property
    def input_rules(self) -> InputRules:
        """See `Conversion.input_rules`."""
        return self._conversion.input_rules

    def share(self, log: StreamLog, loader: int, loaders: int, stopping: Callable[[], bool]) -> KafkaShare:
        """Opens the share of a data loader; see `persia.services.SharedStream`."""
        converter = MessageConverter(self._conversion, self._options, self._counts)
        return KafkaShare(self._options, self.batch_size, converter, self._counts, log, loader, loaders, stopping)

    def open_events(
        self,
        on: str,
        rows: bool,
        positions: list[PartitionBounds],
        earlier: Offsets,
        stopping: Callable[[], bool],
    ) -> KafkaEvents:
        """Opens the stream for a join; see `persia.data.streams.events.EventStream`.

        Raises:
            ConfigError: the stream has no event time.
        """
        options, event_time = self._options, self._options.event_time
        if event_time is None:
            raise ConfigError("A stream that is joined needs event_time, the column with its time.", field="event_time")
        if not rows:  # Clicks: the join handles late ones.
            options = dataclasses.replace(options, event_time=event_time._replace(drop=False))
        converter = MessageConverter(self._conversion, options, self._counts, on, rows)
        log = OffsetLog(0, {topic: earlier[topic] for topic in earlier if topic.partition("@")[0] in self.topics})
        log.assign(positions)
        share = KafkaShare(options, self.batch_size, converter, self._counts, log, 0, 1, stopping)
        return KafkaEvents(share, log)

    def commit(self, offsets: Offsets) -> None:
        """Commits offsets to the group, if there is one. Logs failures."""
        options = self._options.broker
        own_offsets = {topic: offsets[topic] for topic in options.topics if topic in offsets}
        if options.group is None or not own_offsets:
            return
        try:
            committed(options, own_offsets, COMMIT_SECONDS)
        except Exception as error:
            LOG.warning(
                "Offsets were not committed to group %s of Kafka at %s, so its lag appears larger than it is: %s",
                options.group, options.bootstrap, error,
            )  # fmt: skip

    def observe(self) -> list[Metric]:
        """Returns rows, batches, poison messages, late rows, and the lag of each partition. Thread-safe."""
        return self._counts.observe()
