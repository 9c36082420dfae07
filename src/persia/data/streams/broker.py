"""Messages of a Kafka cluster: partitions, offsets, and buffers of what was fetched. For one thread."""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from persia.data.streams.decoding import MessageDecoder, StreamMessage
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
"""Maximum wait for messages, before the caller looks whether it was asked to stop."""

GATHER_SECONDS = 0.01
"""Maximum wait for more messages once there is one."""

FETCH_BACKOFF_MS = 10
"""Time between two looks of librdkafka whether the messages of a partition that it has queued were taken."""

METADATA_SECONDS = 30.0
"""Interval of looking for new partitions, and for topics that were deleted."""

PROBE_SECONDS = 1.0
"""Interval of asking for the brokers while they cannot be reached, and time for their answer."""


@dataclass(frozen=True)
class BrokerOptions:
    """How to reach brokers.

    Attributes:
        bootstrap: addresses of some brokers, `host:port,host:port`.
        topics: topics to read.
        group: consumer group that offsets are committed to; None for none.
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
    """Messages of a partition that were fetched and are in no batch yet.

    Attributes:
        messages: in the order of their offsets.
        position: offset up to which all messages have been fetched.
        end: last known end of the partition; -1 before it was reached.
        rows: rows of `messages`.
        size: bytes of `messages`, once decompressed.
        since: time at which the first of them came.
        paused: whether fetching is paused, as there is enough.
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
        """Whether all messages of the partition have been fetched, as far as is known."""
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
        """Removes messages with so many rows and bytes, or all; at least one."""
        count = have = used = 0
        for message in self.messages:
            if count and (have + message.rows > rows or used + message.size > size):
                break
            count += 1
            have += message.rows
            used += message.size
        taken = [self.messages.popleft() for _ in range(count)]
        self.rows -= have
        self.size -= used
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
        """Whether there are so many rows, or so many bytes."""
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
        options: how to reach them.
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
        """Deadline of the brokers to come back; None while they can be reached."""
        self._probe = self._metadata = time.monotonic()
        self.buffers: dict[Partition, Buffer] = {}
        self._ends: dict[Partition, int] = {}
        """Offset of the next message to be written to each partition when it was asked for last."""
        self._consumer = client(
            "Consumer",
            options,
            **{
                # Offsets belong to checkpoints: nothing is committed here, and no group assigns partitions.
                "group.id": options.group or f"persia-{uuid.uuid4().hex}",
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "enable.partition.eof": True,
                "auto.offset.reset": "error",
                # By default, a partition of which enough is queued is not fetched for a second, though it may be empty
                # soon.
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
            DataError: there is no such topic, or it may not be read.
            DeadlineError: no broker answered in time.
            Stopped: asked to stop.
        """
        return [partition for topic in self._options.topics for partition in self._partitions(topic)]

    def watermarks(self, partition: Partition) -> tuple[int, int]:
        """Returns the first offset that there is, and the offset of the next message to be written. Blocks."""
        low, high = self._ask(
            f"the offsets of {_name(partition)}",
            lambda: self._consumer.get_watermark_offsets(_of(partition), timeout=PROBE_SECONDS),
        )
        self._ends[partition] = int(high)
        return int(low), int(high)

    def offsets_at(self, partitions: Iterable[Partition], milliseconds: int) -> dict[Partition, int]:
        """Returns the offsets of the first messages from a time on; of the next one to be written if there is none."""
        asked = [_of(partition, milliseconds) for partition in partitions]
        answered = self._ask(
            f"the offsets at {milliseconds} ms", lambda: self._consumer.offsets_for_times(asked, PROBE_SECONDS)
        )
        found = {Partition(answer.topic, answer.partition): int(answer.offset) for answer in answered}
        return {p: offset if offset >= 0 else self.watermarks(p)[1] for p, offset in found.items()}

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
        """Adds partitions, to be fetched from these offsets on; or goes to these offsets in those that are there."""
        if again := [partition for partition in offsets if partition in self.buffers]:
            for partition in again:
                self.pause(partition, False)
            self._consumer.incremental_unassign([_of(partition) for partition in again])
        for partition, offset in offsets.items():
            self.buffers[partition] = Buffer(position=offset)
        self._consumer.incremental_assign([_of(partition, offset) for partition, offset in offsets.items()])

    def new_partitions(self) -> list[Partition]:
        """Returns partitions that are not assigned; looks for them now and then, else returns none."""
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
        """Fetches so many messages at most into the buffers. Blocks until there are some, for a short time at most.

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
        """Notes an error of the connection; librdkafka tries again by itself."""
        self._error = error

    def _watch(self, answered: bool) -> None:
        """Notes whether brokers can be reached.

        Raises:
            DeadlineError: they could not be for `timeout` seconds.
        """
        if answered:
            self._back()
        if self._error is None or time.monotonic() - self._probe < PROBE_SECONDS:
            return
        self._probe = time.monotonic()
        try:  # Idle partitions do not tell when brokers are back, and connections are also lost for less.
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
            LOG.warning("Kafka at %s can be reached again; reading goes on.", self._options.bootstrap)
        self._error = self._down = None

    def _late(self, what: str) -> DeadlineError:
        reason = self._error.str() if self._error is not None else "no answer"
        return DeadlineError(
            f"Kafka at {self._options.bootstrap} did not give {what} within {self._options.timeout:g} s ({reason}). "
            "See whether the brokers run and can be reached from here, then continue from the last checkpoint; or "
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

            found = self._consumer.list_topics(topic, timeout=PROBE_SECONDS).topics[topic]
            if found.error is not None:
                raise KafkaException(found.error)
            return sorted(found.partitions)

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
        """Returns the error for messages that are gone."""
        try:
            low, high = self.watermarks(partition)
            rest = f"it has offsets {low} to {high}"
        except PersiaError as error:
            rest = error.message
        return DataError(
            f"Kafka at {self._options.bootstrap}: offset {offset} of {_name(partition)} is not there; {rest}. The "
            "messages have been deleted, or the topic was made anew. Restore them, or train on from now in a run that "
            "begins with this checkpoint's rows (Trainer.load_rows), and raise the topic's retention.",
            topic=partition.topic,
            partition=partition.number,
            offset=offset,
        )

    def _refused(self, what: str, error: Any) -> DataError:
        reason = error.str() if error is not None else "it has no partitions"
        return DataError(
            f"Kafka at {self._options.bootstrap} refused {what}: {reason}. Check the name of the topic, that it has "
            "not been deleted, and the rights of this client.",
            bootstrap=self._options.bootstrap,
        )


def committed(options: BrokerOptions, offsets: Offsets, seconds: float) -> None:
    """Commits offsets to the group. Blocks for `seconds` at most.

    Raises:
        Exception: of confluent-kafka.
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
