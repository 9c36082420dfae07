"""Random reads of a file, to find out how many of them an SSD serves."""

from __future__ import annotations

import importlib
from typing import Any

from persia.errors import StoreError

__all__ = ["DEPTH", "random_reads"]

_core: Any = importlib.import_module("persia._core").disk

DEPTH: int = _core.DEPTH
"""Reads that are in flight at the same time where rows on disk are read with io_uring."""


def random_reads(
    path: str, blocks: int, count: int, *, begin: int = 0, block_bytes: int = 4096, seed: int = 0, threads: int = 0
) -> float:
    """Reads blocks at random places of a file, past the page cache, and returns the seconds that this takes.

    Blocks, without the interpreter lock.

    Args:
        path: of the file.
        blocks: blocks that it has.
        count: blocks to read.
        begin: byte of the first block, a multiple of 4,096.
        block_bytes: bytes of a block, a multiple of 4,096.
        seed: of their places.
        threads: 0 to read as rows on disk are read: by io_uring, `DEPTH` at a time, or by threads where the kernel has
            none. Else so many threads with a loop of pread each.

    Raises:
        StoreError: the file cannot be read: it is too short, or its file system has no direct I/O.
    """
    try:
        seconds: float = _core.random_reads(path, begin, blocks, block_bytes, count, seed, threads)
    except (RuntimeError, ValueError) as error:
        raise StoreError(str(error)) from error
    return seconds
