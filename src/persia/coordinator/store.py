"""What the process of a coordinator leaves to the next one: a directory beside the regions of PSs."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from pathlib import Path

from persia.errors import PersiaError

__all__ = ["CoordinatorStore"]

LOCK_SECONDS = 10.0
RETRY_SECONDS = 0.05

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
        end = time.monotonic() + LOCK_SECONDS  # The process before has ended, or just does.
        while not self._locked():
            if time.monotonic() > end:
                raise PersiaError(
                    f"Another coordinator has had {directory} for {LOCK_SECONDS:g} s: end it first.", path=directory
                )
            time.sleep(RETRY_SECONDS)

    def _locked(self) -> bool:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def path(self, name: str) -> str:
        """Of a file in it."""
        return str(self._directory / name)

    def remove(self) -> None:
        """Nobody comes after this process."""
        shutil.rmtree(self._directory, ignore_errors=True)
        with contextlib.suppress(OSError):  # PSs of the cluster may still be here.
            self._directory.parent.rmdir()
