"""Reads messages of a Kafka cluster: partitions, offsets, and buffers of fetched messages. For one thread."""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from persia.data.streams.message_decoding import MessageDecoder, StreamMessage
from persia.data.streams.recorded import Stopped
from persia.errors import ConfigError, DataError, DeadlineError, PersiaError
from persia.kafka_client import is_transient, make_client
from persia.retry import Deadline
from persia.telemetry.logs import get_logger
from persia.types import Offsets, Partition

__all__ = ["POLL_SECONDS", "Broker", "BrokerOptions", "Buffer", "client", "committed"]

T = TypeVar("T")

LOG = get_logger("persia.data")

POLL_SECONDS = 0.1
"""Maximum wait for messages before the caller checks whether to stop."""

GATHER_SECONDS = 0.01
"""Maximum wait for more messages once there is one."""

FETCH_BACKOFF_MS = 10
"""Interval at which librdkafka checks whether the queued messages of a partition were consumed."""

METADATA_SECONDS = 30.0
"""Interval of checking for new partitions and deleted topics."""

PROBE_SECONDS = 1.0
"""Interval of probing brokers that cannot be reached, and timeout of a probe."""


@dataclass(frozen=True)
class BrokerOptions:
    """Options of the connection to brokers.

    Attributes:
        bootstrap: addresses of some brokers, `host:port,host:port`.
        topics: topics to read.
        group: consumer group to commit offsets to; None to commit none.
        timeout: seconds for which brokers may be out of reach.
        config: further settings of librdkafka.
    """

    bootstrap: str
    topics: tuple[str, ...]
    group: str | None
    timeout: float
    config: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass
class Buffer:
    """Messages of a partition that were fetched and are not in a batch yet.

    Attributes:
        messages: the messages, in order of their offsets.
        position: offset up to which all messages have been fetched.
        end: last known end of the partition; -1 before it was reached.
        rows: rows of `messages`.
        size: bytes of `messages`, once decompressed.
        since: arrival time of the first message.
        paused: whether fetching is paused, as enough is buffered.
    """

    messages: deque[StreamMessage] = field(default_factory=deque)
    position: int = 0
    end: int = -1
    rows: int = 0
    size: int = 0
    since: float = 0.0
    paused: bool = False

    @property
    def caught_up(self) -> bool:
        """Whether all messages up to the last known end of the partition have been fetched."""
        return self.end >= self.position

    def append(self, message: StreamMessage) -> None:
        """Adds a message."""
        if not self.messages:
            self.since = time.monotonic()
        self.messages.append(message)
        self.rows += message.rows
        self.size += message.size
        self.position = message.offset + 1

    def take(self, rows: int, size: int) -> list[StreamMessage]:
        """Removes messages with up to `rows` rows and `size` bytes; at least one message."""
        count = taken_rows = taken_size = 0
        for message in self.messages:
            if count and (taken_rows + message.rows > rows or taken_size + message.size > size):
                break
            count += 1
            taken_rows += message.rows
            taken_size += message.size
        taken = [self.messages.popleft() for _ in range(count)]
        self.rows -= taken_rows
        self.size -= taken_size
        self.since = time.monotonic()
        return taken

    def take_below(self, end: int) -> list[StreamMessage]:
        """Removes the messages before an offset."""
        taken: list[StreamMessage] = []
        while self.messages and self.messages[0].offset < end:
            taken.append(self.messages.popleft())
        self.rows -= sum(message.rows for message in taken)
        self.size -= sum(message.size for message in taken)
        return taken

    def drop_from(self, offset: int) -> None:
        """Drops the messages from an offset on."""
        while self.messages and self.messages[-1].offset >= offset:
            dropped = self.messages.pop()
            self.rows -= dropped.rows
            self.size -= dropped.size

    def holds(self, rows: int, size: int) -> bool:
        """Whether there are at least `rows` rows, or at least `size` bytes."""
        return self.rows >= rows or self.size >= size


def client(kind: str, options: BrokerOptions, **settings: Any) -> Any:
    """Returns a `Consumer` or a `Producer` of confluent-kafka.

    Raises:
        DataError: librdkafka refuses a setting.
    """
    try:
        return make_client(kind, options.bootstrap, {**options.config, **settings}, LOG)
    except ConfigError as error:
        raise DataError(
            f"Kafka at {options.bootstrap}: {error.__cause__}; correct `config`.", bootstrap=options.bootstrap
        ) from error


