"""One message: a small msgpack header, then the buffers of its arrays. `docs/reference/wire.md` specifies it."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import msgspec
import zmq

from persia.errors import WireError
from persia.rpc.limits import Limits

__all__ = ["VERSION", "Header", "Kind", "Message", "header_bytes", "parse"]

VERSION = 1

_MAX_SECONDS = 366 * 86400.0


class Kind(enum.IntEnum):
    """What a message is."""

    CALL = 1
    NEXT = 2
    CLOSE = 3
    RESULT = 4
    ERROR = 5
    STREAM = 6
    ITEM = 7
    END = 8


class Header(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, gc=False):
    """Everything but the arrays.

    Attributes:
        version: of the wire format.
        kind: what the message is.
        call: number that the client chose; the reply repeats it.
        method: name; empty in replies.
        seconds: left until the client gives up, when the message was sent; 0 in replies.
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
        header: decoded and checked; the payload is not.
        frames: bytes of the arrays, where ZeroMQ put them.
        nbytes: size of all.
    """

    header: Header
    frames: list[zmq.Frame]
    nbytes: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Header)


def header_bytes(kind: Kind, call: int, method: str, seconds: float, payload: bytes, limits: Limits) -> bytes:
    """The first frame of a message.

    Raises:
        WireError: it is larger than allowed.
    """
    if len(payload) > limits.header_bytes - 256:
        raise WireError(
            f"A message has {len(payload):,} bytes beside its arrays, and {limits.header_bytes - 256:,} are allowed; "
            "send numbers as arrays, or less at a time.",
            bytes=len(payload),
        )
    return _encoder.encode(Header(VERSION, kind, call, method, seconds, msgspec.Raw(payload)))


def parse(frames: Sequence[zmq.Frame], limits: Limits) -> Message:
    """Checks a received message against the limits, and decodes its header.

    Raises:
        WireError: it is no message of this version, or exceeds a limit.
    """
    if not frames or len(frames) > limits.arrays + 1:
        raise WireError(f"A message has {len(frames)} frames, and 1 to {limits.arrays + 1} are allowed.")
    sizes = [len(frame) for frame in frames]
    if sizes[0] > limits.header_bytes or sum(sizes) > limits.message_bytes:
        raise WireError(f"A message has {sizes[0]:,} bytes of header and {sum(sizes):,} in all: more than allowed.")
    try:
        header = _decoder.decode(frames[0].buffer)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(f"A message has no valid header of version {VERSION}: {error}.") from error
    if header.version != VERSION:
        raise WireError(
            f"A message is of version {header.version} of the wire format, this process speaks {VERSION}; "
            "install the same persia everywhere.",
            version=header.version,
        )
    if not math.isfinite(header.seconds) or header.seconds > _MAX_SECONDS:
        raise WireError(f"A message has a deadline in {header.seconds} seconds, which is none.")
    return Message(header, list(frames[1:]), sum(sizes))
