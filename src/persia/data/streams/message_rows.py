"""Converts messages of a partition to a batch; handles poison messages, the dead-letter topic and late rows."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from persia.batching.batch import Batch
from persia.batching.dense_columns import raw_numbers
from persia.batching.derived_ids import bucket_numbers, raw_column
from persia.batching.id_column import IdColumn
from persia.batching.id_columns import id_column
from persia.data.files import File
from persia.data.rows import Conversion, Piece
from persia.data.streams.broker import client
from persia.data.streams.message_decoding import MessageDecoder, MessageRows, StreamMessage
from persia.data.streams.options import EventTime, KafkaOptions, StreamCounts
from persia.errors import DataError
from persia.schema import Schema
from persia.telemetry.logs import get_logger
from persia.types import Partition

__all__ = ["Converted", "ConvertedInputs", "MessageConverter"]

LOG = get_logger("persia.data")

DEAD_LETTER_SECONDS = 30.0
"""Maximum time to write messages to the dead-letter topic."""

LATEST = 1 << 62
"""Largest magnitude of an event time in milliseconds, to which lateness and windows can be added safely."""

MAX_REASON = 1000
"""Maximum length of the reason for skipping a message, in logs and the dead-letter topic."""

POISONED = 16
"""If all messages of a batch, and at least this number, cannot be converted, the schema is wrong."""

NO_TIME = np.iinfo(np.int64).min
"""Event time of a row without one."""


class Converted(NamedTuple):
    """Converted messages.

    Attributes:
        batch: rows of the messages; None if none are left.
        newest: latest event time up to the last message, in milliseconds; None if there is none.
        times: event times of the rows of the batch, int64 `[batch]`; None without a time column.
        keys: ids of the join key, at most one for each row; None without a key column.
    """

    batch: Batch | None
    newest: int | None
    times: NDArray[np.int64] | None = None
    keys: IdColumn | None = None


class ConvertedInputs(NamedTuple):
    """Columns of messages before the rules of features are applied.

    Attributes:
        pieces: columns by name, as `Batch.from_columns` gets them, in pieces whose columns have one type.
        newest: latest event time up to the last message, in milliseconds; None if there is none.
    """

    pieces: list[dict[str, Any]]
    newest: int | None


R = TypeVar("R", Converted, ConvertedInputs)


class _Kept(NamedTuple):
    """Decoded rows that are not dropped as late.

    Attributes:
        parts: the rows.
        newest: latest event time up to the last message, in milliseconds; None if there is none.
        times: event times of the rows; None without a time column.
        late: number of late rows.
    """

    parts: list[MessageRows]
    newest: int | None
    times: NDArray[np.int64] | None
    late: int


class _Bad(NamedTuple):
    """A message that cannot be converted, and the error."""

    message: StreamMessage
    error: DataError


class MessageConverter:
    """Converts messages of one partition to a batch. For one thread.

    Args:
        conversion: converts rows to batches.
        options: arguments of `kafka`.
        counts: receives the numbers of poison messages and late rows.
        key: column whose ids are also returned; None for no key.
        rows: whether to convert the rows; otherwise batches only have their number of samples.
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
        self._converts_rows = rows
        self._conversion = conversion
        self._options = options
        self._counts = counts
        day = [conversion.day] if conversion.day else []
        columns = [*conversion.source_columns.values(), *conversion.rule_columns, *day]
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
            partition: partition of the messages.
            messages: the messages, in order of their offsets.
            newest: latest event time of the partition before them, in milliseconds.

        Raises:
            DataError: a message cannot be converted, and poison is not skipped.
        """
        parts = self._in_parts(partition, messages, newest, self._convert)
        batches = [part.batch for part in parts if part.batch is not None]
        times = [part.times for part in parts if part.times is not None]
        keys = [part.keys for part in parts if part.keys is not None]
        return Converted(
            Batch.concat(batches) if batches else None,
            parts[-1].newest if parts else newest,
            np.concatenate(times) if times else None,
            IdColumn.concat(keys) if keys else None,
        )

    def without_effects(self) -> MessageConverter:
        """Returns a converter to the same rows that counts nothing and writes nothing to the dead-letter topic."""
        options = dataclasses.replace(self._options, dead_letters=None)
        return MessageConverter(self._conversion, options, StreamCounts(), self._key, self._converts_rows)

    def inputs(self, partition: Partition, messages: list[StreamMessage], newest: int | None) -> ConvertedInputs:
        """Returns the columns `only` of the conversion before the rules of features are applied; see `convert`."""
        parts = self._in_parts(partition, messages, newest, self._convert_inputs)
        pieces = [piece for part in parts for piece in part.pieces]
        return ConvertedInputs(pieces, parts[-1].newest if parts else newest)

    def _in_parts(
        self,
        partition: Partition,
        messages: list[StreamMessage],
        newest: int | None,
        convert: Callable[[Partition, list[StreamMessage], int | None], R],
    ) -> list[R]:
        """Converts messages in as few parts as possible, without those that are skipped. Raises as `convert` does."""
        bad: list[_Bad] = []
        parts = self._salvaged(partition, messages, newest, bad, convert)
        if bad:
            self._skip(partition, messages, bad)
        return parts

    def _skip(self, partition: Partition, messages: list[StreamMessage], bad: list[_Bad]) -> None:
        """Counts messages that cannot be converted, and writes them to the dead-letter topic.

        Raises:
            DataError: poison is not skipped, or all messages are poison.
        """
        first, reason = bad[0]
        where = f"Offset {first.offset} of partition {partition.number} of topic {partition.topic!r}"
        why = _shortened(reason.message)
        if self._options.poison == "error" or len(bad) == len(messages) >= POISONED:
            others = f" Neither can the others of {len(bad)} messages." if len(bad) > 1 else ""
            raise DataError(
                f"{where} cannot be converted: {why}{others} Correct the schema or the topic's producer; "
                'poison="skip" skips single messages.',
                topic=partition.topic,
                partition=partition.number,
                offset=first.offset,
            ) from reason
        if self._options.dead_letters is not None:
            self._bury(self._options.dead_letters, partition, bad)
        self._counts.add("poison", len(bad))
        self._counts.add("too_large", sum(message.too_large for message, _ in bad))
        LOG.warning("%s: %d messages are skipped; the first: %s", where, len(bad), why)

    def _salvaged(
        self,
        partition: Partition,
        messages: list[StreamMessage],
        newest: int | None,
        bad: list[_Bad],
        convert: Callable[[Partition, list[StreamMessage], int | None], R],
    ) -> list[R]:
        """Converts messages in as few parts as possible; appends those that cannot be converted to `bad`.

        Messages that can be converted one by one, but not together, are not appended. If poison is an error, the
        search ends at the first one.
        """
        if not messages or (bad and self._options.poison == "error"):
            return []
        try:
            return [convert(partition, messages, newest)]
        except DataError as error:
            if len(messages) == 1:
                bad.append(_Bad(messages[0], error))
                return []
        half = len(messages) // 2
        before = self._salvaged(partition, messages[:half], newest, bad, convert)
        newest = before[-1].newest if before else newest
        return before + self._salvaged(partition, messages[half:], newest, bad, convert)

    def _convert(self, partition: Partition, messages: list[StreamMessage], newest: int | None) -> Converted:
        parts, newest, times, late = self._kept(messages, newest)
        if self._key is not None and times is not None and (times == NO_TIME).any():
            raise DataError("A row has no event time, without which it cannot be joined.", column=self._key)
        keys = [] if self._key is None else [_keys(part.columns, self._key) for part in parts]
        batches = [self._rows(partition, part) for part in parts]
        self._counts.add("late", late)  # Only now, as messages that cannot be converted are retried in parts.
        if len(parts) < 2:
            return Converted(batches[0] if batches else None, newest, times, keys[0] if keys else None)
        order = np.argsort(np.concatenate([part.positions for part in parts]))
        return Converted(
            Batch.concat(batches).take(order), newest, times, IdColumn.concat(keys).take(order) if keys else None
        )

    def _convert_inputs(
        self, partition: Partition, messages: list[StreamMessage], newest: int | None
    ) -> ConvertedInputs:
        retained = self._kept(messages, newest)
        pieces = [next(self._conversion.inputs(iter([self._piece(partition, part)]))) for part in retained.parts]
        for columns in pieces:
            _check_numbers(self._conversion.schema, columns)
        return ConvertedInputs(pieces, retained.newest)

    def _kept(self, messages: list[StreamMessage], newest: int | None) -> _Kept:
        """Decodes messages, and drops late rows."""
        parts = self.decoder.decode(messages)
        rows = sum(len(part.positions) for part in parts)
        event_time = self._options.event_time
        if event_time is None or not rows:
            return _Kept(parts, newest, None, 0)
        times = np.empty(rows, np.int64)
        for part in parts:
            times[part.positions] = _milliseconds(part.columns, event_time)
        before = np.maximum.accumulate(np.concatenate([[NO_TIME if newest is None else newest], times]))
        newest = None if before[-1] == NO_TIME else int(before[-1])
        late = 0
        if event_time.allowed is not None:
            is_late = (times != NO_TIME) & (times < before[:-1] - event_time.allowed) & (before[:-1] != NO_TIME)
            late = int(is_late.sum())
            if late and event_time.drop:
                in_time, times = ~is_late, times[~is_late]
                parts = [chosen for part in parts if len((chosen := _chosen(part, in_time)).positions)]
        return _Kept(parts, newest, times, late)

    def _rows(self, partition: Partition, part: MessageRows) -> Batch:
        rows = len(part.positions)
        if not self._converts_rows:
            return Batch({}, np.zeros((rows, 0), np.float32), np.zeros((rows, 0), np.float32))
        return next(self._conversion.batches(iter([self._piece(partition, part)]), 0))

    def _piece(self, partition: Partition, part: MessageRows) -> Piece:
        file = File(f"kafka://{partition.topic}/{partition.number}")
        columns = self._conversion.columns_of(file, list(part.columns))
        return Piece(file, 0, {name: part.columns[name] for name in columns}, len(part.positions))

    def _bury(self, topic: str, partition: Partition, bad: list[_Bad]) -> None:
        """Writes messages to the dead-letter topic. Blocks until they are written.

        Raises:
            DataError: a message could not be written.
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
                "persia.error": _shortened(error.message),
            }
            callback = functools.partial(delivered, message.offset)
            produce = functools.partial(producer.produce, topic, message.value, headers=headers, on_delivery=callback)
            try:
                try:
                    produce()
                except BufferError:  # The send queue of librdkafka is full.
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


