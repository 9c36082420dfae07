"""Typed access to the native core. Converts its errors to those of persia."""

from __future__ import annotations

import importlib
import itertools
import math
import os
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from persia.errors import DataError
from persia.types import Floats, Ids

__all__ = ["RowSums", "Scratch", "ThreadPool", "as_data_error", "borrow", "core", "default_threads"]

_module: Any = importlib.import_module("persia._core")

core: Any = _module.batch
"""The functions of `bindings/batch.cpp`. They never convert an array: what does not fit is a ValueError."""

if TYPE_CHECKING:

    class ThreadPool:
        """Threads that share the loops of the core; the caller helps. Thread-safe; calls do not block one another.

        Args:
            threads: how many work on a loop, the caller included; 1 starts none.
        """

        def __init__(self, threads: int) -> None: ...

        @property
        def threads(self) -> int:
            """Returns the number of threads, as given."""

    class Scratch:
        """Working memory that calls borrow and give back, so that later calls need not ask the system for pages.

        Keep one per role and pass it to every call; without one, a call frees its own in the end. Thread-safe.
        """

        def floats(self, count: int) -> Floats:
            """An uninitialised float32 array `[count]`; its memory is lent again once nothing refers to it."""

    class RowSums:
        """The running sum of the gradients of a step, of one table. Not thread-safe; arrays are never converted.

        Args:
            dim: of a row.
        """

        def __init__(self, dim: int) -> None: ...

        def add(self, ids: Ids, values: Floats, counts: Floats, share: float) -> None:
            """Adds `share` to the divisor of each id, and `share * values` to its sum where `counts` is not 0."""

        def counted(self) -> int:
            """How many ids `take` gives: those of which something counts."""

        def take(self, total: float, ids: Ids, values: Floats) -> None:
            """Writes ids and sums over their own divisor, or over `total` if that is not 0; then nothing is held."""

        @property
        def nbytes(self) -> int:
            """Memory of what is held."""

else:
    RowSums = _module.RowSums
    ThreadPool = _module.ThreadPool
    Scratch = core.Scratch


def default_threads() -> int:
    """Returns the number of threads of a role unless its options set one: one for each processor, at most 8."""
    return min(8, len(os.sched_getaffinity(0)))


class _AsDataError:
    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, ValueError):
            raise DataError(f"{error}.") from error


as_data_error = _AsDataError()
"""Context in which a ValueError of the core becomes a DataError. It has no state."""


def borrow(shapes: Sequence[tuple[int, ...]], scratch: Scratch) -> list[Floats]:
    """Uninitialised float32 arrays of these shapes, in one borrowed block, each on its own cache lines.

    Fresh memory costs more than the loops that fill it: every new page is a fault.

    Raises:
        DataError: there is no memory for them; names the largest one.
    """
    sizes = [math.prod(shape) for shape in shapes]
    starts = [0, *itertools.accumulate(-(-size // 16) * 16 for size in sizes)]
    try:
        block = scratch.floats(starts[-1])
    except MemoryError as error:
        most, shape = max(zip(sizes, shapes, strict=True))
        raise DataError(
            f"There is no memory for the embeddings of a batch, {starts[-1] * 4 >> 20:,} MiB. The largest, of shape "
            f"{list(shape)}, has {most * 4 >> 20:,} MiB. Lower the max_length or dim of features that are not pooled, "
            "pool them, or use smaller batches.",
            shape=shape,
        ) from error
    return [block[at : at + n].reshape(shape) for at, n, shape in zip(starts, sizes, shapes, strict=False)]
