"""Reads and writes Arrow IPC streams. The only file of this package that imports pyarrow."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from persia.errors import DataError

__all__ = ["read_table", "value_counts", "write_columns", "write_embeddings", "write_lists"]

_RECORD_BATCH = 3
_COMPRESSION = 3
"""Type of a message, and number of a field of it, in Arrow's Message.fbs."""


def read_table(body: bytes, max_rows: int) -> Any:
    """Returns the table of an IPC stream, checked as a whole.

    Compressed streams, dictionaries and types without memory of their own (nulls, views, runs, unions) are refused:
    a small body could stand for any number of values.

    Raises:
        MalformedBodyError: the body is no such stream.
        DataError: it has too many rows, or a type that is refused.
    """
    from persia.serve.http.bodies import MalformedBodyError

    try:
        _check_plain(body)
        with pa.ipc.open_stream(pa.py_buffer(body)) as reader:
            names = reader.schema.names
            for field in reader.schema:
                _check_type(field.name, field.type)
            if len(set(names)) != len(names):
                raise DataError("Two columns of the Arrow stream have one name; rename one.")
            batches, rows = [], 0
            for batch in reader:
                rows += batch.num_rows
                if rows > max_rows:
                    raise DataError(
                        f"The Arrow stream has {rows} rows or more; the server takes {max_rows} (--max-rows). Send "
                        "several requests.",
                        row=max_rows,
                    )
                batch.validate(full=True)
                batches.append(batch)
            return pa.Table.from_batches(batches, reader.schema)
    except (
        pa.ArrowException,
        OSError,
        struct.error,
        OverflowError,
        MemoryError,
        UnicodeDecodeError,
        EOFError,
    ) as error:
        # Values are not shown: an error of Arrow may quote much of them.
        raise MalformedBodyError(
            f"The body is not a valid Arrow IPC stream ({type(error).__name__}: {str(error)[:200]}). Write it with "
            "pyarrow.ipc.new_stream, without compression."
        ) from error


def value_counts(table: Any) -> dict[str, int]:
    """Returns the number of values of each column, those within lists."""
    return {name: sum(len(_flat(chunk)) for chunk in table.column(name).chunks) for name in table.column_names}


def _flat(array: Any) -> Any:
    return array.flatten() if _is_list(array.type) else array


def _is_list(kind: Any) -> bool:
    return any(test(kind) for test in (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list))


def write_columns(columns: dict[str, NDArray[Any]], metadata: dict[str, str]) -> bytes:
    """Returns an IPC stream of one batch with these columns `[n]`, and metadata of its schema."""
    batch = pa.record_batch(dict(columns.items())).replace_schema_metadata(metadata)
    return _stream(batch)


def write_embeddings(found: NDArray[np.bool_], rows: NDArray[np.float32], metadata: dict[str, str]) -> bytes:
    """Returns an IPC stream with the columns `found` and `row`, lists of fixed size."""
    values = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), rows.shape[1])
    return _stream(pa.record_batch({"found": found, "row": values}).replace_schema_metadata(metadata))


def write_lists(columns: dict[str, NDArray[Any]], metadata: dict[str, str]) -> bytes:
    """Returns an IPC stream of one batch with these columns `[n, k]`, as lists of fixed size."""
    lists = {
        name: pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])
        if values.shape[1]
        else pa.array([[]] * len(values), pa.list_(pa.from_numpy_dtype(values.dtype), 0))
        for name, values in columns.items()
    }
    return _stream(pa.record_batch(lists).replace_schema_metadata(metadata))


def _stream(batch: Any) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]


def _check_type(name: str, kind: Any) -> None:
    inner = kind.value_type if _is_list(kind) else kind
    tests = (
        pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_string, pa.types.is_large_string,
        pa.types.is_binary, pa.types.is_large_binary, pa.types.is_timestamp, pa.types.is_date,
    )  # fmt: skip
    if not any(test(inner) for test in tests):
        hint = "decode it: column.dictionary_decode()" if pa.types.is_dictionary(inner) else "cast it"
        raise DataError(
            f"Column {name!r} of the Arrow stream is {str(kind)[:100]}; it takes numbers, booleans, texts, times, "
            f"and lists of these: {hint}.",
            column=name,
        )


def _check_plain(body: bytes) -> None:
    """Raises DataError if a message has compressed buffers: they would be decompressed to any length they declare."""
    for message in pa.ipc.MessageReader.open_stream(pa.py_buffer(body)):
        header = memoryview(message.metadata)
        (table,) = struct.unpack_from("<I", header, 0)
        kind = _field(header, table, 1)
        if kind is None or header[kind] != _RECORD_BATCH:
            continue
        at = _field(header, table, 2)
        if at is None:
            continue
        (step,) = struct.unpack_from("<I", header, at)
        if _field(header, at + step, _COMPRESSION) is not None:
            raise DataError("The Arrow stream is compressed, which the server refuses; write it without compression.")


def _field(header: memoryview, table: int, number: int) -> int | None:
    """Returns the position of a field of a flatbuffers table; None if it is not set."""
    (back,) = struct.unpack_from("<i", header, table)
    vtable = table - back
    (size,) = struct.unpack_from("<H", header, vtable)
    if 4 + 2 * number >= size:
        return None
    (offset,) = struct.unpack_from("<H", header, vtable + 4 + 2 * number)
    return table + offset if offset else None
