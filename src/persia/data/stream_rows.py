"""Messages of a partition to a batch: poison messages, the dead-letter topic, late rows."""

from __future__ import annotations

import functools
import logging
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from persia.batching.batch import Batch, IdColumn
from persia.data.broker import client
from persia.data.files import File
from persia.data.kafka_options import EventTime, KafkaOptions, StreamCounts
from persia.data.messages import MessageDecoder, StreamMessage
from persia.data.rows import Conversion, Piece
from persia.errors import DataError
from persia.types import Partition

__all__ = ["Converted", "MessageConverter"]

LOG = logging.getLogger("persia.data")

DEAD_LETTER_SECONDS = 30.0
"""Maximum time to write messages to the dead-letter topic."""

LATEST = 1 << 62
"""Largest event time of either sign, in milliseconds: lateness and windows can be added to it."""

POISONED = 16
"""Messages of a batch of which not all can be poison: the schema is wrong then."""

NO_TIME = np.iinfo(np.int64).min
"""Event time of a row that has none."""


class Converted(NamedTuple):
    """Messages that were converted.

    Attributes:
        batch: their rows; None if none is left.
        newest: latest event time up to the last message, in milliseconds; None without one.
        times: event times of the rows of the batch, int64 `[batch]`; None without a column for them.
        keys: ids of the key of a join, one for each row or none; None without a key.
    """

    batch: Batch | None
    newest: int | None
    times: NDArray[np.int64] | None = None
    keys: IdColumn | None = None


class _Bad(NamedTuple):
    """A message that cannot be converted, and why."""

    message: StreamMessage
    error: DataError


class MessageConverter:
    """Converts messages of one partition to a batch. For one thread.

    Args:
        conversion: makes batches of rows.
        options: arguments of `kafka`.
        counts: gets the numbers of poison messages and late rows.
        key: column whose ids are wanted, too; None for none.
        rows: whether the rows are wanted; otherwise batches are empty but for their number of samples.
    """

    def __init__(
        self,
        conversion: Conversion,
        options: KafkaOptions,
        counts: StreamCounts,
        key: str | None = None,
        rows: bool = True,
    ) -> None:
        self._key = key
        self._wants_rows = rows
        self._conversion = conversion
        self._options = options
        self._counts = counts
        columns = [*conversion.wanted.values(), *conversion.rule_columns, *([conversion.day] if conversion.day else [])]
        if not rows:
            columns.clear()
        if key is not None:
            columns.append(key)
        if options.event_time is not None:
            columns.append(options.event_time.column)
        self.decoder = MessageDecoder(options.values, list(dict.fromkeys(columns)))

    def convert(self, partition: Partition, messages: list[StreamMessage], newest: int | None) -> Converted:
        """Converts messages.

        Args:
            partition: where they are from.
            messages: in the order of their offsets.
            newest: latest event time of the partition before them, in milliseconds.

        Raises:
            DataError: one cannot be converted, and is not to be skipped.
        """
        try:
            return self._convert(partition, messages, newest)
        except DataError:
            bad: list[_Bad] = []
            parts = self._salvaged(partition, messages, newest, bad)
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
        if self._options.dead_letters is not None:
            self._bury(self._options.dead_letters, partition, bad)
        self._counts.add("poison", len(bad))
        LOG.warning("%s: %d messages are skipped; the first: %s", where, len(bad), reason.message)
        batches = [part.batch for part in parts if part.batch is not None]
        times = [part.times for part in parts if part.times is not None]
        return Converted(
            Batch.concat(batches) if batches else None,
            parts[-1].newest if parts else newest,
            np.concatenate(times) if times else None,
            IdColumn.concat([part.keys for part in parts if part.keys is not None]) if self._key and parts else None,
        )

    def _salvaged(
        self, partition: Partition, messages: list[StreamMessage], newest: int | None, bad: list[_Bad]
    ) -> list[Converted]:
        """Converts messages in as few parts as possible; appends those that cannot be converted to `bad`.

        Where poison is an error, the first one suffices.
        """
        if not messages or (bad and self._options.poison == "error"):
            return []
        try:
            return [self._convert(partition, messages, newest)]
        except DataError as error:
            if len(messages) == 1:
                bad.append(_Bad(messages[0], error))
                return []
        half = len(messages) // 2
        before = self._salvaged(partition, messages[:half], newest, bad)
        newest = before[-1].newest if before else newest
        return before + self._salvaged(partition, messages[half:], newest, bad)

    def _convert(self, partition: Partition, messages: list[StreamMessage], newest: int | None) -> Converted:
        table = self.decoder.table(messages)
        times: NDArray[np.int64] | None = None
        late = 0
        event_time = self._options.event_time
        if event_time is not None and table.num_rows:
            times = _milliseconds(table, event_time)
            before = np.maximum.accumulate(np.concatenate([[NO_TIME if newest is None else newest], times]))
            newest = None if before[-1] == NO_TIME else int(before[-1])
            if event_time.allowed is not None:
                is_late = (times != NO_TIME) & (times < before[:-1] - event_time.allowed) & (before[:-1] != NO_TIME)
                late = int(is_late.sum())
                if late and event_time.drop:
                    table, times = table.filter(~is_late), times[~is_late]
                    table = table.combine_chunks()
        keys = None if self._key is None else _keys(table, self._key)
        batch = self._rows(partition, table)
        self._counts.add("late", late)  # Only now: messages that cannot be converted are converted again, in parts.
        return Converted(batch, newest, times, keys)

    def _rows(self, partition: Partition, table: Any) -> Batch | None:
        if not table.num_rows:
            return None
        if not self._wants_rows:
            return Batch({}, np.zeros((table.num_rows, 0), np.float32), np.zeros((table.num_rows, 0), np.float32))
        file = File(f"kafka://{partition.topic}/{partition.number}")
        columns = self._conversion.columns_of(file, table.column_names)
        named = {name: table.column(name).chunk(0) for name in columns}
        return next(self._conversion.batches(iter([Piece(file, 0, named, table.num_rows)]), 0))

    def _bury(self, topic: str, partition: Partition, bad: list[_Bad]) -> None:
        """Writes messages to the dead-letter topic. Blocks until they are there.

        Raises:
            DataError: they could not be written.
        """
        from confluent_kafka import KafkaException

        milliseconds = int(DEAD_LETTER_SECONDS * 1000)
        producer = client("Producer", self._options.broker, **{"message.timeout.ms": milliseconds})
        failures: list[str] = []
        written = 0

        def delivered(offset: int, failed: Any, _: Any) -> None:
            nonlocal written
            written += failed is None
            if failed is not None:
                failures.append(f"offset {offset}: {failed.str()}")

        for message, error in bad:
            headers = {
                "persia.topic": partition.topic,
                "persia.partition": str(partition.number),
                "persia.offset": str(message.offset),
                "persia.error": error.message,
            }
            callback = functools.partial(delivered, message.offset)
            produce = functools.partial(producer.produce, topic, message.value, headers=headers, on_delivery=callback)
            try:
                try:
                    produce()
                except BufferError:  # As many wait to be sent as librdkafka holds.
                    producer.flush(DEAD_LETTER_SECONDS)
                    produce()
            except (BufferError, KafkaException) as failed:
                reason = failed.args[0].str() if isinstance(failed, KafkaException) else failed
                failures.append(f"offset {message.offset}: {reason}")
                break
        producer.flush(DEAD_LETTER_SECONDS)
        if written < len(bad):
            raise DataError(
                f"{len(bad) - written} messages of partition {partition.number} of topic {partition.topic!r} could "
                f"not be written to the dead-letter topic {topic!r} ({(failures or ['no answer'])[0]}). They are not "
                "skipped. Check that topic; for messages that are too large, raise message.max.bytes in `config` and "
                "max.message.bytes of the topic; or leave dead_letters out. Then continue from the last checkpoint.",
                topic=topic,
                partition=partition.number,
            )


