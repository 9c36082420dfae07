"""What the process of a coordinator leaves to the next one: a directory beside the regions of PSs."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from persia.errors import PersiaError
from persia.retry import Backoff, Deadline, retry
from persia.types.decoding import decode_hook

__all__ = ["CoordinatorStore", "StateFile"]

S = TypeVar("S")

ROOM_SECONDS = 30.0
"""How long a file system may be full."""


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
            return msgspec.msgpack.decode(data, type=self._kind, dec_hook=decode_hook)
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
            retry(write, transient=full, deadline=Deadline(ROOM_SECONDS))
        except OSError as error:
            raise PersiaError(
                f"The state of the coordinator cannot be written to {path}: {error.strerror}. Make room there, or "
                "choose another directory for `regions`.",
                path=path,
            ) from error


LOCK_SECONDS = 10.0
"""How long the process before may take to end."""

LOCK = "000-coordinator.0"
"""Named like a region, so that `persia cluster regions` finds it, and locked like one while it is in use."""


class CoordinatorStore:
    """The directory of the coordinator of one cluster. In use until the process ends.

    Args:
        directory: made when needed.

    Raises:
        PersiaError: another process has it, and does not end.
    """

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.open(self._directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            retry(
                lambda: fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB),
                transient=lambda error: isinstance(error, BlockingIOError),
                deadline=Deadline(LOCK_SECONDS),
                backoff=Backoff(0.05, 0.5),
            )
        except BlockingIOError as error:
            raise PersiaError(
                f"Another coordinator has had {directory} for {LOCK_SECONDS:g} s: end it first.", path=directory
            ) from error

    def path(self, name: str) -> str:
        """Of a file in it."""
        return str(self._directory / name)

    def remove(self) -> None:
        """Nobody comes after this process."""
        shutil.rmtree(self._directory, ignore_errors=True)
        with contextlib.suppress(OSError):  # PSs of the cluster may still be here.
            self._directory.parent.rmdir()
