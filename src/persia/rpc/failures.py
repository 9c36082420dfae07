"""Sends errors between processes as data, never as code."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from typing import Any

import msgspec

from persia.errors import PersiaError, RemoteError, WireError
from persia.rpc.array_encoding import encode
from persia.rpc.limits import Limits
from persia.rpc.messages import Body, body

__all__ = ["Failure", "failure", "to_error"]

_MAX_TEXT = 16_384
_MIN_TEXT = 512


class Failure(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """Wire form of an error.

    Attributes:
        kind: module and name of the class.
        message: text of the error.
        fields: fields of a PersiaError; values that cannot be sent are sent as text.
        traceback: traceback as text.
    """

    kind: str
    message: str
    fields: dict[str, Any]
    traceback: str


def failure(error: BaseException, limits: Limits) -> Body:
    """Encodes an error that a method raised. Never raises; parts that cannot be encoded are left out."""
    for most in (_MAX_TEXT, _MIN_TEXT):
        with contextlib.suppress(Exception):  # The error's own code may fail, or its text may be too long.
            return body(_raised(error, most), limits)
    return body(Failure(_text(type(error).__qualname__, _MIN_TEXT), "it cannot be described", {}, ""), limits)


def _raised(error: BaseException, most: int) -> Failure:
    """Makes the wire form of an error, with texts of at most `most` bytes."""
    kind = f"{type(error).__module__}.{type(error).__qualname__}"
    trace = _text("".join(traceback.format_exception(error))[-most:], most)
    if isinstance(error, PersiaError):
        fields = {k: _plain(v) for k, v in error.fields.items()} if most == _MAX_TEXT else {}
        return Failure(kind, _text(error.message, most), fields, trace)
    return Failure(kind, _text(str(error), most), {}, trace)


def to_error(failure: Failure, *, peer: str, address: str, operation: str) -> PersiaError:
    """Restores an error: as its own class if that is a known PersiaError, else as a RemoteError."""
    error: PersiaError | None = None
    for cls in _subclasses(PersiaError):
        if f"{cls.__module__}.{cls.__qualname__}" == failure.kind:
            try:
                error = cls(failure.message, **failure.fields)
            except Exception:  # A class with its own constructor.
                break
    if error is None:
        error = RemoteError(
            f"{peer} at {address} failed in {operation}: {failure.kind}: {failure.message}. "
            "The note has its traceback; see its log for more.",
            kind=failure.kind, peer=peer, address=address, operation=operation,
        )  # fmt: skip
    error.add_note(f"Raised by {peer} at {address} in {operation}:\n{failure.traceback}")
    return error


def _text(text: str, most: int) -> str:
    """Truncates a text, and replaces lone surrogates (of file names), which UTF-8 cannot encode."""
    return text.encode("utf-8", "backslashreplace")[:most].decode("utf-8", "ignore")


def _plain(value: object) -> object:
    try:
        payload, arrays = encode(value, most_arrays=0)
    except WireError:
        return _text(repr(value), _MAX_TEXT)
    assert not arrays
    return value if len(payload) <= _MAX_TEXT else _text(repr(value), _MAX_TEXT)


def _subclasses(cls: type[PersiaError]) -> Iterator[type[PersiaError]]:
    yield cls
    for child in cls.__subclasses__():
        yield from _subclasses(child)
