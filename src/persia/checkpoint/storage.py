"""The few things a checkpoint needs of a file system, local or remote (fsspec), with errors that name path and remedy.

On local disks everything is synced: files, and the directories that hold them. Object stores make an object visible
as a whole when its upload ends, which is all that is asked of them.
"""

from __future__ import annotations

import errno
import importlib
import os
import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import numpy as np
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from persia.errors import CheckpointError, MissingExtraError

__all__ = ["Storage", "ahead", "crc32"]

_core: Any = importlib.import_module("persia._core").checksum


def crc32(data: memoryview, crc: int = 0) -> int:
    """CRC-32 of contiguous bytes, behind those whose checksum is `crc`. Blocks; other threads run meanwhile."""
    return int(_core.crc32(data, crc))


SYNC_AT_ONCE = 1 << 20
SLICE = 1 << 20  # written or read, and checksummed, while it is in the processor's cache
OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"}
"""They have no directories: making one would make a bucket, of a name that somebody has misspelt."""

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class Storage:
    """A directory of a file system. Paths are relative to it, with forward slashes.

    Args:
        url: path, or any URL that fsspec knows.

    Attributes:
        between: called after each slice of what is written, so that a writer can rest.

    Raises:
        MissingExtraError: the file system of the URL is not installed.
        CheckpointError: the URL is not understood. (All other methods too, for whatever their file system raises.)
    """

    def __init__(self, url: str | os.PathLike[str]) -> None:
        self.url = os.fspath(url)
        if not self.url or "\0" in self.url:
            raise CheckpointError(
                f"{self.url!r} is not a directory for checkpoints; give a path or URL.", path=self.url
            )
        try:
            fs, root = url_to_fs(self.url)
        except ImportError as error:
            extra = "persia[s3]" if self.url.startswith("s3") else "the package that it names"
            raise MissingExtraError(
                f"{self.url} needs a package: {error}. pip install {extra}", path=self.url
            ) from None
        except Exception as error:
            raise CheckpointError(
                f"{self.url!r} is no path or URL of a file system: {error}.", path=self.url
            ) from error
        self._fs: Any = fs
        self._root: str = root.rstrip("/") or root
        self._local = isinstance(fs, LocalFileSystem)
        protocols = {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
        self._directories = protocols.isdisjoint(OBJECT_STORES)
        self._made: set[str] = set()
        self._changed: set[str] = set()  # directories to be synced
        self._unsynced: list[str] = []
        self.between: Callable[[], object] = lambda: None
        fs.invalidate_cache()

    def full(self, path: str = "") -> str:
        """The path that the file system, and messages, use."""
        return f"{self._root.rstrip('/')}/{path}" if path else self._root

    def names(self, path: str = "") -> list[str]:
        """Names in a directory, sorted; none if it does not exist."""
        with _guard("list", self.full(path)):
            try:
                return sorted(
                    str(name).rstrip("/").rpartition("/")[2] for name in self._fs.ls(self.full(path), detail=False)
                )
            except (FileNotFoundError, NotADirectoryError):
                return []

    def size(self, path: str) -> int | None:
        """Length of a regular file in bytes; None if there is none."""
        with _guard("look up", self.full(path)):
            try:
                info = self._fs.info(self.full(path))
            except (FileNotFoundError, NotADirectoryError):
                return None
        return int(info["size"]) if info["type"] == "file" and info.get("size") is not None else None

    def head(self, path: str, begin: int, end: int) -> bytes:
        """The bytes [begin, end) of a file, fewer where it ends earlier."""
        with _guard("read", self.full(path)):
            return bytes(self._fs.cat_file(self.full(path), start=begin, end=end))

    def load(self, path: str, size: int) -> tuple[memoryview, int]:
        """A file of `size` bytes in fresh, writable memory, and its CRC-32."""
        crc = 0
        with _guard("read", self.full(path)):
            if not self._local:
                data = memoryview(bytearray(self._fs.cat_file(self.full(path))))
                crc = crc32(data)
                done = len(data)
            else:
                data = np.empty(size, np.uint8).data if size else memoryview(bytearray())
                done = 0
                # Linux reads ahead by itself; told to (POSIX_FADV_WILLNEED), it takes a quarter more processor time.
                with open(self.full(path), "rb", buffering=0) as file:
                    while done < size and (count := file.readinto(data[done : done + SLICE])):
                        crc = crc32(data[done : done + count], crc)
                        done += count
        if done != size:
            raise CheckpointError(f"{self.full(path)} is truncated: {done} of {size} bytes.", path=self.full(path))
        return data, crc

    def write(self, path: str, buffers: Iterable[memoryview]) -> tuple[int, int]:
        """Writes a new file; returns its length and CRC-32. Large files are synced at once, others by `sync`."""
        size = crc = 0
        with _guard("write", self.full(path)):
            self._make_parent(path)
            with self._fs.open(self.full(path), "wb") as file:
                for piece in _slices(buffers):
                    crc = crc32(piece, crc)
                    size += len(piece)
                    file.write(piece)
                    self.between()
                if self._local and size >= SYNC_AT_ONCE:
                    file.flush()
                    os.fsync(file.fileno())
            if self._local and size < SYNC_AT_ONCE:
                self._unsynced.append(self.full(path))
        return size, crc

    def put(self, path: str, data: bytes) -> None:
        """Writes or replaces a small file so that every reader, and a crash, sees the old or the new one."""
        if not self._local:
            with _guard("write", self.full(path)):
                self._fs.pipe_file(self.full(path), data)
            return
        temporary = f"{path}.tmp"
        try:
            self.write(temporary, [memoryview(data)])
            self.sync()
            with _guard("write", self.full(path)):
                os.replace(self.full(temporary), self.full(path))
                self._changed.add(self.full(path).rpartition("/")[0] or "/")
        except CheckpointError:
            with suppress(OSError):
                os.unlink(self.full(temporary))
            raise
        self.sync()

    def sync(self) -> None:
        """Makes all files written so far, and the entries of their directories, survive a power cut (local disks)."""
        with ThreadPoolExecutor(16) as pool:  # a disk syncs many small files in the time of one
            list(pool.map(_sync, self._unsynced))
        self._unsynced.clear()
        for directory in sorted(self._changed, reverse=True):
            _sync(directory)
        self._changed.clear()

    def remove(self, path: str) -> None:
        """Deletes a file, or a directory with all it holds; nothing happens if there is none."""
        with _guard("remove", self.full(path)), suppress(FileNotFoundError):
            self._fs.rm(self.full(path), recursive=True)

    def _make_parent(self, path: str) -> None:
        parent = self.full(path).rpartition("/")[0] or "/"
        if self._local:
            self._changed.add(parent)
        if parent in self._made or not self._directories:
            return
        missing = parent
        while self._local and not os.path.isdir(missing):
            missing = missing.rpartition("/")[0] or "/"
            self._changed.add(missing)
        self._fs.makedirs(parent, exist_ok=True)
        self._made.add(parent)


def _slices(buffers: Iterable[memoryview]) -> Iterator[memoryview]:
    for buffer in buffers:
        for begin in range(0, len(buffer), SLICE):
            yield buffer[begin : begin + SLICE]


def _sync(path: str) -> None:
    """Syncs a file or directory of a local disk."""
    with _guard("sync", path):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def _guard(action: str, path: str) -> Iterator[None]:
    """Whatever a file system raises becomes a CheckpointError; backends raise all kinds of things."""
    try:
        yield
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise CheckpointError(f"Cannot {action} {path}: it does not exist.", path=path) from None
    except Exception as error:
        code = getattr(error, "errno", None)
        remedy = "Check the path, its permissions and the connection, then try again."
        if code in _FULL:
            remedy = "The disk or quota is full: free space there or choose another directory, then save again."
        raise CheckpointError(
            f"Cannot {action} {path}: {error}. {remedy} Older checkpoints remain valid.", path=path, errno=code
        ) from error


_T = TypeVar("_T")


def ahead(items: Iterator[_T]) -> Generator[_T, None, None]:
    """The same items; the next one is made by another thread while this one is used."""
    done = object()
    handed: queue.Queue[Any] = queue.Queue(1)
    room = threading.Semaphore(0)  # so that at most two items are in memory
    stopped = threading.Event()
    failure: list[BaseException] = []

    def run() -> None:
        try:
            for item in items:
                handed.put(item)
                del item
                room.acquire()
                if stopped.is_set():
                    return
        except BaseException as error:
            failure.append(error)
        finally:
            handed.put(done)

    thread = threading.Thread(target=run, name="persia-checkpoint-rows", daemon=True)
    thread.start()
    try:
        while (item := handed.get()) is not done:
            room.release()
            yield item
            del item
    finally:
        stopped.set()
        room.release()
        while thread.is_alive():  # It may be about to hand over one more, or the end.
            with suppress(queue.Empty):
                handed.get_nowait()
            thread.join(0.01)
    if failure:
        raise failure[0]
