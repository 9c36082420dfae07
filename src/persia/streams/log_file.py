"""A file of entries that are appended one by one, and read again after a restart of the process."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

import msgspec

from persia.errors import PersiaError

__all__ = ["LogFile"]

E = TypeVar("E")

LENGTH_BYTES = 4


class LogFile(Generic[E]):
    """Entries in a file, each with its length before it. They survive the process, but not a loss of power.

    For one thread at a time.

    Args:
        path: path of the file; None to keep nothing.
        kind: type of an entry.
    """

    def __init__(self, path: str | None, kind: type[E]) -> None:
        self._path = path
        self._decoder = msgspec.msgpack.Decoder(kind)

    def load(self) -> Iterator[E]:
        """Yields the entries of the process before. An entry that it did not write to its end is dropped.

        Raises:
            PersiaError: the file is damaged.
        """
        if self._path is None or not os.path.exists(self._path):
            return
        with open(self._path, "rb") as file:
            data = memoryview(file.read())
        at = 0
        while at + LENGTH_BYTES <= len(data):
            end = at + LENGTH_BYTES + int.from_bytes(data[at : at + LENGTH_BYTES], "big")
            if end > len(data):
                break
            try:
                yield self._decoder.decode(data[at + LENGTH_BYTES : end])
            except msgspec.MsgspecError as error:
                raise PersiaError(
                    f"{self._path}: not the record of a stream: {error}. Remove it and resume from a checkpoint.",
                    path=self._path,
                ) from error
            at = end

    def append(self, entry: E) -> None:
        """Adds an entry.

        Raises:
            PersiaError: it cannot be written.
        """
        if self._path is not None:
            self._write(self._path, "ab", [entry])

    def replace(self, entries: Iterable[E]) -> None:
        """Replaces all entries, atomically.

        Raises:
            PersiaError: they cannot be written.
        """
        if self._path is not None:
            self._write(f"{self._path}.new", "wb", entries)
            os.replace(f"{self._path}.new", self._path)

    def _write(self, path: str, mode: str, entries: Iterable[E]) -> None:
        encoded = [msgspec.msgpack.encode(entry) for entry in entries]
        try:
            with open(path, mode) as file:
                file.write(b"".join(len(entry).to_bytes(LENGTH_BYTES, "big") + entry for entry in encoded))
        except OSError as error:
            raise PersiaError(
                f"The record of the stream cannot be written to {self._path}: {error.strerror}. Free space there, or "
                "choose another directory for `regions`.",
                path=self._path,
            ) from error
