"""A log of the state of the token scheduler: a snapshot, and the changes after it."""

from __future__ import annotations

import errno
import os
import struct
import weakref
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from persia.coordinator.store import retry_full
from persia.errors import PersiaError
from persia.types.decoding import decode_hook

__all__ = ["StateLog"]

S = TypeVar("S")
C = TypeVar("C")

LONGEST = 1 << 20
"""Bytes of changes after which the next write is a snapshot."""

FRAME = struct.Struct("<II")
"""Before each record: its length and its CRC-32."""


class StateLog(Generic[S, C]):
    """A file with a snapshot of a state, and the changes since. For one thread at a time.

    A call appends a change of a hundred bytes or two, however large the state is. After `LONGEST` bytes, the file is
    replaced by a new snapshot. As in `StateFile`, the state survives the process but not a loss of power.

    Args:
        path: path of the file; None to save nothing.
        kind: type of the state.
        change: type of a change.
        apply: applies a change to a state.
    """

    def __init__(self, path: str | None, kind: type[S], change: type[C], apply: Callable[[S, C], None]) -> None:
        self._path = path
        self._kind = kind
        self._change = change
        self._apply = apply
        self._encoder = msgspec.msgpack.Encoder()
        self._file: int | None = None
        """Descriptor of the file for changes; None if the next write must be a snapshot."""
        self._close: Callable[[], object] = lambda: None
        self._end = 0
        """Length of the file up to its last complete record."""
        self._limit = 0

    def load(self) -> S | None:
        """Returns the last saved state, or None.

        Raises:
            PersiaError: the file is damaged.
        """
        if self._path is None or not os.path.exists(self._path):
            return None
        try:
            records = _records(Path(self._path).read_bytes())
            if (snapshot := next(records, None)) is None:
                raise ValueError("its snapshot is incomplete, or of another version of Persia")
            state = msgspec.msgpack.decode(snapshot, type=self._kind, dec_hook=decode_hook)
            for record in records:
                self._apply(state, msgspec.msgpack.decode(record, type=self._change, dec_hook=decode_hook))
        except (msgspec.MsgspecError, ValueError) as error:
            raise PersiaError(
                f"{self._path} is not the state of a coordinator: {error}. Remove it and resume from a checkpoint.",
                path=self._path,
            ) from error
        return state

    def save(self, state: S) -> None:
        """Replaces the file by a snapshot. Waits for free space if the file system is full.

        Raises:
            PersiaError: the file cannot be written.
        """
        if self._path is None:
            return
        path, data = self._path, _framed(self._encoder.encode(state))

        def write() -> None:
            with open(f"{path}.new", "wb") as file:
                file.write(data)
            os.replace(f"{path}.new", path)

        self._file = None
        retry_full(path, write)
        self._close()
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._close = weakref.finalize(self, os.close, self._file)
        self._end = len(data)
        self._limit = self._end + LONGEST

    def append(self, change: C, state: S) -> None:
        """Saves a change; or the whole state, which includes the change, if the log is long or does not match.

        Raises:
            PersiaError: the file cannot be written.
        """
        if self._path is None:
            return
        if self._file is None or self._end > self._limit:
            self.save(state)
            return
        path, descriptor, end = self._path, self._file, self._end
        data = _framed(self._encoder.encode(change))

        def write() -> None:
            if os.write(descriptor, data) < len(data):
                os.ftruncate(descriptor, end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        self._file = None  # If the write fails, the log lacks this change.
        retry_full(path, write)
        self._file = descriptor
        self._end = end + len(data)

    def catch_up(self, state: S) -> None:
        """Saves the state if the last write has failed, so that no answer depends on a state that is not saved."""
        if self._file is None:
            self.save(state)


def _framed(record: bytes) -> bytes:
    return FRAME.pack(len(record), zlib.crc32(record)) + record


def _records(data: bytes) -> Iterator[bytes]:
    """Yields the records. The last one may be incomplete: its process died, and did not answer the call.

    Raises:
        ValueError: a record is damaged.
    """
    at = 0
    while at + FRAME.size <= len(data):
        length, check = FRAME.unpack_from(data, at)
        record = data[at + FRAME.size : at + FRAME.size + length]
        at += FRAME.size + length
        if at > len(data):
            return
        if zlib.crc32(record) != check:
            raise ValueError(f"wrong checksum of the record that ends at byte {at}")
        yield record
