"""Stores state that survives the process of a coordinator, in a directory next to the regions of PSs."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from persia.errors import PersiaError
from persia.retry import Backoff, Deadline, retry
from persia.types.decoding import decode_hook

__all__ = ["CoordinatorStore", "StateFile", "retry_full"]

S = TypeVar("S")

FULL_SECONDS = 30.0
"""Maximum number of seconds to wait for free space on a full file system."""


class StateFile(Generic[S]):
    """A file with one state, replaced atomically. For one thread at a time.

    The state survives the process but not a loss of power: the file is not flushed to disk.

    Args:
        path: path of the file; None to save nothing.
        kind: type of the state.
    """

    def __init__(self, path: str | None, kind: type[S]) -> None:
        self._path = path
        self._kind = kind

    def load(self) -> S | None:
        """Returns the last saved state, or None.

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
                f"{self._path} is not the state of a coordinator: {error}. Remove it and resume from a checkpoint.",
                path=self._path,
            ) from error

    def save(self, state: S) -> None:
        """Replaces the file. Waits for free space if the file system is full.

        Raises:
            PersiaError: the file cannot be written.
        """
        if self._path is None:
            return
        path, data = self._path, msgspec.msgpack.encode(state)

        def write() -> None:
            with open(f"{path}.new", "wb") as file:
                file.write(data)
            os.replace(f"{path}.new", path)

        retry_full(path, write)


def retry_full(path: str, write: Callable[[], None]) -> None:
    """Writes to a file; again, for at most `FULL_SECONDS`, while the file system is full.

    Raises:
        PersiaError: the file cannot be written.
    """

    def full(error: Exception) -> bool:
        return isinstance(error, OSError) and error.errno == errno.ENOSPC

    try:
        retry(write, transient=full, deadline=Deadline(FULL_SECONDS))
    except OSError as error:
        raise PersiaError(
            f"The state of the coordinator cannot be written to {path}: {error.strerror}. Free space there, or "
            "choose another directory for `regions`.",
            path=path,
        ) from error


LOCK_SECONDS = 10.0
"""Maximum number of seconds to wait for the previous process to end."""

LOCK = "000-coordinator.0"
"""Name of the lock file: a region's, so that `persia cluster regions` finds the directory."""


class CoordinatorStore:
    """The directory of the coordinator of one cluster, locked until the process ends.

    Args:
        directory: path of the directory, which is created if missing.

    Raises:
        PersiaError: another process holds the lock and does not end.
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
                f"Another coordinator holds {directory} after {LOCK_SECONDS:g} s. End that process first.",
                path=directory,
            ) from error

    def path(self, name: str) -> str:
        """Returns the path of a file in the directory."""
        return str(self._directory / name)

    def remove(self) -> None:
        """Removes the directory."""
        shutil.rmtree(self._directory, ignore_errors=True)
        with contextlib.suppress(OSError):  # It may hold regions of PSs.
            self._directory.parent.rmdir()
