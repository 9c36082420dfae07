"""The codec of msgpack, in which arrays are bytes. `persia.serve.Client` uses it, too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from persia.errors import DataError
from persia.metrics.answers import AnswerKind
from persia.serve.http.codecs.codec import MSGPACK, Samples
from persia.serve.http.codecs.messages import MessageCodec, TableColumn, Value, described

if TYPE_CHECKING:
    from persia.serve.http.batcher import JobResult
    from persia.serve.item_index import Retrieved
    from persia.serve.table_embeddings import TableEmbeddings

__all__ = [
    "Array",
    "EmbeddingsAnswer",
    "LabelAnswer",
    "LabelValues",
    "MsgpackCodec",
    "NearestAnswer",
    "PredictionsAnswer",
    "array_of",
    "column_of",
    "values_of",
]

Dtype: TypeAlias = Literal[
    "uint64", "int64", "uint32", "int32", "uint16", "int16", "uint8", "int8", "float64", "float32", "bool"
]


class Array(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """An array: little-endian, in C order.

    Attributes:
        dtype: its dtype.
        data: its values.
        shape: shape of an array with more than one dimension.
        offsets: int64 `[rows + 1]`, of lists of ids: row i has `data[offsets[i]:offsets[i + 1]]`.
    """

    dtype: Dtype
    data: bytes
    shape: tuple[int, ...] | None = None
    offsets: bytes | None = None


Column: TypeAlias = Array | list[Value]


class _Samples(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Samples as columns.

    Attributes:
        features: ids by feature.
        dense: values by dense feature, or all dense features as `[rows, dense features]` in the order of the schema.
        dense_array: all dense features as an array `[rows, dense features]`, in place of `dense`.
    """

    features: dict[str, Column]
    dense: dict[str, Column] | list[Value] = msgspec.field(default_factory=dict)
    dense_array: Array | None = None


class _EmbeddingsRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Ids of a table."""

    table: str
    ids: Column


class LabelValues(msgspec.Struct):
    """Values `[rows, labels]`."""

    labels: tuple[str, ...]
    values: Array


class LabelAnswer(msgspec.Struct, omit_defaults=True):
    """Answers for one label, `[rows]`, or with classes `[rows, classes]`; see `persia.metrics.AnswerColumns`."""

    kind: AnswerKind
    values: Array
    unit: str | None = None
    classes: tuple[str, ...] = ()


class PredictionsAnswer(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Answer of `/predict` and `/rank`, with either probabilities or scores, or, of several kinds, predictions."""

    probabilities: LabelValues | None = None
    scores: LabelValues | None = None
    predictions: dict[str, LabelAnswer] | None = None
    step: int
    epoch: int


class EmbeddingsAnswer(msgspec.Struct):
    """Answer of `/embeddings`; see `TableEmbeddings`."""

    table: str
    found: Array
    rows: Array
    step: int
    epoch: int


class NearestAnswer(msgspec.Struct):
    """Answer of `/retrieve`; see `NearestItems`."""

    ids: Array
    scores: Array
    step: int


