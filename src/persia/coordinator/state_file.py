"""A file that a small state is kept in, so that the next process goes on from it."""

from __future__ import annotations

import errno
import os
from typing import Generic, TypeVar

import msgspec

from persia.errors import PersiaError
from persia.retry import retry

__all__ = ["StateFile"]

S = TypeVar("S")

ROOM_SECONDS = 30.0
"""How long a file system may be full."""

RETRY_SECONDS = 0.1


class StateFile(Generic[S]):
    """Replaced as a whole: who is killed while it saves leaves the state of before. For one thread at a time.

    It survives its process, not a loss of power: it is not flushed to a disk.

    Args:
        path: of the file; None to keep nothing.
        kind: of the state.
    """

    def __init__(self, path: str | None, kind: type[S]) -> None:
        self._path = path
        self._kind = kind

    def load(self) -> S | None:
        """The state that was saved last, if any.

        Raises:
            PersiaError: the file is damaged.
        """
        if self._path is None or not os.path.exists(self._path):
            return None
        with open(self._path, "rb") as file:
            data = file.read()
        try:
            return msgspec.msgpack.decode(data, type=self._kind)
        except msgspec.MsgspecError as error:
            raise PersiaError(
                f"{self._path} is no state of a coordinator: {error}. Remove it, and go on from the last checkpoint.",
                path=self._path,
            ) from error

    def save(self, state: S) -> None:
        """Replaces the file. Waits for room where there is none.

        Raises:
            PersiaError: it cannot be written.
        """
        if self._path is None:
            return
        path, data = self._path, msgspec.msgpack.encode(state)

        def write() -> None:
            with open(f"{path}.new", "wb") as file:
                file.write(data)
            os.replace(f"{path}.new", path)

        def full(error: Exception) -> bool:
            return isinstance(error, OSError) and error.errno == errno.ENOSPC

        try:
            retry(write, full, ROOM_SECONDS, RETRY_SECONDS)
        except OSError as error:
            raise PersiaError(
                f"The state of the coordinator cannot be written to {path}: {error.strerror}. Make room there, or "
                "choose another directory for `regions`.",
                path=path,
            ) from error
