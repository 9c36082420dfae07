"""The codec of Arrow IPC streams. The only file of this package that imports pyarrow."""

from __future__ import annotations

import json
import struct
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc
from numpy.typing import NDArray

import persia.batching.arrow_columns  # Now, so that the first request does not wait for it, as for the next ones.
import persia.batching.columns
import persia.batching.id_weights  # noqa: F401
from persia.batching.arrow_streams import is_compressed
from persia.errors import DataError
from persia.serve.http.codecs.codec import ARROW, Codec, MalformedBodyError, Samples

if TYPE_CHECKING:
    from collections.abc import Mapping

    from persia.metrics import AnswerColumns
    from persia.serve.http.batcher import JobResult
    from persia.serve.http.limits import ServeLimits
    from persia.serve.item_index import Retrieved
    from persia.serve.table_embeddings import TableEmbeddings

__all__ = ["ArrowCodec", "value_count"]


class ArrowCodec(Codec):
    """The codec of Arrow. Step and epoch of an answer are in the metadata of its schema."""

    media_type = ARROW
    names = (ARROW,)

    def samples(self, body: bytes, limits: ServeLimits) -> Samples:
        """See `Codec.samples`. Dense features are among the others."""
        table = _read_table(body, limits)
        return Samples({name: table.column(name) for name in table.column_names}, {})

    def predictions(self, predictions: JobResult) -> bytes:
        """See `Codec.predictions`. Each label has a column: numbers, or with classes lists of fixed size.

        If the answers are predictions, the metadata of a column has its kind, unit and classes.
        """
        answers = predictions.answers
        columns: dict[str, Any] = {
            label: _lists(np.ascontiguousarray(part)) if part.ndim == 2 else np.ascontiguousarray(part)
            for label, part in answers.by_label(predictions.values).items()
        }
        described = answers.of if answers.name == "predictions" else ()
        return _stream(
            columns, predictions.step, predictions.epoch, {each.label: _metadata(each) for each in described}
        )

    def embeddings(self, table: str, embeddings: TableEmbeddings) -> bytes:
        """See `Codec.embeddings`. The columns are `found` and `row`, lists of fixed size."""
        columns = {"found": embeddings.found, "row": _lists(embeddings.rows)}
        return _stream(columns, embeddings.step, embeddings.epoch)

    def nearest(self, items: Retrieved) -> bytes:
        """See `Codec.nearest`. Both columns are lists of fixed size."""
        return _stream({"ids": _lists(items.ids), "scores": _lists(items.scores)}, items.step)


def value_count(column: Any) -> int:
    """Returns the number of values of an Arrow column; for lists, the values within them."""
    return sum(len(_flat(chunk)) for chunk in column.chunks)


def _read_table(body: bytes, limits: ServeLimits) -> Any:
    """Returns the table of an IPC stream, fully validated.

    It has the types that file readers accept. As a small body could expand to any number of values, compressed streams
    are refused, and also dictionaries and views of texts whose values would exceed the largest body.

    Args:
        body: the stream.
        limits: limits of rows and bytes.

    Raises:
        MalformedBodyError: the body is not such a stream.
        DataError: it has too many rows, a type that is refused, or texts that are too large.
    """
    try:
        _check_plain(body)
        with pa.ipc.open_stream(pa.py_buffer(body)) as reader:
            names = reader.schema.names
            for field in reader.schema:
                _check_type(field.name, field.type)
            if len(set(names)) != len(names):
                raise DataError("Two columns of the Arrow stream have one name; rename one.")
            batches, rows, text_bytes = [], 0, 0
            for batch in reader:
                rows += batch.num_rows
                if rows > limits.max_rows:
                    raise DataError(
                        f"The Arrow stream has {rows} rows or more; the server takes {limits.max_rows} (--max-rows). "
                        "Send several requests.",
                        row=limits.max_rows,
                    )
                batch.validate(full=True)
                text_bytes += sum(map(_shared_bytes, batch.columns))
                if text_bytes > limits.max_body_bytes:
                    raise DataError(
                        f"The texts of the Arrow stream have {text_bytes} bytes or more once each row has its own; "
                        f"the server takes {limits.max_body_bytes} (--max-body-bytes). Send several requests.",
                        row=rows - batch.num_rows,
                    )
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
        # Truncated: an error of Arrow may quote many values.
        raise MalformedBodyError(
            f"The body is not a valid Arrow IPC stream ({type(error).__name__}: {str(error)[:200]}). Write it with "
            "pyarrow.ipc.new_stream, without compression."
        ) from error