class MsgpackCodec(MessageCodec):
    """The codec of msgpack."""

    media_type = MSGPACK
    names = (MSGPACK, "application/x-msgpack", "application/vnd.msgpack")

    def __init__(self) -> None:
        super().__init__("msgpack", _decoder)
        self._samples = _decoder(_Samples)
        self._embeddings = _decoder(_EmbeddingsRequest)

    def ids(self, body: bytes) -> TableColumn:
        """See `MessageCodec.ids`."""
        request = self._decoded(self._embeddings, body)
        return TableColumn(request.table, _received("ids", request.ids))

    def predictions(self, predictions: JobResult) -> bytes:
        """See `Codec.predictions`. Probabilities or scores of all labels are one array."""
        answers = predictions.answers
        values: dict[str, Any]
        if answers.name == "predictions":
            parts = answers.by_label(predictions.values)
            of = {each.label: LabelAnswer(values=array_of(parts[each.label]), **described(each)) for each in answers.of}
            values = {answers.name: of}
        else:
            values = {answers.name: LabelValues(answers.labels, array_of(predictions.values))}
        answer = PredictionsAnswer(step=predictions.step, epoch=predictions.epoch, **values)
        return msgspec.msgpack.encode(answer)

    def embeddings(self, table: str, embeddings: TableEmbeddings) -> bytes:
        """See `Codec.embeddings`."""
        found, rows, step, epoch = embeddings
        return msgspec.msgpack.encode(EmbeddingsAnswer(table, array_of(found), array_of(rows), step, epoch))

    def nearest(self, items: Retrieved) -> bytes:
        """See `Codec.nearest`."""
        return msgspec.msgpack.encode(NearestAnswer(array_of(items.ids), array_of(items.scores), items.step))

    def _starts_array(self, body: bytes) -> bool:
        return bool(body) and (body[0] & 0xF0 == 0x90 or body[0] in (0xDC, 0xDD))

    def _columns(self, body: bytes) -> Samples:
        samples = self._decoded(self._samples, body)
        features = {name: _received(name, column) for name, column in samples.features.items()}
        if samples.dense_array is not None:
            if samples.dense:
                raise DataError("There are 'dense' and 'dense_array'; leave one out.", column="dense")
            return Samples(features, values_of("dense", samples.dense_array))
        if isinstance(samples.dense, list):
            return Samples(features, samples.dense)
        return Samples(features, {name: _received(name, column) for name, column in samples.dense.items()})


def _decoder(form: Any) -> Any:
    return msgspec.msgpack.Decoder(form).decode


def _received(name: str, column: Column) -> Any:
    return values_of(name, column) if isinstance(column, Array) else column


def array_of(values: NDArray[Any], offsets: NDArray[np.int64] | None = None) -> Array:
    """Returns an array for the wire.

    Args:
        values: numbers or booleans, of any shape.
        offsets: offsets of lists of ids; `values` is then `[n]`.
    """
    values = np.ascontiguousarray(values)
    little = values.astype(values.dtype.newbyteorder("<"), copy=False)
    bounds = None if offsets is None else np.ascontiguousarray(offsets, "<i8").tobytes()
    shape = None if values.ndim == 1 else values.shape
    return Array(values.dtype.name, little.tobytes(), shape, bounds)  # type: ignore[arg-type]


def values_of(name: str, array: Array) -> Any:
    """Returns a column for `Batch.from_columns`: an array, or a pair of values and offsets.

    Raises:
        DataError: its parts do not match.
    """
    dtype = np.dtype(array.dtype).newbyteorder("<")
    try:
        values = np.frombuffer(array.data, dtype)
        if array.shape is not None:
            if len(array.shape) not in (1, 2) or min(array.shape) < 0:
                raise ValueError("shapes have one or two dimensions, which are not negative")
            values = values.reshape(array.shape)
        if array.dtype == "bool":
            values = np.frombuffer(array.data, np.uint8).reshape(values.shape) != 0
        if array.offsets is None:
            return values.astype(dtype.newbyteorder("="), copy=False)
        if values.ndim != 1:
            raise ValueError("values with offsets have one dimension")
        return values.astype(dtype.newbyteorder("="), copy=False), np.frombuffer(array.offsets, "<i8").astype(np.int64)
    except ValueError as error:
        raise DataError(
            f"The array of {name!r} ({array.dtype}, {len(array.data)} bytes) cannot be read: {error}. Send dtype, data "
            "and shape or offsets as persia.serve.Client does.",
            column=name,
        ) from error


def column_of(name: str, column: Any) -> Any:
    """Returns a column of a request for the wire: an `Array` if its values are numbers, else a list.

    Args:
        name: name of the column.
        column: an array, a list, or a pair `(values, offsets)`.

    Raises:
        DataError: it has neither numbers nor texts.
    """
    if isinstance(column, tuple) and len(column) == 2 and all(hasattr(part, "__array__") for part in column):
        return array_of(np.asarray(column[0]), np.asarray(column[1], np.int64))
    if isinstance(column, (list, tuple)):
        return [value.tolist() if isinstance(value, np.ndarray) else value for value in column]
    array = np.asarray(column)
    if array.dtype.kind in "biuf" and array.dtype.itemsize <= 8 and array.dtype != np.float16:
        return array_of(array)
    if array.dtype.kind in "OU":
        return array.tolist()
    raise DataError(f"Column {name!r} is {array.dtype}; convert it to numbers or texts.", column=name)
