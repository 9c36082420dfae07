"""File-system operations of checkpoints, local or remote (fsspec), with errors that name path and remedy.

On local disks, files and their directories are synced. Object stores must make an object visible only once its upload
is complete.
"""

from __future__ import annotations

import errno
import importlib
import os
import queue
import secrets
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import numpy as np
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from persia.checks import without_userinfo
from persia.errors import CheckpointError
from persia.filesystems import missing_package

__all__ = ["Storage", "ahead", "crc32"]

_core: Any = importlib.import_module("persia._core").checksum


def crc32(data: memoryview, crc: int = 0) -> int:
    """Returns the CRC-32 of contiguous bytes that follow bytes with checksum `crc`. Releases the GIL."""
    return int(_core.crc32(data, crc))


SYNC_AT_ONCE = 1 << 20
SLICE = 1 << 20  # Small enough to be checksummed while it is in the processor's cache.
OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"}
"""Protocols without directories. Making a directory there would create a bucket, even for a misspelt name."""

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class Storage:
    """A directory of a file system. Paths are relative to it, with forward slashes.

    Args:
        url: path, or any URL that fsspec supports.

    Attributes:
        between: called after each written slice; may sleep to throttle the writer.

    Raises:
        MissingExtraError: the package for the URL's file system is not installed.
        CheckpointError: the URL is invalid. All methods raise it for errors of the file system.
    """

    def __init__(self, url: str | os.PathLike[str]) -> None:
        self.url = os.fspath(url)
        shown = without_userinfo(self.url)
        if not self.url or "\0" in self.url:
            raise CheckpointError(f"{shown!r} is not a directory for checkpoints; give a path or URL.", path=shown)
        try:
            fs, root = url_to_fs(self.url)
        except ImportError as error:
            raise missing_package(shown, error) from None
        except Exception as error:
            raise CheckpointError(
                f"{shown!r} is not a path or URL of a file system: {without_userinfo(str(error))}.", path=shown
            ) from error
        self._fs: Any = fs
        self._root: str = root.rstrip("/") or root
        self._local = isinstance(fs, LocalFileSystem)
        protocols = {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
        self._directories = protocols.isdisjoint(OBJECT_STORES)
        self._created: set[str] = set()
        self._changed: set[str] = set()  # Directories to sync.
        self._unsynced: list[str] = []
        self.between: Callable[[], object] = lambda: None
        fs.invalidate_cache()

    @property
    def address(self) -> str:
        """The path or URL by which other processes open this directory, whatever their working directory.

        A URL may have a password, so messages use `full`.
        """
        return self._root if self._local else self.url

    def refresh(self) -> None:
        """Drops listings that some file systems cache."""
        self._fs.invalidate_cache()

    def full(self, path: str = "") -> str:
        """Returns the full path, as used by the file system and in messages."""
        return f"{self._root.rstrip('/')}/{path}" if path else self._root

    def names(self, path: str = "") -> list[str]:
        """Returns the sorted names in a directory; empty if it does not exist."""
        with _guard("list", self.full(path)):
            try:
                return sorted(
                    str(name).rstrip("/").rpartition("/")[2] for name in self._fs.ls(self.full(path), detail=False)
                )
            except (FileNotFoundError, NotADirectoryError):
                return []

    def sizes(self, path: str) -> dict[str, int]:
        """Returns the lengths of the files in a directory in bytes, by name; empty if it does not exist.

        Files whose length the file system does not list are left out.
        """
        with _guard("list", self.full(path)):
            try:
                infos = self._fs.ls(self.full(path), detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return {}
        return {
            str(info["name"]).rpartition("/")[2]: int(info["size"])
            for info in infos
            if info["type"] == "file" and info.get("size") is not None
        }

    def size(self, path: str) -> int | None:
        """Returns the length of a regular file in bytes; None if it does not exist, or the file system knows none."""
        with _guard("look up", self.full(path)):
            try:
                info = self._fs.info(self.full(path))
            except (FileNotFoundError, NotADirectoryError):
                return None
        return int(info["size"]) if info["type"] == "file" and info.get("size") is not None else None

    def exists(self, path: str) -> bool:
        """Whether there is a file or a directory."""
        with _guard("look up", self.full(path)):
            return bool(self._fs.exists(self.full(path)))

    def head(self, path: str, begin: int, end: int) -> bytes:
        """Reads the bytes [begin, end) of a file, or fewer if the file ends earlier."""
        with _guard("read", self.full(path)):
            return bytes(self._fs.cat_file(self.full(path), start=begin, end=end))

    def load(self, path: str, size: int) -> tuple[memoryview, int]:
        """Reads a file of `size` bytes into new, writable memory; returns it with its CRC-32."""
        crc = 0
        with _guard("read", self.full(path)):
            if not self._local:
                data = memoryview(bytearray(self._fs.cat_file(self.full(path))))
                crc = crc32(data)
                done = len(data)
            else:
                data = np.empty(size, np.uint8).data if size else memoryview(bytearray())
                done = 0
                # Linux reads ahead on its own. POSIX_FADV_WILLNEED costs 25 % more processor time.
                with open(self.full(path), "rb", buffering=0) as file:
                    while done < size and (count := file.readinto(data[done : done + SLICE])):
                        crc = crc32(data[done : done + count], crc)
                        done += count
        if done != size:
            raise CheckpointError(f"{self.full(path)} is truncated: {done} of {size} bytes.", path=self.full(path))
        return data, crc

    def write(self, path: str, buffers: Iterable[memoryview]) -> tuple[int, int]:
        """Writes a new file; returns its length and CRC-32. Syncs large files now, small ones in `sync`."""
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

    def put(self, path: str, data: bytes, *, durable: bool = True) -> None:
        """Writes or replaces a small file atomically: readers see the old or the new one, even after a crash.

        Args:
            path: path of the file.
            data: its contents.
            durable: False for a file that is removed soon: on local disks it is neither synced nor atomic.
        """
        if not self._local or not durable:
            with _guard("write", self.full(path)):
                self._make_parent(path)
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
        """Syncs all files written so far and their directories, so that they survive a power failure (local disks)."""
        with ThreadPoolExecutor(16) as pool:  # A disk syncs many small files in about the time of one.
            list(pool.map(_sync, self._unsynced))
        self._unsynced.clear()
        for directory in sorted(self._changed, reverse=True):
            _sync(directory)
        self._changed.clear()

    def probe(self) -> None:
        """Checks that the directory can be written, by writing and removing a file; creates it if it does not exist."""
        name = f".probe-{secrets.token_hex(8)}"
        self.put(name, b"Temporary file: persia checks that it can write to this directory.\n")
        self.remove(name)

    def remove(self, path: str) -> None:
        """Deletes a file, or a directory and its contents. No-op if there is none."""
        with _guard("remove", self.full(path)), suppress(FileNotFoundError):
            self._fs.rm(self.full(path), recursive=True)

    def _make_parent(self, path: str) -> None:
        parent = self.full(path).rpartition("/")[0] or "/"
        if self._local:
            self._changed.add(parent)
        if parent in self._created or not self._directories:
            return
        missing = parent
        while self._local and not os.path.isdir(missing):
            missing = missing.rpartition("/")[0] or "/"
            self._changed.add(missing)
        self._fs.makedirs(parent, exist_ok=True)
        self._created.add(parent)


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
    """Converts any exception of a file system to a CheckpointError, as backends raise arbitrary types."""
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
    """Iterates over items while another thread prepares the next one."""
    done = object()
    handoff: queue.Queue[Any] = queue.Queue(1)
    slots = threading.Semaphore(0)  # At most two items are in memory.
    stopped = threading.Event()
    failure: list[BaseException] = []

    def run() -> None:
        try:
            for item in items:
                handoff.put(item)
                del item
                slots.acquire()
                if stopped.is_set():
                    return
        except BaseException as error:
            failure.append(error)
        finally:
            handoff.put(done)

    thread = threading.Thread(target=run, name="persia-checkpoint-rows", daemon=True)
    thread.start()
    try:
        while (item := handoff.get()) is not done:
            slots.release()
            yield item
            del item
    finally:
        stopped.set()
        slots.release()
        while thread.is_alive():  # It may be about to put another item, or the end.
            with suppress(queue.Empty):
                handoff.get_nowait()
            thread.join(0.01)
    if failure:
        raise failure[0]
