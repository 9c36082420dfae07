"""A local directory behind a link of this process: what its file system reads and writes takes as long as on a network.

Each process has a link of its own, as each host has, and the directory itself takes no time.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

__all__ = ["Link", "connect"]


def connect(protocol: str, bytes_per_second: float) -> None:
    """Lets URLs of a protocol lead to local paths through a link of this process, in each direction at this rate."""
    names = {"protocol": protocol, "up": Direction(bytes_per_second), "down": Direction(bytes_per_second)}
    fsspec.register_implementation(protocol, type("LinkOfThisProcess", (Link,), names), clobber=True)


class Direction:
    """One direction of a link. Thread-safe.

    Args:
        bytes_per_second: its rate.
    """

    def __init__(self, bytes_per_second: float) -> None:
        self._seconds = 1 / bytes_per_second
        self._lock = threading.Lock()
        self._free = 0.0

    def carry(self, count: int) -> None:
        """Blocks for as long as these bytes take, after those that are on their way."""
        with self._lock:
            self._free = max(self._free, time.perf_counter()) + count * self._seconds
            until = self._free
        time.sleep(max(0.0, until - time.perf_counter()))


class Link(fsspec.AbstractFileSystem):
    """A local directory behind a link; made by `connect`."""

    cachable = False
    up: Direction
    down: Direction

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._local = LocalFileSystem()

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        found: list[Any] = self._local.ls(path, detail=detail)
        return found

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        found: dict[str, Any] = self._local.info(path)
        return found

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self._local.makedirs(path, exist_ok=exist_ok)

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        self._local.rm(path, recursive=recursive)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        data: bytes = self._local.cat_file(path, start=start, end=end)
        self.down.carry(len(data))
        return data

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        self.up.carry(len(value))
        self._local.pipe_file(path, value)

    def _open(self, path: str, mode: str = "rb", *_: Any, **__: Any) -> Any:
        assert mode == "wb", "files are read whole"
        return _Upload(self._local.open(path, mode), self.up)


class _Upload:
    def __init__(self, file: Any, up: Direction) -> None:
        self._file = file
        self._up = up

    def write(self, data: Any) -> None:
        self._up.carry(len(data))
        self._file.write(data)

    def __enter__(self) -> _Upload:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
