"""Duplicate removal over a whole batch, and the sum of gradients of the same ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from persia.batching.native import Scratch, ThreadPool, as_data_error, core
from persia.errors import DataError
from persia.types import Floats, Ids, Inverse

__all__ = ["UniqueIds", "merge_gradients", "unique"]

UniqueIds: TypeAlias = tuple[Ids, list[Inverse]]
"""The distinct ids of a table, and for each of its features the place of every id among them."""

# A table with at most so many distinct ids in the batch has inverse indices of uint16.
_NARROW = 65_536


def _sizes(number: int, group: list[Ids]) -> list[int]:
    try:
        return [len(ids) for ids in group]
    except TypeError as error:
        raise DataError(f"group {number}: must be contiguous uint64 arrays [n].") from error


def unique(groups: Sequence[Sequence[Ids]], pool: ThreadPool, scratch: Scratch | None = None) -> list[UniqueIds]:
    """Removes duplicates over a whole batch, for all tables at once (tables run in parallel).

    Distinct ids come in the order of their first occurrence, feature by feature: the result depends on nothing else.

    Args:
        groups: for each table its features: contiguous uint64 arrays `[n_i]`. Arrays must not change meanwhile.
        pool: threads to run on.
        scratch: memory kept from call to call.

    Returns:
        For each table: ids, uint64 `[u]`, and for each feature the inverse `[n_i]`, so that
        `ids[inverse] == feature`. An inverse is uint16 if u <= 65,536, else uint32, alike for all features of a
        table. The arrays of one call are slices of two buffers, which live as long as any slice does.

    Raises:
        DataError: an array has another dtype or shape, is not contiguous, or a table has 2^32 - 1 ids or more.

    Blocks until done, without the GIL. Thread-safe.
    """
    lists = [list(group) for group in groups]
    sizes = [_sizes(number, group) for number, group in enumerate(lists)]
    with as_data_error:
        total = sum(map(sum, sizes))
        ids = np.empty(total, np.uint64)
        wide = np.empty(total, np.uint32)
        counts = core.unique(lists, ids, wide, pool, scratch or Scratch())
    narrow = wide.view(np.uint16)
    result: list[UniqueIds] = []
    start = 0
    for group_sizes, count in zip(sizes, counts, strict=True):
        inverse: Inverse
        inverse, at = (wide, start) if count > _NARROW else (narrow, 2 * start)
        inverses: list[Inverse] = []
        for size in group_sizes:
            inverses.append(inverse[at : at + size])
            at += size
        result.append((ids[start : start + count], inverses))
        start += sum(group_sizes)
    return result


def merge_gradients(
    parts: Sequence[tuple[Ids, Floats]], pool: ThreadPool | None = None, scratch: Scratch | None = None
) -> tuple[Ids, Floats]:
    """Sums the gradients of one table that several batches have computed (gradient accumulation).

    Args:
        parts: for each batch ids, uint64 `[n_i]`, and gradients, float32 `[n_i, dim]`.
        pool: threads to run on; None for the caller's only.
        scratch: memory kept from call to call.

    Returns:
        The distinct ids in order of first occurrence, uint64 `[u]`, and their gradients, float32 `[u, dim]`, summed in
        the order of the parts: bit-identical whatever the number of threads.

    Raises:
        DataError: no parts, or arrays whose dtypes or shapes do not fit.

    Blocks until done, without the GIL. Thread-safe.
    """
    if not parts:
        raise DataError("There are no gradients to merge: give at least one (ids, gradients).")
    dims = {gradients.shape[1:] for _, gradients in parts}
    if len(dims) != 1 or len(next(iter(dims))) != 1:
        raise DataError(f"Gradients of one table must be [n, dim] with one dim; got trailing shapes {sorted(dims)}.")
    pool = pool or ThreadPool(1)
    scratch = scratch or Scratch()
    ((ids, inverses),) = unique([[ids for ids, _ in parts]], pool, scratch)
    merged = np.empty((len(ids), *next(iter(dims))), np.float32)
    with as_data_error:
        plans = [(0, inverse, None, 0, None) for inverse in inverses]
        core.pool_backward(plans, [gradients for _, gradients in parts], [merged], pool, scratch)
    return ids, merged
