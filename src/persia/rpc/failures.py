"""Errors that cross processes: as data, never as code."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from typing import Any

import msgspec

from persia.errors import PersiaError, RemoteError, WireError
from persia.rpc.arrays import encode
from persia.rpc.limits import Limits
from persia.rpc.messages import Body, body

__all__ = ["Failure", "failure", "to_error"]

_MAX_TEXT = 16_384
_MIN_TEXT = 512


class Failure(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """An error as it is sent.

    Attributes:
        kind: module and name of the class.
        message: what it said.
        fields: of a PersiaError; what cannot be sent is sent as text.
        traceback: text, for people.
    """

    kind: str
    message: str
    fields: dict[str, Any]
    traceback: str


def failure(error: BaseException, limits: Limits) -> Body:
    """An error that a method raised, to be sent. Never raises: what cannot be said is left out."""
    for most in (_MAX_TEXT, _MIN_TEXT):
        with contextlib.suppress(Exception):  # The error's own code may fail, or there is too much of it.
            return body(_raised(error, most), limits)
    return body(Failure(_text(type(error).__qualname__, _MIN_TEXT), "it cannot be described", {}, ""), limits)


def _raised(error: BaseException, most: int) -> Failure:
    """With texts of so many bytes at most."""
    kind = f"{type(error).__module__}.{type(error).__qualname__}"
    trace = _text("".join(traceback.format_exception(error))[-most:], most)
    if isinstance(error, PersiaError):
        fields = {k: _plain(v) for k, v in error.fields.items()} if most == _MAX_TEXT else {}
        return Failure(kind, _text(error.message, most), fields, trace)
    return Failure(kind, _text(str(error), most), {}, trace)


def to_error(failure: Failure, *, peer: str, address: str, operation: str) -> PersiaError:
    """The error to raise: of its own class if that is a PersiaError known here, else a RemoteError."""
    error: PersiaError | None = None
    for cls in _subclasses(PersiaError):
        if f"{cls.__module__}.{cls.__qualname__}" == failure.kind:
            try:
                error = cls(failure.message, **failure.fields)
            except Exception:  # A class with a constructor of its own.
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
    """Cut, and without lone surrogates, which file names bring along and UTF-8 has no bytes for."""
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
