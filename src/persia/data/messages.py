"""Values of messages, in bulk, to Arrow columns: JSON objects, msgpack maps, Arrow IPC streams."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np

from persia.errors import DataError

__all__ = ["TIMESTAMP", "MessageDecoder", "StreamMessage", "ValuesFormat"]

ValuesFormat: TypeAlias = Literal["json", "msgpack", "arrow"]
"""Content of a message: one row as a JSON object or a msgpack map, or any number of rows as an Arrow IPC stream."""

TIMESTAMP = "kafka.timestamp"
"""Name of the column with the time of the message, in milliseconds since 1970."""


class StreamMessage(NamedTuple):
    """A message of one partition.

    Attributes:
        offset: its offset.
        rows: number of rows; 1 if it cannot be decoded.
        content: bytes of a row, or a pyarrow table; None if it has none, or is not an Arrow IPC stream.
        time: milliseconds since 1970.
        value: value as received.
    """

    offset: int
    rows: int
    content: Any
    time: int
    value: bytes | None


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
        self._getters = [operator.attrgetter(field) for field in fields]
        self._json = msgspec.json.Decoder(list[row])
        self._msgpack = msgspec.msgpack.Decoder(list[row])

    def message(self, offset: int, value: bytes | None, time: int) -> StreamMessage:
        """Returns a message. Arrow values are decoded here, as their number of rows decides about batches."""
        if self._format != "arrow" or value is None:
            return StreamMessage(offset, 1, value, time, value)
        import pyarrow as pa

        try:
            table = pa.ipc.open_stream(value).read_all()
            table.validate(full=True)  # Else lengths and offsets in the message are trusted.
        except (pa.ArrowException, OSError, ValueError):
            return StreamMessage(offset, 1, None, time, value)
        return StreamMessage(offset, table.num_rows, table, time, value)

    def table(self, messages: Sequence[StreamMessage]) -> Any:
        """Returns the rows of messages as a pyarrow table. JSON objects and msgpack maps may lack columns: null.

        Raises:
            DataError: a message is not of the format; it is not said which.
        """
        import pyarrow as pa

        contents = [message.content for message in messages]
        if None in contents:
            raise DataError(f"A message has no value, or none that is {self._format}.")
        try:
            table = self._decoded(contents)
        except (pa.ArrowException, msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
            raise DataError(f"A message is not {self._format}: {error}") from error
        if self._timestamp:
            times = np.repeat([m.time for m in messages], [m.rows for m in messages])
            table = table.append_column(TIMESTAMP, pa.array(times, pa.int64()))
        return table.combine_chunks()

    def _decoded(self, contents: list[Any]) -> Any:
        import pyarrow as pa

        # All rows as one array: decoding each by itself takes several times as long.
        match self._format:
            case "json":
                rows = self._json.decode(b"[" + b",".join(contents) + b"]")
            case "msgpack":
                rows = self._msgpack.decode(b"\xdd" + len(contents).to_bytes(4, "big") + b"".join(contents))
            case "arrow":
                return pa.concat_tables(contents, promote_options="permissive")
        if len(rows) != len(contents):
            raise DataError(f"A message is not one JSON object: {len(contents)} messages have {len(rows)}.")
        return pa.table(
            {name: _array(list(map(get, rows))) for name, get in zip(self._columns, self._getters, strict=True)}
        )


def _array(values: list[Any]) -> Any:
    import pyarrow as pa

    try:
        return pa.array(values)
    except OverflowError:  # Ids of 2^63 and more, which are not inferred.
        nested = any(isinstance(value, list) for value in values)
        return pa.array(values, pa.list_(pa.uint64()) if nested else pa.uint64())