class Broker:
    """A connection to the brokers.

    Args:
        options: options of the connection.
        decoder: decodes values.
        stopping: polled while waiting.
    """

    def __init__(self, options: BrokerOptions, decoder: MessageDecoder, stopping: Callable[[], bool]) -> None:
        self._options = options
        self._decoder = decoder
        self._stopping = stopping
        self._error: Any = None
        """Last error of the connection; None once a broker has answered."""
        self._down: Deadline | None = None
        """Deadline for the brokers to return; None while they can be reached."""
        self._probe = self._metadata = time.monotonic()
        self.buffers: dict[Partition, Buffer] = {}
        self._ends: dict[Partition, int] = {}
        """Last known offset of the next message to be written to each partition."""
        self._consumer = client(
            "Consumer",
            options,
            **{
                # Offsets are kept in checkpoints: this consumer commits nothing, and no group assigns partitions.
                "group.id": options.group or f"persia-{uuid.uuid4().hex}",
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "enable.partition.eof": True,
                "auto.offset.reset": "error",
                # By default, a partition with enough queued messages is not fetched for a second, though its queue may
                # soon be empty.
                "fetch.queue.backoff.ms": options.config.get("fetch.queue.backoff.ms", FETCH_BACKOFF_MS),
                "error_cb": self._failed,
            },
        )

    def close(self) -> None:
        """Closes the connection."""
        self._consumer.close()

    # --- requests -----------------------------------------------------------------------------------------------

    def partitions(self) -> list[Partition]:
        """Returns the partitions of all topics. Blocks.

        Raises:
            DataError: a topic does not exist or may not be read.
            DeadlineError: no broker answered in time.
            Stopped: asked to stop.
        """
        return [partition for topic in self._options.topics for partition in self._partitions(topic)]

    def watermarks(self, partition: Partition) -> tuple[int, int]:
        """Returns the first available offset, and the offset of the next message to be written. Blocks."""
        low, high = self._ask(
            f"the offsets of {_name(partition)}",
            lambda: self._consumer.get_watermark_offsets(_of(partition), timeout=PROBE_SECONDS),
        )
        self._ends[partition] = int(high)
        return int(low), int(high)

    def offsets_at(self, partitions: Iterable[Partition], milliseconds: int) -> dict[Partition, int]:
        """Returns the offsets of the first messages from a time on, or of the next message to be written."""
        asked = [_of(partition, milliseconds) for partition in partitions]
        answered = self._ask(
            f"the offsets at {milliseconds} ms", lambda: self._consumer.offsets_for_times(asked, PROBE_SECONDS)
        )
        offsets = {Partition(answer.topic, answer.partition): int(answer.offset) for answer in answered}
        return {p: offset if offset >= 0 else self.watermarks(p)[1] for p, offset in offsets.items()}

    def lag(self, partition: Partition, offset: int) -> int | None:
        """Returns the number of offsets from `offset` to the end of a partition, as last known; None if unknown."""
        try:
            _, end = self._consumer.get_watermark_offsets(_of(partition), cached=True)
        except Exception:  # Nothing was fetched yet.
            end = -1
        if end < 0:
            end = self._ends.get(partition, -1)
        return max(0, end - offset) if end >= 0 else None

    # --- messages -----------------------------------------------------------------------------------------------

    def assign(self, offsets: Mapping[Partition, int]) -> None:
        """Fetches partitions from these offsets on: adds new partitions, and seeks in assigned ones."""
        if again := [partition for partition in offsets if partition in self.buffers]:
            for partition in again:
                self.pause(partition, False)
            self._consumer.incremental_unassign([_of(partition) for partition in again])
        for partition, offset in offsets.items():
            self.buffers[partition] = Buffer(position=offset)
        self._consumer.incremental_assign([_of(partition, offset) for partition, offset in offsets.items()])

    def new_partitions(self) -> list[Partition]:
        """Returns partitions that are not assigned. Checks every `METADATA_SECONDS`; returns none in between."""
        if time.monotonic() - self._metadata < METADATA_SECONDS:
            return []
        self._metadata = time.monotonic()
        return [partition for partition in self.partitions() if partition not in self.buffers]

    def pause(self, partition: Partition, paused: bool) -> None:
        """Pauses fetching a partition, or resumes it."""
        buffer = self.buffers[partition]
        if buffer.paused != paused:
            buffer.paused = paused
            (self._consumer.pause if paused else self._consumer.resume)([_of(partition)])

    def poll(self, messages: int) -> None:
        """Fetches up to `messages` messages into the buffers. Blocks until there are some, but only briefly.

        Raises:
            DataError: a topic or partition cannot be read, or an offset has been deleted.
            DeadlineError: no broker could be reached for `timeout` seconds.
            Stopped: asked to stop.
        """
        if self._stopping():
            raise Stopped
        fetched = self._consumer.consume(1, POLL_SECONDS)
        if fetched and messages > 1:
            fetched += self._consumer.consume(messages - 1, GATHER_SECONDS)
        for message in fetched:
            error = message.error()
            if error is not None:
                self._check(message, error)
                continue
            buffer = self.buffers[Partition(message.topic(), message.partition())]
            offset = message.offset()
            if offset < buffer.position:  # Fetched again after a pause.
                continue
            buffer.append(self._decoder.message(offset, message.value(), message.timestamp()[1]))
        self._watch(bool(fetched))

    # --- outages ------------------------------------------------------------------------------------------------

    def _failed(self, error: Any) -> None:
        """Notes an error of the connection; librdkafka retries by itself."""
        self._error = error

    def _watch(self, answered: bool) -> None:
        """Notes whether brokers can be reached.

        Raises:
            DeadlineError: they could not be reached for `timeout` seconds.
        """
        if answered:
            self._back()
        if self._error is None or time.monotonic() - self._probe < PROBE_SECONDS:
            return
        self._probe = time.monotonic()
        try:  # Idle partitions do not show that brokers are back, and connections also drop for other reasons.
            self._consumer.list_topics(self._options.topics[0], timeout=PROBE_SECONDS)
        except Exception:
            if self._down is None:
                self._down = Deadline(self._options.timeout)
                LOG.warning(
                    "Kafka at %s cannot be reached (%s); waiting up to %g s for it.",
                    self._options.bootstrap, self._error.str(), self._options.timeout,
                )  # fmt: skip
            if self._down.passed:
                raise self._late("messages") from None
        else:
            self._back()

    def _back(self) -> None:
        if self._down is not None:
            LOG.warning("Kafka at %s can be reached again; reading continues.", self._options.bootstrap)
        self._error = self._down = None

    def _late(self, what: str) -> DeadlineError:
        reason = self._error.str() if self._error is not None else "no answer"
        return DeadlineError(
            f"Kafka at {self._options.bootstrap} did not give {what} within {self._options.timeout:g} s ({reason}). "
            "Check that the brokers run and can be reached from this host, then continue from the last checkpoint; or "
            "raise `timeout`.",
            bootstrap=self._options.bootstrap,
            seconds=self._options.timeout,
        )

    def _ask(self, what: str, call: Callable[[], T]) -> T:
        """Repeats a request until it is answered."""
        from confluent_kafka import KafkaException

        deadline = Deadline(self._options.timeout)
        while True:
            if self._stopping():
                raise Stopped
            try:
                return call()
            except KafkaException as failed:
                error = failed.args[0]
                if not is_transient(error):
                    raise self._refused(what, error) from failed
                self._error = error
            if deadline.passed:
                raise self._late(what)
            self._watch(answered=False)
            time.sleep(POLL_SECONDS)

    def _partitions(self, topic: str) -> list[Partition]:
        what = f"the partitions of topic {topic!r}"

        def listed() -> list[int]:
            from confluent_kafka import KafkaException

            metadata = self._consumer.list_topics(topic, timeout=PROBE_SECONDS).topics[topic]
            if metadata.error is not None:
                raise KafkaException(metadata.error)
            return sorted(metadata.partitions)

        numbers = self._ask(what, listed)
        if not numbers:
            raise self._refused(what, None)
        return [Partition(topic, number) for number in numbers]

    def _check(self, message: Any, error: Any) -> None:
        """Handles an event that is not a message."""
        from confluent_kafka import KafkaError

        where = f"partition {message.partition()} of topic {message.topic()!r}"
        partition = Partition(message.topic(), message.partition())
        if error.code() == KafkaError._PARTITION_EOF:
            buffer = self.buffers[partition]
            buffer.end = message.offset()
            buffer.position = max(buffer.position, buffer.end)
        elif error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
            raise self.deleted(partition, self.buffers[partition].position)
        elif not is_transient(error):
            raise self._refused(where, error)
        else:
            self._error = error

    def deleted(self, partition: Partition, offset: int) -> DataError:
        """Returns the error for deleted messages."""
        try:
            low, high = self.watermarks(partition)
            available = f"it has offsets {low} to {high}"
        except PersiaError as error:
            available = error.message
        return DataError(
            f"Kafka at {self._options.bootstrap}: offset {offset} of {_name(partition)} is not there; {available}. The "
            "messages have been deleted, or the topic was recreated. Restore them, or start a new run from now with "
            "the rows of this checkpoint (Trainer.load_rows), and raise the topic's retention.",
            topic=partition.topic,
            partition=partition.number,
            offset=offset,
        )

    def _refused(self, what: str, error: Any) -> DataError:
        reason = error.str() if error is not None else "it has no partitions"
        return DataError(
            f"Kafka at {self._options.bootstrap} refused {what}: {reason}. Check the name of the topic, that the topic "
            "exists, and the permissions of this client.",
            bootstrap=self._options.bootstrap,
        )


def committed(options: BrokerOptions, offsets: Offsets, seconds: float) -> None:
    """Commits offsets to the group. Blocks for `seconds` at most.

    Raises:
        Exception: any error of confluent-kafka.
    """
    consumer = client("Consumer", options, **{"group.id": options.group, "enable.auto.commit": False})
    try:
        positions = [_of(Partition(topic, p), o) for topic, of in offsets.items() for p, o in of.items()]
        consumer.list_topics(options.topics[0], timeout=seconds)
        consumer.commit(offsets=positions, asynchronous=False)
    finally:
        consumer.close()


def _of(partition: Partition, offset: int | None = None) -> Any:
    from confluent_kafka import TopicPartition

    if offset is None:
        return TopicPartition(partition.topic, partition.number)
    return TopicPartition(partition.topic, partition.number, offset)


def _name(partition: Partition) -> str:
    return f"partition {partition.number} of topic {partition.topic!r}"
