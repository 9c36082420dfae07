"""Chooses the codec of a request by its Content-Type, and the codec of the answer by its Accept header."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from persia.serve.http.codecs.arrow_codec import ArrowCodec
from persia.serve.http.codecs.codec import Codec
from persia.serve.http.codecs.json_codec import JsonCodec
from persia.serve.http.codecs.messages import MessageCodec
from persia.serve.http.codecs.msgpack_codec import MsgpackCodec

__all__ = ["CODECS", "MESSAGE_CODECS", "accepted", "codec_of"]

C = TypeVar("C", bound=Codec)

MESSAGE_CODECS: tuple[MessageCodec, ...] = (JsonCodec(), MsgpackCodec())
"""Codecs for the requests of all routes."""

CODECS: tuple[Codec, ...] = (*MESSAGE_CODECS, ArrowCodec())
"""Codecs for samples as columns, and for all answers."""


def codec_of(header: str | None, codecs: Sequence[C]) -> C | None:
    """Returns the codec of a body by its Content-Type; None if none of these decodes it."""
    name = (header or "").partition(";")[0].strip().lower()
    return next((codec for codec in codecs if name in codec.names), None)


def accepted(header: str | None, default: Codec) -> Codec | None:
    """Returns the codec that an Accept header prefers; None if it accepts none.

    Args:
        header: header of the request; None or empty accepts all.
        default: codec for a header that accepts all: the codec of the request.
    """
    ranges = []
    for position, part in enumerate((header or "*/*").split(",")):
        name, *parameters = (each.strip().lower() for each in part.split(";"))
        quality = next((p[2:] for p in parameters if p.startswith("q=")), "1")
        try:
            weight = float(quality)
        except ValueError:
            weight = 0.0
        if weight > 0:
            ranges.append((-weight, position, name))
    for _, _, name in sorted(ranges):
        if name in ("*/*", "application/*"):
            return default
        if (codec := codec_of(name, CODECS)) is not None:
            return codec
    return None
