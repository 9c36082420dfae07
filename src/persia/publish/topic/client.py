"""Writes and reads the messages of one topic of Kafka."""

from __future__ import annotations

import functools
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

from persia.errors import PublishError
from persia.kafka_client import is_transient, make_client
from persia.publish.topic.address import TopicAddress
from persia.publish.topic.file_records import HEADER
from persia.telemetry.logs import get_logger

__all__ = ["DeletedMessageError", "TopicClient", "TopicMessage"]

LOG = get_logger("persia.publish")

ANSWER_SECONDS = 10.0
"""Maximum wait for an answer of the brokers, and for the next message."""

POLL_SECONDS = 0.1

FETCH = 32
"""Maximum number of messages per fetch; it bounds the memory of a reader."""

IN_FLIGHT = 16
"""Maximum number of messages that are not acknowledged yet; it bounds the memory of a writer."""

T = TypeVar("T")


class DeletedMessageError(PublishError):
    """The topic's retention has deleted a message that was about to be read."""


class TopicMessage(NamedTuple):
    """A message that was read.

    Attributes:
        offset: offset of the message.
        time: time of writing, in milliseconds since 1970; -1 if the brokers do not record it.
        headers: headers by name, in order.
        value: content.
    """

    offset: int
    time: int
    headers: list[tuple[str, bytes]] | None
    value: bytes | None


