"""Messages: a small msgpack header, then the buffers of the arrays. `docs/reference/wire.md` specifies them."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import msgspec
import zmq

from persia.errors import WireError
from persia.rpc.array_encoding import Arrays, encode
from persia.rpc.limits import Limits

__all__ = ["VERSION", "Body", "Header", "Kind", "Message", "body", "header_bytes", "parse"]

VERSION = 1

_MAX_SECONDS = 366 * 86400.0
_FIELDS_BYTES = 1024
"""Upper bound on the bytes of a header without its payload."""


_DECODED_BYTES = 128
"""Upper bound on the memory that a byte of msgpack takes once decoded, in bytes. An empty dict is 1 byte encoded and 72
decoded."""


class Kind(enum.IntEnum):
    """The kind of a message."""

    CALL = 1
    NEXT = 2
    CLOSE = 3
    RESULT = 4
    ERROR = 5
    STREAM = 6
    ITEM = 7
    END = 8


class Header(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, gc=False):
    """Header of a message: everything except the arrays.

    Attributes:
        version: version of the wire format.
        kind: kind of the message.
        call: number of the call, chosen by the client; the reply repeats it.
        method: name of the method; empty in replies.
        seconds: seconds until the client gives up, counted from sending; 0 in replies.
        payload: arguments, result or failure as msgpack.
    """

    version: int
    kind: Kind
    call: Annotated[int, msgspec.Meta(ge=0)]
    method: Annotated[str, msgspec.Meta(max_length=128)]
    seconds: Annotated[float, msgspec.Meta(ge=0)]
    payload: msgspec.Raw


class Message(NamedTuple):
    """A received message.

    Attributes:
        header: decoded and checked header; its payload is not decoded.
        frames: bytes of the arrays, in ZeroMQ's memory.
        nbytes: total size in bytes.
    """

    header: Header
    frames: list[zmq.Frame]
    nbytes: int

    @property
    def decoded_bytes(self) -> int:
        """Upper bound on the memory of the message once it is decoded, in bytes."""
        return self.nbytes + _DECODED_BYTES * memoryview(self.header.payload).nbytes


class Body(NamedTuple):
    """Encoded contents of a message.

    Attributes:
        payload: msgpack.
        arrays: arrays that the payload refers to.
        decoded_bytes: upper bound on `Message.decoded_bytes` of the message at its receiver.
    """

    payload: bytes
    arrays: Arrays
    decoded_bytes: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Header)


def body(value: object, limits: Limits) -> Body:
    """Encodes a value to be sent. Detects all errors before anything waits for the message.

    Raises:
        WireError: the value cannot be sent or exceeds a limit; the message names the limit.
    """
    payload, arrays = encode(value, limits.arrays)
    if len(payload) > limits.header_bytes - _FIELDS_BYTES:
        raise WireError(
            f"A message has {len(payload):,} bytes without its arrays, and {limits.header_bytes - _FIELDS_BYTES:,} are "
            "allowed; send numbers as arrays, or send less at a time.",
            bytes=len(payload),
        )
    size = len(payload) + _FIELDS_BYTES + sum([array.nbytes for array in arrays])
    if size > limits.message_bytes:
        raise WireError(
            f"A message has {size:,} bytes, and Limits.message_bytes allows {limits.message_bytes:,}; send less at a "
            "time, or raise the limit on both sides.",
            bytes=size, limit=limits.message_bytes,
        )  # fmt: skip
    return Body(payload, arrays, size + _DECODED_BYTES * len(payload))


def header_bytes(kind: Kind, call: int, method: str, seconds: float, payload: bytes) -> bytes:
    """Encodes the first frame of a message."""
    return _encoder.encode(Header(VERSION, kind, call, method, seconds, msgspec.Raw(payload)))


def parse(frames: Sequence[zmq.Frame], limits: Limits) -> Message:
    """Checks a received message against the limits, and decodes its header.

    Raises:
        WireError: the message has another version, is malformed, or exceeds a limit. Its field `call` is the number
            of the call, if known.
    """
    if not frames:
        raise WireError("A message has no frames.")
    sizes = [len(frame) for frame in frames]
    if sizes[0] > limits.header_bytes:
        raise WireError(f"A message has {sizes[0]:,} bytes of header, and {limits.header_bytes:,} are allowed.")
    try:
        header = _decoder.decode(frames[0].buffer)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(f"A message has no valid header of version {VERSION}: {error}.") from error
    if header.version != VERSION:
        raise WireError(
            f"A message has version {header.version} of the wire format; this process supports {VERSION}. "
            "Install the same version of persia on all hosts.",
            version=header.version, call=header.call,
        )  # fmt: skip
    if not math.isfinite(header.seconds) or header.seconds > _MAX_SECONDS:
        raise WireError(f"Invalid deadline of {header.seconds} seconds in a message.", call=header.call)
    size = sum(sizes)
    if len(frames) > limits.arrays + 1 or size > limits.message_bytes:
        raise WireError(
            f"A message has {len(frames) - 1} arrays and {size:,} bytes; {limits.arrays} and {limits.message_bytes:,} "
            "are allowed here. Give both sides the same Limits.",
            call=header.call,
        )
    return Message(header, list(frames[1:]), size)
