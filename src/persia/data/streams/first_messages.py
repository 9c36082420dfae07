"""Reads the first messages of topics as raw columns, to which rules of features are fitted. Leaves no trace."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from persia.data.rows import Conversion
from persia.data.streams.broker import Broker
from persia.data.streams.message_decoding import MAX_BATCH_BYTES
from persia.data.streams.message_rows import MessageConverter
from persia.data.streams.offset_log import OffsetLog
from persia.data.streams.options import KafkaOptions, StreamCounts
from persia.data.streams.partition_bounds import partition_bounds
from persia.errors import DataError
from persia.retry import Deadline
from persia.telemetry.logs import get_logger
from persia.types import Offsets, Partition

__all__ = ["first_inputs"]

LOG = get_logger("persia.data")

TURN_ROWS = 1024
"""Rows of a partition that are read before those of the next one."""

FETCH = 64
"""Messages per fetch."""


def first_inputs(
    conversion: Conversion, options: KafkaOptions, offsets: Offsets, names: Sequence[str], rows: int | None
) -> Iterator[dict[str, Any]]:
    """Yields columns of the schema before the rules of features are applied, in pieces of any size. Blocks.

    Partitions take turns, so which rows are read, and in which order, depends on the messages only. They are rows that
    training reads: without late ones, and without poison in these columns.

    Args:
        conversion: converts rows.
        options: arguments of `kafka`.
        offsets: offsets at which to begin; partitions without one begin at `options.start`.
        names: columns among `Schema.feature_columns`.
        rows: number of rows after which reading ends. If there are fewer, more are awaited for `options.broker.timeout`
            seconds, unless the stream is bounded. None for the messages that exist when reading begins.

    Raises:
        DataError: there are no rows, a topic cannot be read, or a message cannot be converted.
        DeadlineError: no broker could be reached.
    """
    # A consumer without a group, which commits nothing; poison is copied to the dead letters when it is trained.
    options = dataclasses.replace(options, broker=dataclasses.replace(options.broker, group=None), dead_letters=None)
    conversion = dataclasses.replace(conversion, only=frozenset(names))
    converter = MessageConverter(conversion, options, StreamCounts())
    broker = Broker(options.broker, converter.decoder, stopping=lambda: False)
    try:
        read = 0
        for columns in _FirstMessages(broker, converter, options, offsets, rows).pieces():
            read += len(columns[names[0]])
            yield columns
    finally:
        broker.close()
    topics = _topics(options)
    if not read:
        raise DataError(
            f"Kafka at {options.broker.bootstrap}: topic {topics} has no messages to fit rules of features to, or all "
            'are late or poison. Start its producer and try again; set start="earliest" to read earlier messages; or '
            "fit to a file with the same columns, and give the fitted schema to the stream.",
            bootstrap=options.broker.bootstrap,
        )
    if rows is not None and read < rows:
        LOG.warning("Rules of features are fitted to %d rows, not %d: topic %s has no more.", read, rows, topics)


def _topics(options: KafkaOptions) -> str:
    return " and ".join(map(repr, options.broker.topics))


class _FirstMessages:
    """Reads partitions in turn, up to their ends when reading began, and then what arrives.

    Args:
        broker: connection to the brokers.
        converter: converts messages.
        options: see `first_inputs`.
        offsets: see `first_inputs`.
        rows: see `first_inputs`.
    """

    def __init__(
        self, broker: Broker, converter: MessageConverter, options: KafkaOptions, offsets: Offsets, rows: int | None
    ) -> None:
        self._broker = broker
        self._converter = converter
        self._options = options
        self._left = rows
        bounds, marks = partition_bounds(broker, options, OffsetLog(0, offsets))
        self._ends = {each.partition: marks[each.partition][1] if each.end is None else each.end for each in bounds}
        self._newest = {each.partition: each.newest for each in bounds}
        self._turn = TURN_ROWS if rows is None else max(1, min(TURN_ROWS, -(-rows // len(bounds))))
        broker.assign({each.partition: each.begin for each in bounds})

    def pieces(self) -> Iterator[dict[str, Any]]:
        """Yields columns of messages."""
        remaining = [p for p, buffer in self._broker.buffers.items() if buffer.position < self._ends[p]]
        while remaining and self._left != 0:
            for partition in remaining:
                yield from self._next_turn(partition)
            remaining = [partition for partition in remaining if self._has_more(partition)]
        if self._left and self._options.until is None:
            yield from self._awaited(Deadline(self._options.broker.timeout))

    def _next_turn(self, partition: Partition) -> Iterator[dict[str, Any]]:
        buffer, end = self._broker.buffers[partition], self._ends[partition]
        while buffer.position < end and not buffer.holds(self._turn, MAX_BATCH_BYTES):
            self._poll(partition)
        buffer.drop_from(end)
        yield from self._taken(partition)

    def _has_more(self, partition: Partition) -> bool:
        buffer = self._broker.buffers[partition]
        return bool(buffer.messages) or buffer.position < self._ends[partition]

    def _awaited(self, deadline: Deadline) -> Iterator[dict[str, Any]]:
        """Yields columns of messages that arrive before the deadline."""
        self._broker.assign(self._ends)  # Messages beyond were dropped.
        logged = False
        while self._left and not deadline.passed:
            self._broker.poll(FETCH)
            if not logged and not any(buffer.messages for buffer in self._broker.buffers.values()):
                logged = True
                LOG.warning(
                    "Waiting up to %g s for %d more rows of topic %s, to fit rules of features to them.",
                    deadline.left, self._left, _topics(self._options),
                )  # fmt: skip
            for partition in self._broker.buffers:
                yield from self._taken(partition)

    def _taken(self, partition: Partition) -> Iterator[dict[str, Any]]:
        """Yields columns of the first messages that are buffered, if any are left to read."""
        buffer = self._broker.buffers[partition]
        if self._left == 0 or not buffer.messages:
            return
        messages = buffer.take(self._turn, MAX_BATCH_BYTES)
        pieces, self._newest[partition] = self._converter.inputs(partition, messages, self._newest[partition])
        for columns in pieces:
            rows = len(next(iter(columns.values())))
            if self._left is not None:
                self._left -= min(rows, self._left)
            yield columns

    def _poll(self, needed: Partition) -> None:
        """Fetches messages; of partitions other than `needed`, only while few are buffered."""
        for partition, buffer in self._broker.buffers.items():
            full = buffer.position >= self._ends[partition] or buffer.holds(self._turn, MAX_BATCH_BYTES)
            self._broker.pause(partition, full and partition != needed)
        self._broker.poll(FETCH)
