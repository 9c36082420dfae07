"""A disk for checkpoints that is slow, or full, for as long as a file beside it says so: `chaos:///folder`."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

SLOW_SECONDS = 0.05
"""Per piece that is written."""

SIGN = "disk-is"
"""File that says it, in the folder above the checkpoints: "slow" or "full"."""


class ChaosDisk(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """The local file system, with its faults. Not derived from it, so that nobody goes around it."""

    protocol = "chaos"
    cachable = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._disk = LocalFileSystem()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(path).removeprefix("chaos://").rstrip("/")

    def ls(self, path: str, detail: bool = True, **_: Any) -> Any:
        return self._disk.ls(self._strip_protocol(path), detail=detail)

    def info(self, path: str, **_: Any) -> Any:
        return self._disk.info(self._strip_protocol(path))

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self._disk.makedirs(self._strip_protocol(path), exist_ok=exist_ok)

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        self._disk.rm(self._strip_protocol(path), recursive=recursive)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        found: bytes = self._disk.cat_file(self._strip_protocol(path), start=start, end=end)
        return found

    def pipe_file(self, path: str, value: bytes, **_: Any) -> None:
        place = self._strip_protocol(path)
        _suffer(place)
        draft = f"{place}.draft"
        self._disk.pipe_file(draft, value)
        os.replace(draft, place)

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        place = self._strip_protocol(path)
        return _Suffering(place) if "w" in mode else self._disk.open(place, mode)


class _Suffering:
    """A file that is being written."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file = open(path, "wb")  # noqa: SIM115  It is closed as this is.

    def write(self, data: Any) -> int:
        _suffer(self._path)
        return self._file.write(data)

    def __enter__(self) -> _Suffering:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _suffer(path: str) -> None:
    if Path(path).name.startswith(".probe-"):
        return  # A run that begins on a full disk is refused, as it should be; what is tried here is one under way.
    for folder in Path(path).parents:
        sign = folder / SIGN
        if sign.exists():
            if sign.read_text() == "full":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            time.sleep(SLOW_SECONDS)
            return


fsspec.register_implementation("chaos", ChaosDisk, clobber=True)
