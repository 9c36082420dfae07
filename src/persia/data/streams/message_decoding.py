"""Decodes message values to columns: JSON, msgpack, Arrow IPC streams. No message affects another one's values."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np

from persia.batching.arrow_streams import declared_size
from persia.data.arrow_messages import concatenated, grown_size, may_grow, read_stream
from persia.errors import DataError
from persia.types import Int64Array

__all__ = [
    "MAX_BATCH_BYTES",
    "MAX_BYTES",
    "MAX_OBJECT_BYTES",
    "MAX_ROWS",
    "TIMESTAMP",
    "MessageDecoder",
    "MessageRows",
    "StreamMessage",
    "ValuesFormat",
]

ValuesFormat: TypeAlias = Literal["json", "msgpack", "arrow"]
"""Content of a message: one row as a JSON object or a msgpack map, or any number of rows as an Arrow IPC stream."""

TIMESTAMP = "kafka.timestamp"
"""Name of the column with the time of the message, in milliseconds since 1970."""

MAX_ROWS = 1 << 18
"""Maximum rows of a message."""

MAX_BYTES = 256 << 20
"""Maximum bytes of an Arrow message, once decompressed."""

MAX_OBJECT_BYTES = 16 << 20
"""Maximum bytes of a JSON or msgpack message. In Python its values take up to 64 times as much."""

MAX_BATCH_BYTES = 4 * MAX_BYTES
"""Maximum bytes of the messages of a batch, once decompressed, if there are several."""

_EXACT = 1 << 53
"""Bound below which float64 represents every whole number exactly."""


class StreamMessage(NamedTuple):
    """A message of one partition.

    Attributes:
        offset: offset in the partition.
        rows: declared number of rows; 1 if the message cannot be read.
        size: declared bytes once decompressed; bytes of the value if the message cannot be read.
        time: milliseconds since 1970.
        value: value as received.
        problem: reason to reject the message; None if it may be read.
        too_large: whether the message is rejected for its size.
    """

    offset: int
    rows: int
    size: int
    time: int
    value: bytes | None
    problem: str | None = None
    too_large: bool = False


class MessageRows(NamedTuple):
    """Rows of messages; each column has values of one type.

    Attributes:
        positions: int64 `[rows]`, positions of the rows among the rows of all messages.
        columns: pyarrow array `[rows]` by name, or a list if Arrow has no type for the values.
    """

    positions: Int64Array
    columns: dict[str, Any]


class _Layout(NamedTuple):
    """The needed columns of Arrow messages of one schema.

    Attributes:
        schema: the schema.
        needed: names of the needed columns in the schema.
        all_needed: whether these are all columns of the schema, in this order.
        growing: needed columns of which few bytes can make many ids.
        types: name and type of each needed column; messages with equal types are converted together.
    """

    schema: Any
    needed: list[str]
    all_needed: bool
    growing: list[str]
    types: tuple[Any, ...]


class MessageDecoder:
    """Decodes the values of messages.

    Args:
        format: content of each message.
        columns: names of the needed columns.
    """

    def __init__(self, format: ValuesFormat, columns: Sequence[str]) -> None:
        self._format = format
        self._columns = [name for name in columns if name != TIMESTAMP]
        self._timestamp = TIMESTAMP in columns
        # Fields are named by position, as names of columns need not be identifiers.
        fields = [f"f{number}" for number in range(len(self._columns))]
        row: Any = msgspec.defstruct(
            "Row",
            [(field, Any, None) for field in fields],
            rename=dict(zip(fields, self._columns, strict=True)),
            gc=False,
        )
        self._layout: _Layout | None = None
        self._getters = [operator.attrgetter(field) for field in fields]
        decoder: Any = msgspec.json.Decoder(row) if format == "json" else msgspec.msgpack.Decoder(row)
        self._decode: Callable[[Any], Any] = decoder.decode

    def message(self, offset: int, value: bytes | None, time: int) -> StreamMessage:
        """Returns a message without decoding it; batches are cut by its declared rows and size."""
        if value is None:
            return StreamMessage(offset, 1, 0, time, None, "it has no value")
        rows, size = 1, len(value)
        if self._format != "arrow":
            limit = MAX_OBJECT_BYTES
            if size <= limit:
                return StreamMessage(offset, 1, size, time, value)
        else:
            limit = MAX_BYTES
            try:
                rows, size = declared_size(value)
            except _undecodable() as error:
                return StreamMessage(offset, 1, len(value), time, value, f"it is not an Arrow IPC stream ({error})")
        problem = None
        if rows > MAX_ROWS:
            problem = f"it has {rows:,} rows, which is more than {MAX_ROWS:,}; write several messages"
        elif size > limit:
            problem = f"it takes {size:,} bytes, which is more than {limit:,}; write several messages"
        if problem is not None:
            return StreamMessage(offset, 1, len(value), time, value, problem, too_large=True)
        return StreamMessage(offset, rows, size, time, value)

    def decode(self, messages: Sequence[StreamMessage]) -> list[MessageRows]:
        """Returns the rows of messages, in as few parts as their types allow. No message affects another's values.

        JSON objects and msgpack maps may lack columns, which are then null.

        Raises:
            DataError: a message is not of the format, or too large; the error does not name the message.
        """
        values = [message.value for message in messages if message.problem is None]
        if len(values) < len(messages):
            problem = next(message.problem for message in messages if message.problem is not None)
            raise DataError(f"The message is rejected: {problem}.")
        try:
            parts = self._tables(messages) if self._format == "arrow" else self._objects(values)
        except _invalid() as error:
            raise DataError(f"The message is not {self._format}: {error}") from error
        if self._timestamp:
            import pyarrow as pa

            times = np.repeat([m.time for m in messages], [m.rows for m in messages])
            for part in parts:
                part.columns[TIMESTAMP] = pa.array(times[part.positions], pa.int64())
        return parts

    def _objects(self, encoded: Sequence[bytes | None]) -> list[MessageRows]:
        # One at a time: in one array, the end of a message could complete the beginning of the next one.
        rows = list(map(self._decode, encoded))
        values = {n: list(map(get, rows)) for n, get in zip(self._columns, self._getters, strict=True)}
        columns = {name: _array(column) for name, column in values.items()}
        mixed = [values[name] for name, column in columns.items() if column is None]
        if not mixed:
            return [MessageRows(np.arange(len(rows)), columns)]
        groups: dict[tuple[Any, ...], list[int]] = {}
        for position, types in enumerate(zip(*(map(_types, column) for column in mixed), strict=True)):
            groups.setdefault(types, []).append(position)
        return [
            MessageRows(
                np.array(positions),
                {
                    name: _taken(values[name], positions) if column is None else column.take(positions)
                    for name, column in columns.items()
                },
            )
            for positions in groups.values()
        ]

    def _tables(self, messages: Sequence[StreamMessage]) -> list[MessageRows]:
        tables, layouts = zip(*map(self._table, messages), strict=True)
        rows = np.array([message.rows for message in messages])
        begins = np.cumsum(rows) - rows
        parts: list[MessageRows] = []
        for numbers in _groups(layouts):
            positions = np.concatenate([np.arange(begins[n], begins[n] + rows[n]) for n in numbers])
            if len(positions):
                table = concatenated([tables[n] for n in numbers])
                columns = {name: table.column(name).chunk(0) for name in table.column_names}
                parts.append(MessageRows(positions, columns))
        return parts

    def _table(self, message: StreamMessage) -> tuple[Any, _Layout]:
        """Returns the needed columns of an Arrow message, and the layout of its schema."""
        assert message.value is not None
        table = read_stream(message.value)
        if table.num_rows != message.rows:
            raise DataError(f"The message has {table.num_rows} rows, but declares {message.rows}.")
        layout = self._layout
        if layout is None or not layout.schema.equals(table.schema):
            layout = self._layout = self._layout_of(table.schema)
        if layout.growing:
            size = sum(grown_size(chunk) for name in layout.growing for chunk in table.column(name).chunks)
            if size > MAX_BYTES:
                raise DataError(
                    f"The message takes {size:,} bytes once it is expanded, which is more than {MAX_BYTES:,}."
                )
        return (table if layout.all_needed else table.select(layout.needed)), layout

    def _layout_of(self, schema: Any) -> _Layout:
        names = schema.names
        needed = [name for name in self._columns if name in names]
        for name in needed:
            if names.count(name) > 1:
                raise DataError(f"The message has {names.count(name)} columns named {name!r}.", column=name)
        fields = [schema.field(name) for name in needed]
        growing = [field.name for field in fields if may_grow(field.type)]
        types = tuple((field.name, field.type, field.nullable) for field in fields)
        return _Layout(schema, needed, needed == names, growing, types)


def _groups(layouts: Sequence[_Layout]) -> list[list[int]]:
    """Groups the numbers of messages by layout, since pyarrow would cast one type to another."""
    if all(layout is layouts[0] for layout in layouts):
        return [list(range(len(layouts)))]
    groups: dict[tuple[Any, ...], list[int]] = {}
    for number, layout in enumerate(layouts):
        groups.setdefault(layout.types, []).append(number)
    return list(groups.values())


def _undecodable() -> tuple[type[Exception], ...]:
    """Returns the errors of messages whose size cannot be determined."""
    return (DataError, *_invalid())


def _invalid() -> tuple[type[Exception], ...]:
    """Returns the errors of messages that are not of the format. pyarrow is not imported with this module."""
    import pyarrow as pa

    return (
        pa.ArrowException,
        msgspec.MsgspecError,
        ValueError,  # Also for texts that are not UTF-8.
        TypeError,
        KeyError,
        OSError,
        OverflowError,
        RecursionError,
        MemoryError,
    )


def _array(values: list[Any]) -> Any:
    """Returns values as a pyarrow array; None if Arrow has no type for them, or one that changes their ids."""
    import pyarrow as pa

    try:
        array = pa.array(values)
    except OverflowError:  # Ids of 2^63 and more, whose type is not inferred.
        nested = any(isinstance(value, list) for value in values)
        if not _kinds(values, nested) <= {int}:
            return None
        try:
            array = pa.array(values, pa.list_(pa.uint64()) if nested else pa.uint64())
        except (pa.ArrowException, OverflowError):
            return None
    except (pa.ArrowException, TypeError, ValueError, RecursionError):
        return None
    if isinstance(array, pa.ChunkedArray):
        return None
    nested = pa.types.is_list(array.type)
    if (array.type.value_type if nested else array.type) == pa.float64():
        floats = (array.flatten() if nested else array).to_numpy(zero_copy_only=False)
        # Whole numbers among floats are exact below 2^53, and floats from 2^53 on are not ids.
        if (np.abs(floats) >= _EXACT).any() and int in _kinds(values, nested):
            return None
    return array


def _kinds(values: list[Any], nested: bool) -> set[type]:
    """Returns the types of values, or of the entries of lists, except None."""
    if nested:
        if not {type(value) for value in values} <= {list, type(None)}:
            return {list, object}
        values = list(itertools.chain.from_iterable(value for value in values if value is not None))
    return set(map(type, values)) - {type(None)}


def _types(value: Any) -> Any:
    """Returns a key that is equal for values that fit one Arrow type."""
    if type(value) is list:
        return frozenset(map(_type, value)) - {type(None)}
    return _type(value)


def _type(value: Any) -> Any:
    kind = type(value)
    if kind is int and not -(1 << 63) <= value < 1 << 63:
        return "uint64" if 0 <= value < 1 << 64 else "larger"
    return kind


def _taken(values: list[Any], positions: list[int]) -> Any:
    """Returns the values at `positions`: as an array if Arrow has a type for them, else as a list."""
    taken = [values[position] for position in positions]
    array = _array(taken)
    return taken if array is None else array