def _shortened(reason: str) -> str:
    """Shortens a reason, which may quote a value of any length, to fit a message header."""
    return reason if len(reason) <= MAX_REASON else f"{reason[: MAX_REASON - 3]}..."


def _check_numbers(schema: Schema, columns: Mapping[str, Any]) -> None:
    """Raises DataError if a column has a value that is not a number to a feature which reads it."""
    for dense in schema.dense:
        if dense.name in columns:
            raw_numbers(dense, columns[dense.name])
    for feature in schema.id_features:
        if feature.bucketize is not None and (column := feature.bucketize.column) in columns:
            bucket_numbers(feature, raw_column(column, columns[column]))


def _chosen(part: MessageRows, selected: NDArray[np.bool_]) -> MessageRows:
    """Returns the selected rows of a part.

    Args:
        part: the rows.
        selected: bool mask over the rows of all parts.
    """
    mask = selected[part.positions]
    columns = {
        name: list(itertools.compress(column, mask)) if isinstance(column, list) else column.filter(mask)
        for name, column in part.columns.items()
    }
    return MessageRows(part.positions[mask], columns)


def _keys(columns: dict[str, Any], name: str) -> IdColumn:
    """Returns the ids of the key of each row.

    Raises:
        DataError: the column is missing or has no ids, or a row has several.
    """
    if name not in columns:
        raise DataError(f"There is no column {name!r}, the key of the join.", column=name)
    keys = id_column(name, columns[name], "auto")
    if keys.offsets is not None and (np.diff(keys.offsets) > 1).any():
        raise DataError(f"Column {name!r}, the key of the join, has several keys in a row; give one.", column=name)
    return keys


