"""Typed access to the native core. Converts its errors to `DataError`."""

from __future__ import annotations

import importlib
import itertools
import math
import os
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from persia.errors import DataError
from persia.types import Floats, Ids

__all__ = [
    "RowSums",
    "Scratch",
    "ThreadPool",
    "as_data_error",
    "borrow",
    "core",
    "default_threads",
    "features_core",
    "native",
]

_module: Any = importlib.import_module("persia._core")

core: Any = _module.batch
"""The functions of `bindings/batch.cpp`. They never convert an array: a wrong dtype or shape is a ValueError."""

features_core: Any = _module.features
"""The functions of `bindings/features.cpp`, which are as strict."""

_DTYPES = {char: np.dtype(char) for char in "dfliqLQ"}

if TYPE_CHECKING:

    class ThreadPool:
        """Threads that run the loops of the core together with the caller. Thread-safe; calls do not block each other.

        Args:
            threads: number of threads that run a loop, including the caller; 1 starts none.
        """

        def __init__(self, threads: int) -> None: ...

        @property
        def threads(self) -> int:
            """Returns the number of threads, as given."""

    class Scratch:
        """Working memory that calls borrow and return, so that later calls need no new pages from the system.

        Use one per role and pass it to every call; without it, each call allocates and frees its own. Thread-safe.
        """

        def floats(self, count: int) -> Floats:
            """An uninitialised float32 array `[count]`; its memory is reused once nothing refers to it."""

    class RowSums:
        """Accumulates the gradients of one step for one table. Not thread-safe; arrays are never converted.

        Args:
            dim: dim of a row.
        """

        def __init__(self, dim: int) -> None: ...

        def add(self, ids: Ids, values: Floats, counts: Floats, share: float) -> None:
            """Adds `share` to the divisor of each id, and `share * values` to its sum where `counts` is not 0."""

        def counted(self) -> int:
            """Number of ids that `take` writes: ids with at least one value that counts."""

        def take(self, total: float, ids: Ids, values: Floats) -> None:
            """Writes and clears the sums, each divided by the divisor of its id, or by `total` if it is not 0."""

        @property
        def nbytes(self) -> int:
            """Bytes of memory in use."""

else:
    RowSums = _module.RowSums
    ThreadPool = _module.ThreadPool
    Scratch = core.Scratch


def native(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Returns an array as the core takes it: contiguous, aligned, of a type in the order of bytes of this machine.

    Args:
        values: array of any kind.
        dtype: the type, as a character of numpy.
    """
    expected = _DTYPES[dtype]
    if values.dtype is expected and values.flags.c_contiguous and values.flags.aligned:
        return values
    # A view, since a copy in the same order of bytes keeps an order that is written in the type, as that of msgpack.
    return np.require(values, expected, ("C", "A")).view(expected)


def default_threads() -> int:
    """Returns the default number of threads of a role: one per processor, at most 8."""
    return min(8, len(os.sched_getaffinity(0)))


class _AsDataError:
    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, ValueError):
            raise DataError(f"{error}.") from error


as_data_error = _AsDataError()
"""A stateless context that turns a ValueError of the core into a DataError."""


def borrow(shapes: Sequence[tuple[int, ...]], scratch: Scratch) -> list[Floats]:
    """Uninitialised float32 arrays of these shapes, in one borrowed block, each on its own cache lines.

    Fresh memory costs more than the loops that fill it, since every new page is a fault.

    Raises:
        DataError: there is not enough memory; names the largest array.
    """
    sizes = [math.prod(shape) for shape in shapes]
    starts = [0, *itertools.accumulate(-(-size // 16) * 16 for size in sizes)]
    try:
        block = scratch.floats(starts[-1])
    except MemoryError as error:
        most, shape = max(zip(sizes, shapes, strict=True))
        raise DataError(
            f"Not enough memory for the embeddings of a batch, {starts[-1] * 4 >> 20:,} MiB. The largest, of shape "
            f"{list(shape)}, has {most * 4 >> 20:,} MiB. Lower the max_length or dim of features that are not pooled, "
            "pool them, or use smaller batches.",
            shape=shape,
        ) from error
    return [block[at : at + n].reshape(shape) for at, n, shape in zip(starts, sizes, shapes, strict=False)]
