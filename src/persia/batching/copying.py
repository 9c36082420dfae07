"""Copies of whole arrays on several threads."""

from __future__ import annotations

import importlib
from typing import Any

from numpy.typing import NDArray

from persia.batching.native import ThreadPool, as_data_error

__all__ = ["copy_array"]

_packed: Any = importlib.import_module("persia._core").packed


def copy_array(to: NDArray[Any], array: NDArray[Any], pool: ThreadPool) -> None:
    """Copies an array to another of its dtype and size, in memory order; one thread copies 5 to 10 GB/s at most.

    Args:
        to: contiguous, writable.
        array: contiguous; may be read-only.
        pool: threads to run on, over blocks of 512 KiB.

    Raises:
        DataError: the arrays differ in size or dtype, or one is not contiguous.

    Blocks until done, without the GIL. Thread-safe.
    """
    with as_data_error:
        _packed.copy(to, array, pool)
