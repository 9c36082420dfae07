"""Encodes values that contain numpy arrays as msgpack and raw buffers, without copying the arrays.

An array becomes a msgpack extension that names the frame with its bytes. `docs/reference/wire.md` has the layout.
"""

from __future__ import annotations

import math
import struct
import threading
import types
from collections.abc import Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar, Union, get_args, get_origin

import msgspec
import numpy as np
from numpy.typing import NDArray

from persia.errors import ConfigError, WireError
from persia.types.decoding import DECODERS, decode_hook
from persia.types.packed import Packed, PackedGradients

__all__ = ["DTYPES", "MAX_NDIM", "Arrays", "Decoder", "FrameBuffer", "encode"]

T = TypeVar("T")
Arrays = list[NDArray[Any]]

DTYPES: tuple[np.dtype[Any], ...] = tuple(
    np.dtype(name) for name in ("?", "<i1", "<i2", "<i4", "<i8", "<u1", "<u2", "<u4", "<u8", "<f2", "<f4", "<f8")
)
"""Dtypes by code. The codes are part of the wire format: append only."""

MAX_NDIM = 8
ARRAY_EXTENSION = 1

_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
_ITEMSIZES = tuple(dtype.itemsize for dtype in DTYPES)
_HEAD_BYTES = 4
_LAYOUTS = tuple(struct.Struct(f"<HBB{ndim}Q") for ndim in range(MAX_NDIM + 1))


class FrameBuffer(Protocol):
    """A received frame."""

    @property
    def buffer(self) -> memoryview:
        """Returns the bytes of the frame."""


def encode(value: object, most_arrays: int) -> tuple[bytes, Arrays]:
    """Encodes a value as msgpack and a list of its arrays, in the order of their frames. Copies strided arrays only.

    Args:
        value: None, scalars, strings, bytes, lists, tuples, dicts, dataclasses, structs and arrays of these.
        most_arrays: maximum number of arrays.

    Raises:
        WireError: the value contains another type, or too many arrays.
    """
    arrays: Arrays = []

    def hook(item: object) -> object:
        if isinstance(item, np.ndarray):
            shape, contiguous = item.shape, item
            code = _CODES.get(item.dtype)
            if code is None or not item.flags.c_contiguous or len(shape) > MAX_NDIM:
                contiguous = _sendable(item)
                code = _CODES[contiguous.dtype]
            head = _LAYOUTS[len(shape)].pack(len(arrays), code, len(shape), *shape)
            arrays.append(contiguous)
            return msgspec.msgpack.Ext(ARRAY_EXTENSION, head)
        if isinstance(item, Packed | PackedGradients):
            return item.to_wire()
        if isinstance(item, np.generic):
            return item.item()
        if isinstance(item, Mapping):
            return dict(item)
        if isinstance(item, Sequence):
            return list(item)
        raise WireError(
            f"A {type(item).__name__} cannot be sent; use scalars, strings, lists, dicts, records and numeric arrays."
        )

    try:
        payload = msgspec.msgpack.encode(value, enc_hook=hook)
    except (TypeError, ValueError, OverflowError, RecursionError, struct.error) as error:
        raise WireError(f"A value cannot be sent: {error}.") from error
    if len(arrays) > most_arrays:
        raise WireError(f"A message has {len(arrays)} arrays, and {most_arrays} are allowed; send fewer at a time.")
    return payload, arrays


def _sendable(array: NDArray[Any]) -> NDArray[Any]:
    if array.dtype not in _CODES:
        array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    if array.dtype not in _CODES or array.ndim > MAX_NDIM:
        raise WireError(
            f"An array of dtype {array.dtype} and {array.ndim} dimensions cannot be sent; "
            f"convert it to one of {', '.join(str(dtype) for dtype in DTYPES)}, at most {MAX_NDIM} dimensions."
        )
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


