"""Bodies of requests and answers, as JSON and msgpack have them. Also read by the client."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from persia.errors import DataError

__all__ = [
    "ARROW",
    "JSON",
    "MSGPACK",
    "MSGPACK_NAMES",
    "Array",
    "Column",
    "EmbeddingsRequest",
    "JsonEmbeddingsRequest",
    "JsonRecords",
    "JsonSamples",
    "MalformedBodyError",
    "RankRequest",
    "RetrieveRequest",
    "Samples",
    "array_of",
    "values_of",
]

JSON = "application/json"
MSGPACK = "application/msgpack"
MSGPACK_NAMES = (MSGPACK, "application/x-msgpack", "application/vnd.msgpack")
ARROW = "application/vnd.apache.arrow.stream"


class MalformedBodyError(DataError):
    """A body is not what its Content-Type says."""


Dtype: TypeAlias = Literal[
    "uint64", "int64", "uint32", "int32", "uint16", "int16", "uint8", "int8", "float64", "float32", "bool"
]


class Array(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """An array in msgpack: little-endian, in C order.

    Attributes:
        dtype: its dtype.
        data: its values.
        shape: of an array with more than one dimension.
        offsets: int64 `[rows + 1]`, of lists of ids: row i has `data[offsets[i]:offsets[i + 1]]`.
    """

    dtype: Dtype
    data: bytes
    shape: tuple[int, ...] | None = None
    offsets: bytes | None = None


Scalar: TypeAlias = bool | int | float | str | None
Value: TypeAlias = Scalar | list[Scalar]
JsonColumn: TypeAlias = list[Value]
Column: TypeAlias = Array | list[Value]
JsonRecords: TypeAlias = list[dict[str, Value]]


class JsonSamples(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Samples as columns, in JSON."""

    features: dict[str, JsonColumn]
    dense: dict[str, JsonColumn] | JsonColumn = msgspec.field(default_factory=dict)


class Samples(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Samples as columns, in msgpack.

    Attributes:
        features: ids by feature.
        dense: values by dense feature, or all of them as `[rows, dense features]` in the order of the schema.
        dense_array: all of them as an array `[rows, dense features]`, in place of `dense`.
    """

    features: dict[str, Column]
    dense: dict[str, Column] | JsonColumn = msgspec.field(default_factory=dict)
    dense_array: Array | None = None


class RankRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One user and many items.

    Attributes:
        user: samples, of which there is one, with the features of the user.
        items: samples with the features of the items.
    """

    user: msgspec.Raw
    items: msgspec.Raw


class RetrieveRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Users whose nearest items are wanted.

    Attributes:
        users: samples with the features of the users.
        k: number of items of each.
    """

    users: msgspec.Raw
    k: Annotated[int, msgspec.Meta(ge=1)] = 10


class JsonEmbeddingsRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Ids of a table, in JSON."""

    table: str
    ids: JsonColumn


class EmbeddingsRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Ids of a table.

    Attributes:
        table: name of the table.
        ids: values of a feature of this table, one each.
    """

    table: str
    ids: Column


def array_of(values: NDArray[Any], offsets: NDArray[np.int64] | None = None) -> Array:
    """Returns an array for the wire.

    Args:
        values: numbers or booleans, of any shape.
        offsets: of lists of ids; `values` is then `[n]`.
    """
    values = np.ascontiguousarray(values)
    little = values.astype(values.dtype.newbyteorder("<"), copy=False)
    bounds = None if offsets is None else np.ascontiguousarray(offsets, "<i8").tobytes()
    shape = None if values.ndim == 1 else values.shape
    return Array(values.dtype.name, little.tobytes(), shape, bounds)  # type: ignore[arg-type]


def values_of(name: str, array: Array) -> Any:
    """Returns a column for `Batch.from_columns`: an array, or a pair of values and offsets.

    Raises:
        DataError: its parts do not fit each other.
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