class TopicClient:
    """Reads and writes messages of a topic. Connects in the background. Not thread-safe.

    Every method blocks for at most `ANSWER_SECONDS` without progress, then raises PublishError, as it does if the
    brokers refuse.

    Args:
        address: address of the topic.

    Raises:
        ConfigError: librdkafka rejects a setting.
    """

    def __init__(self, address: TopicAddress) -> None:
        self._address = address
        self._error: Any = None
        """The last error of a connection."""
        self._reader = self._client(
            "Consumer",
            {
                # librdkafka requires a name, although nothing is committed, and no group assigns partitions.
                "group.id": f"persia-{uuid.uuid4().hex}",
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "enable.partition.eof": True,
                "auto.offset.reset": "error",
                "fetch.wait.max.ms": 10,  # Only existing messages are requested.
                "queued.max.messages.kbytes": 16384,
            },
        )
        self._producer: Any = None

    # --- read ---------------------------------------------------------------------------------------------------

    def bounds(self, partition: int) -> tuple[int, int]:
        """Returns the first existing offset, and the offset of the next message; zeros if there is no such topic."""
        from confluent_kafka import KafkaError

        unknown = (KafkaError._UNKNOWN_PARTITION, KafkaError._UNKNOWN_TOPIC, KafkaError.UNKNOWN_TOPIC_OR_PART)
        try:
            offsets = self._watermarks(partition)
        except PublishError as error:
            if error.fields["code"] not in unknown:
                raise
            topic = self._address.topic  # It may have been created meanwhile, or no broker answers.
            now = self._call("read", lambda: self._reader.list_topics(topic, timeout=ANSWER_SECONDS)).topics[topic]
            if now.error is not None and now.error.code() in unknown:
                return 0, 0
            offsets = self._watermarks(partition)
        self._error = None
        return offsets

    def _watermarks(self, partition: int) -> tuple[int, int]:
        from confluent_kafka import TopicPartition

        where = TopicPartition(self._address.topic, partition)
        low, high = self._call("read", lambda: self._reader.get_watermark_offsets(where, timeout=ANSWER_SECONDS))
        return int(low), int(high)

    def messages(self, partition: int, begin: int, end: int) -> Iterator[TopicMessage]:
        """Yields the messages with offsets from `begin` on, below `end`, which must exist."""
        from confluent_kafka import TopicPartition

        if begin >= end:
            return
        reader = self._reader
        self._call("read", lambda: reader.assign([TopicPartition(self._address.topic, partition, begin)]))
        position, due = begin, time.monotonic() + ANSWER_SECONDS
        try:
            while position < end:
                fetched = reader.consume(min(FETCH, end - position), POLL_SECONDS)
                before = position
                for message in fetched:
                    position = max(position, self._position(message))
                    if message.error() is None and message.offset() < end:
                        yield TopicMessage(
                            message.offset(), int(message.timestamp()[1]), message.headers(), message.value()
                        )
                if position > before:
                    due = time.monotonic() + ANSWER_SECONDS
                elif time.monotonic() > due:
                    raise self._failure("read", self._error)
        finally:
            reader.unassign()

    def _position(self, message: Any) -> int:
        """Returns the offset up to which messages have been read, after this message or event."""
        from confluent_kafka import KafkaError

        error = message.error()
        if error is None:
            return int(message.offset()) + 1
        if error.code() == KafkaError._PARTITION_EOF:
            return int(message.offset())
        if error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
            raise DeletedMessageError(
                f"{self._address.url}: a message has been deleted before it was read. Raise the topic's retention.",
                topic=self._address.topic,
            )
        if not is_transient(error):
            raise self._failure("read", error)
        self._error = error
        return 0

    # --- write --------------------------------------------------------------------------------------------------

    def partitions(self) -> int:
        """Returns the number of partitions. Brokers that create topics on demand create it."""
        topic = self._address.topic
        entry = self._call("find", lambda: self._writer().list_topics(topic, timeout=ANSWER_SECONDS)).topics[topic]
        if entry.error is not None or not entry.partitions:
            raise self._failure("find", entry.error)
        return len(entry.partitions)

    def write(self, partition: int, kind: bytes, messages: Iterable[tuple[str, bytes]]) -> list[int]:
        """Writes messages, and returns their offsets once all in-sync replicas have them.

        Args:
            partition: number of the partition.
            kind: kind of the messages.
            messages: keys and values.
        """
        from confluent_kafka import KafkaError

        writer, offsets, failures = self._writer(), dict[int, int](), list[Any]()

        def delivered(number: int, error: Any, message: Any) -> None:
            if error is None:
                offsets[number] = int(message.offset())
            else:
                failures.append(error)

        def wait(limit: int, sent: int) -> None:
            due = time.monotonic() + 2 * ANSWER_SECONDS  # Messages time out earlier.
            while not failures and sent - len(offsets) > limit:
                if time.monotonic() > due:
                    failures.append(self._error)
                writer.poll(POLL_SECONDS)

        sent = 0
        for key, value in messages:
            produce = functools.partial(
                writer.produce,
                self._address.topic,
                value=value,
                key=key,
                partition=partition,
                headers=[(HEADER, kind)],
                on_delivery=functools.partial(delivered, sent),
            )
            try:
                self._call("write to", produce)
            except PublishError as error:
                if error.fields["code"] != KafkaError._QUEUE_FULL:
                    raise
                wait(0, sent)  # Settings in the URL can make librdkafka's queue shorter than `IN_FLIGHT`.
                if failures:
                    break
                self._call("write to", produce)
            sent += 1
            wait(IN_FLIGHT, sent)
            if failures:
                break
        wait(0, sent)
        if failures:
            self._producer = None  # Drops its queued messages.
            writer.purge()
            raise self._failure("write to", failures[0])
        return [offsets[number] for number in range(sent)]

    # --- connections --------------------------------------------------------------------------------------------

    def _writer(self) -> Any:
        if self._producer is None:
            timeout = round(1000 * ANSWER_SECONDS)
            self._producer = self._client("Producer", {"acks": "all", "linger.ms": 0, "message.timeout.ms": timeout})
        return self._producer

    def _client(self, kind: str, settings: dict[str, Any]) -> Any:
        defaults = {"reconnect.backoff.max.ms": 2000, "error_cb": self._record_error}
        return make_client(kind, self._address.bootstrap, {**defaults, **settings, **self._address.settings}, LOG)

    def _record_error(self, error: Any) -> None:
        """Records an error of a connection; librdkafka reconnects."""
        self._error = error

    def _call(self, action: str, call: Callable[[], T]) -> T:
        from confluent_kafka import KafkaError, KafkaException

        try:
            return call()
        except KafkaException as failed:
            raise self._failure(action, failed.args[0]) from failed
        except BufferError as failed:  # The producer's queue is full.
            raise self._failure(action, KafkaError(KafkaError._QUEUE_FULL)) from failed

    def _failure(self, action: str, error: Any) -> PublishError:
        if action == "read":
            self._reader.poll(0)  # Calls `_record_error` for new errors.
        reasons = dict.fromkeys(each.str() for each in (error, self._error) if each is not None)
        cause = "; ".join(reasons) or "no answer"
        return PublishError(
            f"Cannot {action} {self._address.url}: {cause}. Check that the brokers run and can be reached from this "
            "host, that the topic exists, and that this client has the rights.",
            topic=self._address.topic,
            code=None if error is None else error.code(),
        )