def _flat(array: Any) -> Any:
    return array.flatten() if _is_list(array.type) else array


def _is_list(kind: Any) -> bool:
    return any(test(kind) for test in (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list))


def _lists(values: NDArray[Any]) -> Any:
    """Converts an array `[n, k]` to lists of fixed size."""
    if not values.shape[1]:
        return pa.array([[]] * len(values), pa.list_(pa.from_numpy_dtype(values.dtype), 0))
    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])


def _metadata(answer: AnswerColumns) -> dict[str, str]:
    """Describes a column of answers."""
    metadata: dict[str, str] = {"persia.kind": answer.kind}
    if answer.unit is not None:
        metadata["persia.unit"] = answer.unit
    if answer.classes:
        metadata["persia.classes"] = json.dumps(answer.classes, ensure_ascii=False)
    return metadata


def _stream(
    columns: dict[str, Any],
    step: int,
    epoch: int | None = None,
    described: Mapping[str, dict[str, str]] = MappingProxyType({}),
) -> bytes:
    """Returns a stream of one batch; `described` has metadata of columns."""
    metadata = {"persia.step": str(step), **({} if epoch is None else {"persia.epoch": str(epoch)})}
    batch = pa.record_batch(columns)
    for number, field in enumerate(batch.schema):
        if field.name in described:
            batch = pa.RecordBatch.from_arrays(
                batch.columns, schema=batch.schema.set(number, field.with_metadata(described[field.name]))
            )
    batch = batch.replace_schema_metadata(metadata)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]


def _check_type(name: str, kind: Any) -> None:
    inner = kind.value_type if _is_list(kind) else kind
    inner = inner.value_type if pa.types.is_dictionary(inner) else inner
    tests = (
        pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal, pa.types.is_boolean, pa.types.is_null,
        pa.types.is_timestamp, pa.types.is_date, _is_text, _is_view,
    )  # fmt: skip
    if not any(test(inner) for test in tests):
        raise DataError(
            f"Column {name!r} of the Arrow stream is {str(kind)[:100]}; cast it to numbers, booleans, texts or "
            "times, or to dictionaries or lists of them.",
            column=name,
        )


def _is_text(kind: Any) -> bool:
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return any(test(kind) for test in tests)


def _is_view(kind: Any) -> bool:
    return str(kind) in ("string_view", "binary_view")


def _shared_bytes(array: Any) -> int:
    """Returns the size in bytes that the texts of an array would have if no two values shared memory."""
    array = _flat(array)
    if pa.types.is_dictionary(array.type):
        places = array.indices.drop_null().to_numpy(zero_copy_only=False)
        lengths = _text_lengths(array.dictionary)
        return 0 if lengths is None or not len(places) else int(lengths[places].sum())
    lengths = _text_lengths(array) if _is_view(array.type) else None
    return 0 if lengths is None else int(lengths.sum())


def _text_lengths(array: Any) -> NDArray[np.int64] | None:
    """Returns the size of each text in bytes, 0 for a null; None if the values are not texts."""
    if _is_view(array.type) and len(array):
        validity, views = array.buffers()[:2]  # The first four bytes of a view of 16 are its length.
        lengths = np.frombuffer(views, np.int32)[4 * array.offset : 4 * (array.offset + len(array)) : 4]
        present = np.ones(len(array), np.bool_) if validity is None else array.is_valid().to_numpy(zero_copy_only=False)
        return np.where(present, lengths, 0).astype(np.int64)
    if not _is_text(array.type):
        return None
    lengths = pc.fill_null(pc.binary_length(array), 0).to_numpy(zero_copy_only=False)
    return lengths.astype(np.int64)  # type: ignore[no-any-return]


def _check_plain(body: bytes) -> None:
    """Raises DataError if a message has compressed buffers, as they can declare any decompressed length."""
    if any(map(is_compressed, pa.ipc.MessageReader.open_stream(pa.py_buffer(body)))):
        raise DataError("The Arrow stream is compressed, which the server refuses; write it without compression.")
