"""Errors that cross processes: as data, never as code."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from typing import Any

import msgspec

from persia.errors import PersiaError, RemoteError, WireError
from persia.rpc.arrays import encode

__all__ = ["Failure", "raised", "to_error"]

_MAX_TEXT = 16_384


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


def raised(error: BaseException) -> Failure:
    """An error that a method raised, to be sent; texts are cut to 16 KiB."""
    kind = f"{type(error).__module__}.{type(error).__qualname__}"
    trace = _text("".join(traceback.format_exception(error))[-_MAX_TEXT:])
    if isinstance(error, PersiaError):
        fields = {k: _plain(v) for k, v in error.fields.items()}
        return Failure(kind, _text(error.message[:_MAX_TEXT]), fields, trace)
    return Failure(kind, _text(str(error)[:_MAX_TEXT]), {}, trace)


def to_error(failure: Failure, *, peer: str, address: str, operation: str) -> PersiaError:
    """The error to raise: of its own class if that is a PersiaError known here, else a RemoteError."""
    error: PersiaError | None = None
    for cls in _subclasses(PersiaError):
        if f"{cls.__module__}.{cls.__qualname__}" == failure.kind:
            try:
                error = cls(failure.message, **failure.fields)
            except TypeError:  # A class with a constructor of its own.
                break
    if error is None:
        error = RemoteError(
            f"{peer} at {address} failed in {operation}: {failure.kind}: {failure.message}. "
            "The note has its traceback; see its log for more.",
            kind=failure.kind, peer=peer, address=address, operation=operation,
        )  # fmt: skip
    error.add_note(f"Raised by {peer} at {address} in {operation}:\n{failure.traceback}")
    return error


def _text(text: str) -> str:
    """Without lone surrogates, which file names bring along and UTF-8 has no bytes for."""
    return text.encode("utf-8", "backslashreplace").decode()


def _plain(value: object) -> object:
    try:
        payload, arrays = encode(value, most_arrays=0)
    except WireError:
        return repr(value)[:_MAX_TEXT]
    assert not arrays
    return value if len(payload) <= _MAX_TEXT else repr(value)[:_MAX_TEXT]


def _subclasses(cls: type[PersiaError]) -> Iterator[type[PersiaError]]:
    yield cls
    for child in cls.__subclasses__():
        yield from _subclasses(child)