def _keys(table: Any, name: str) -> IdColumn:
    """Returns the ids of the key of each row.

    Raises:
        DataError: there is no such column, or it has no ids.
    """
    from persia.batching.arrow_columns import arrow_ids

    if name not in table.column_names:
        raise DataError(f"There is no column {name!r}, the key of the join.", column=name)
    return arrow_ids(name, table.column(name), "auto")


def _milliseconds(table: Any, event_time: EventTime) -> NDArray[np.int64]:
    """Returns the event time of each row in milliseconds since 1970; NO_TIME where it is missing.

    Raises:
        DataError: there is no such column, or it has no times.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    name = event_time.column
    if name not in table.column_names:
        raise DataError(f"There is no column {name!r}, the event time.", column=name)
    column = table.column(name)
    try:
        if pa.types.is_timestamp(column.type):
            whole = pc.CastOptions(pa.timestamp("ms", column.type.tz), allow_time_truncate=True)
            column = pc.cast(pc.cast(column, options=whole), pa.int64())
        elif pa.types.is_integer(column.type):
            column = pc.multiply_checked(pc.cast(column, pa.int64()), event_time.milliseconds)
        elif pa.types.is_floating(column.type):
            numbers = pc.round(pc.multiply(column, float(event_time.milliseconds)))
            column = pc.cast(pc.if_else(pc.is_nan(numbers), None, numbers), pa.int64())  # NaN is a missing time.
        elif pa.types.is_null(column.type):
            column = pc.cast(column, pa.int64())
        else:
            raise _no_times(event_time, f"is {column.type}")
    except pa.ArrowException as error:  # A number that 64 bits do not hold.
        raise _no_times(event_time, f"has a value that is no time ({error})") from error
    values: NDArray[np.int64] = pc.fill_null(column, NO_TIME).to_numpy()
    beyond = values[(values != NO_TIME) & ((values > LATEST) | (values < -LATEST))]
    if len(beyond):
        raise _no_times(event_time, f"has a value that is no time ({beyond[0]} ms since 1970)")
    return values


def _no_times(event_time: EventTime, what: str) -> DataError:
    unit = "milliseconds" if event_time.milliseconds == 1 else "seconds"
    return DataError(
        f"Column {event_time.column!r}, the event time, {what}: give timestamps or numbers of {unit} since 1970.",
        column=event_time.column,
    )