class Decoder(Generic[T]):
    """Decodes values of one type. Thread-safe.

    Args:
        kind: an annotation that msgspec supports, with `NDArray[...]`, `Packed[...]` and `PackedGradients` anywhere in
            it, and interfaces such as `Mode`. `NDArray[A | B]` accepts both dtypes; `Any` accepts everything.

    Raises:
        ConfigError: the annotation is not supported.
    """

    def __init__(self, kind: Any) -> None:
        # msgspec's hooks take no context, so the frames of the current message are stored per thread.
        self._work = threading.local()
        # Keyed by identity, as annotations are slow to hash. Each stays referenced so that its id is not reused.
        self._accepted: dict[int, tuple[Any, frozenset[np.dtype[Any]]]] = {}
        try:
            self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(
                kind, dec_hook=self._check, ext_hook=self._array
            )
        except TypeError as error:
            raise ConfigError(
                f"{kind} cannot be sent between processes: {error}. For arrays of either dtype write NDArray[A | B]."
            ) from error

    def decode(self, payload: bytes | memoryview | msgspec.Raw, frames: Sequence[FrameBuffer]) -> T:
        """Decodes a value. Its arrays are writable views of the frames; unaligned ones are copied.

        Raises:
            WireError: the message does not match the type, or its frames do not match their descriptions.
        """
        used: set[int] = set()
        self._work.message = frames, used
        try:
            value = self._decoder.decode(payload)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise WireError(f"The message does not fit its type: {error}.") from error
        finally:
            del self._work.message
        if len(used) != len(frames):
            raise WireError(f"The message has {len(frames)} arrays, but refers to {len(used)}.")
        return value

    def _array(self, code: int, data: memoryview) -> NDArray[Any]:
        size = len(data)
        if code != ARRAY_EXTENSION or size < _HEAD_BYTES:
            raise msgspec.ValidationError(f"unknown extension {code} of {size} bytes")
        try:
            frame, kind, ndim, *shape = _LAYOUTS[(size - _HEAD_BYTES) >> 3].unpack(data)
            dtype = DTYPES[kind]
        except (struct.error, IndexError):
            raise msgspec.ValidationError(f"invalid description of an array, of {size} bytes") from None
        if ndim != len(shape):
            raise msgspec.ValidationError(f"no array has {ndim} dimensions in {size} bytes")
        frames, used = self._work.message
        if frame >= len(frames) or frame in used:
            raise msgspec.ValidationError(f"frame {frame} is missing or used twice")
        used.add(frame)
        buffer = frames[frame].buffer
        if math.prod(shape) * _ITEMSIZES[kind] != buffer.nbytes:
            raise msgspec.ValidationError(f"{buffer.nbytes} bytes do not make a {dtype} array of shape {shape}")
        try:
            array: NDArray[Any] = np.ndarray(shape, dtype, buffer)
        except ValueError as error:  # An empty array whose other sizes exceed what numpy can express.
            raise msgspec.ValidationError(f"numpy refuses the shape {shape}") from error
        if kind == 0 and array.size and array.view(np.uint8).max() > 1:
            raise msgspec.ValidationError("a bool array has bytes other than 0 and 1")
        # For numpy an array without items is aligned anywhere; for the native core it is not.
        return array if array.flags.aligned and array.size else array.copy()

    def _check(self, kind: Any, value: object) -> object:
        # msgspec adds the place to a ValueError.
        if kind is PackedGradients:
            return PackedGradients.from_wire(value)
        if isinstance(kind, type) and kind in DECODERS:
            return decode_hook(kind, value)
        packs = get_origin(kind) is Packed
        if not packs and not isinstance(value, np.ndarray):
            raise ValueError(f"expected an array, got {type(value).__name__}")
        known = self._accepted.get(id(kind))
        if known is None:
            known = self._accepted[id(kind)] = kind, _dtypes(kind)
        _, accepted = known
        if packs:
            return Packed.from_wire(value, accepted)
        assert isinstance(value, np.ndarray)
        if value.dtype not in accepted:
            raise ValueError(f"expected an array of {' or '.join(sorted(map(str, accepted)))}, got {value.dtype}")
        return value


def _dtypes(kind: Any) -> frozenset[np.dtype[Any]]:
    """Returns the dtypes of `NDArray[...]` or `Packed[...]`. A class such as `np.floating` means all its dtypes."""
    arguments = get_args(kind)
    scalar: Any = np.generic
    if get_origin(kind) is Packed:
        (scalar,) = arguments
    elif len(arguments) == 2 and get_args(arguments[1]):
        (scalar,) = get_args(arguments[1])
    scalars = get_args(scalar) if get_origin(scalar) in (Union, types.UnionType) else (scalar,)
    if Any in scalars:  # A class itself, from Python 3.11 on.
        return frozenset(DTYPES)
    return frozenset(d for d in DTYPES if any(not isinstance(s, type) or issubclass(d.type, s) for s in scalars))
