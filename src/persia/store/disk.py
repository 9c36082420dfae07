"""Random reads of a file, to measure the read rate of an SSD."""

from __future__ import annotations

import importlib
from typing import Any

from persia.errors import StoreError

__all__ = ["DEPTH", "random_reads"]

_core: Any = importlib.import_module("persia._core").disk

DEPTH: int = _core.DEPTH
"""Number of reads in flight when rows on disk are read with io_uring."""


def random_reads(
    path: str, blocks: int, count: int, *, begin: int = 0, block_bytes: int = 4096, seed: int = 0, threads: int = 0
) -> float:
    """Reads blocks at random places of a file, bypassing the page cache, and returns the duration in seconds.

    Blocks, without the interpreter lock.

    Args:
        path: path of the file.
        blocks: number of blocks in the file.
        count: number of blocks to read.
        begin: byte of the first block, a multiple of 4,096.
        block_bytes: bytes of a block, a multiple of 4,096.
        seed: seed of the places.
        threads: number of threads, each with a loop of pread. 0 reads in the same way as rows on disk: with io_uring,
            `DEPTH` reads in flight, or with threads if the kernel has no io_uring.

    Raises:
        StoreError: the file cannot be read: it is too short, or its file system has no direct I/O.
    """
    try:
        seconds: float = _core.random_reads(path, begin, blocks, block_bytes, count, seed, threads)
    except (RuntimeError, ValueError) as error:
        raise StoreError(str(error)) from error
    return seconds
