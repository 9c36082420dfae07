"""Storage of a log of changes: a directory of any file system, or a topic of Kafka."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Protocol

from persia.checkpoint.storage import Storage
from persia.publish.topic import TopicStorage

__all__ = ["DirectoryStorage", "LogStorage", "open_storage"]


class LogStorage(Protocol):
    """Files by path, with forward slashes. For one thread.

    All methods block, and raise CheckpointError or PublishError if the storage cannot be read or written.
    """

    @property
    def url(self) -> str:
        """The URL, for messages."""

    @property
    def problem(self) -> str:
        """Why the last refresh rejected a message; empty if it rejected none."""

    def refresh(self) -> None:
        """Makes files visible that others have written."""

    def full(self, path: str = "") -> str:
        """Returns the full path, for messages."""

    def names(self, path: str = "") -> list[str]:
        """Returns the sorted names in a directory; empty if it does not exist."""

    def size(self, path: str) -> int | None:
        """Returns the length of a file in bytes; None if it does not exist."""

    def head(self, path: str, begin: int, end: int) -> bytes:
        """Reads the bytes [begin, end) of a small file."""

    def load(self, path: str, size: int) -> tuple[memoryview, int]:
        """Reads a file of `size` bytes into new memory; returns it with its CRC-32."""

    def write(self, path: str, buffers: Iterable[memoryview]) -> tuple[int, int]:
        """Writes a file; returns its length and CRC-32."""

    def put(self, path: str, data: bytes) -> None:
        """Writes or replaces a small file: readers see the old or the new one."""

    def probe(self) -> None:
        """Checks that the storage can be written; creates it if it does not exist."""

    def sync(self) -> None:
        """Makes everything written so far survive a power failure."""

    def remove(self, path: str) -> None:
        """Deletes a file, or a directory and its contents. No-op if there is none."""


class DirectoryStorage(Storage):
    """A directory of a file system. Other files in it have no effect, as their names differ."""

    problem = ""


def open_storage(url: str | os.PathLike[str]) -> LogStorage:
    """Opens the storage of a log of changes. Does not wait for a connection.

    Args:
        url: a path, any URL that fsspec supports, or `kafka://HOST:PORT,.../TOPIC`.

    Raises:
        CheckpointError: the URL does not name a file system.
        ConfigError: the URL does not name a topic.
        MissingExtraError: a package for the URL is not installed.
    """
    path = os.fspath(url)
    return TopicStorage(path) if path.startswith("kafka://") else DirectoryStorage(path)