def _milliseconds(columns: dict[str, Any], event_time: EventTime) -> NDArray[np.int64]:
    """Returns the event time of each row in milliseconds since 1970; NO_TIME if it is missing.

    Raises:
        DataError: the column is missing or has no times.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    name = event_time.column
    if name not in columns:
        raise DataError(f"There is no column {name!r}, the event time.", column=name)
    column = columns[name]
    if isinstance(column, list):
        raise _no_times(event_time, "has values that are not times")
    try:
        if pa.types.is_timestamp(column.type):
            whole = pc.CastOptions(pa.timestamp("ms", column.type.tz), allow_time_truncate=True)
            column = pc.cast(pc.cast(column, options=whole), pa.int64())
        elif pa.types.is_integer(column.type):
            column = pc.multiply_checked(pc.cast(column, pa.int64()), event_time.milliseconds)
        elif pa.types.is_floating(column.type):
            column = pc.if_else(pc.is_nan(column), None, column).cast(pa.float64())  # NaN is a missing time.
            whole_units = pc.cast(pc.trunc(column), pa.int64())  # Multiplied exactly, as a whole number.
            fraction = pc.round(pc.multiply(pc.subtract(column, pc.trunc(column)), float(event_time.milliseconds)))
            column = pc.add_checked(
                pc.multiply_checked(whole_units, event_time.milliseconds), pc.cast(fraction, pa.int64())
            )
        elif pa.types.is_null(column.type):
            column = pc.cast(column, pa.int64())
        else:
            raise _no_times(event_time, f"is {column.type}")
    except (pa.ArrowException, ValueError) as error:  # A number beyond 64 bits, or an unknown time zone.
        raise _no_times(event_time, f"has a value that is not a time ({error})") from error
    values: NDArray[np.int64] = pc.fill_null(column, NO_TIME).to_numpy()
    beyond = values[(values != NO_TIME) & ((values > LATEST) | (values < -LATEST))]
    if len(beyond):
        raise _no_times(event_time, f"has a value that is not a time ({beyond[0]} ms since 1970)")
    return values


def _no_times(event_time: EventTime, what: str) -> DataError:
    unit = "milliseconds" if event_time.milliseconds == 1 else "seconds"
    return DataError(
        f"Column {event_time.column!r}, the event time, {what}: give timestamps or numbers of {unit} since 1970.",
        column=event_time.column,
    )
