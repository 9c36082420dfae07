"""Removes duplicate ids over a whole batch, and sums the gradients of equal ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from persia.batching.native import Scratch, ThreadPool, as_data_error, core
from persia.errors import DataError
from persia.types import Floats, Ids, Inverse

__all__ = ["UniqueIds", "average_gradients", "merge_gradients", "unique"]

UniqueIds: TypeAlias = tuple[Ids, list[Inverse]]
"""The distinct ids of a table, and for each of its features the position of every id among them."""

# A table with at most this number of distinct ids in the batch has inverse indices of uint16.
_NARROW = 65_536


def _sizes(number: int, group: list[Ids]) -> list[int]:
    try:
        return [len(ids) for ids in group]
    except TypeError as error:
        raise DataError(f"group {number}: must be contiguous uint64 arrays [n].") from error


def unique(groups: Sequence[Sequence[Ids]], pool: ThreadPool, scratch: Scratch | None = None) -> list[UniqueIds]:
    """Removes duplicates over a whole batch, for all tables in parallel.

    Distinct ids come in the order of their first occurrence, feature by feature; the number of threads does not matter.

    Args:
        groups: features of each table, as contiguous uint64 arrays `[n_i]`. Arrays must not change during the call.
        pool: threads to run on.
        scratch: memory reused from call to call.

    Returns:
        For each table: ids, uint64 `[u]`, and for each feature the inverse `[n_i]`, so that
        `ids[inverse] == feature`. The inverses of all features of a table are uint16 if u <= 65,536, else uint32.
        The arrays of one call are slices of one block of the scratch, which is borrowed as long as any slice lives.

    Raises:
        DataError: an array has another dtype or shape, is not contiguous, or a table has 2^32 - 1 ids or more.

    Blocks until done, without the GIL. Thread-safe.
    """
    lists = [list(group) for group in groups]
    sizes = [_sizes(number, group) for number, group in enumerate(lists)]
    with as_data_error:
        total = sum(map(sum, sizes))
        scratch = scratch or Scratch()
        block = scratch.floats(3 * total)
        ids, wide = block[: 2 * total].view(np.uint64), block[2 * total :].view(np.uint32)
        counts = core.unique(lists, ids, wide, pool, scratch)
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
        pool: threads to run on; None runs on the calling thread.
        scratch: memory reused from call to call.

    Returns:
        The distinct ids in order of first occurrence, uint64 `[u]`, and their gradients, float32 `[u, dim]`, summed in
        the order of the parts: bit-identical whatever the number of threads.

    Raises:
        DataError: no parts, or arrays whose dtypes or shapes do not fit.

    Blocks until done, without the GIL. Thread-safe.
    """
    pool = pool or ThreadPool(1)
    scratch = scratch or Scratch()
    dim = _dim(parts)
    ((ids, inverses),) = unique([[ids for ids, _ in parts]], pool, scratch)
    return ids, _sum_rows(len(ids), dim, inverses, [gradients for _, gradients in parts], pool, scratch)


def average_gradients(
    parts: Sequence[tuple[Ids, Floats]],
    weights: Sequence[float],
    total: float | None,
    pool: ThreadPool,
    scratch: Scratch | None = None,
) -> tuple[Ids, Floats]:
    """Averages the gradients of one table that several NN workers have computed.

    Args:
        parts: for each NN worker distinct ids, uint64 `[n_i]`, and gradients, float32 `[n_i, dim]`.
        weights: positive weights of the NN workers.
        total: divisor of the weighted sum; None divides the sum of each id by the weights of the NN workers that
            have the id.
        pool: threads to run on.
        scratch: memory reused from call to call.

    Returns:
        The distinct ids in order of first occurrence, uint64 `[u]`, and their gradients, float32 `[u, dim]`: the sum,
        in the order of the parts, of float32(weight / first weight) * gradient, times float32(first weight / divisor).
        Bit-identical whatever the number of threads. If `total` is None and only one NN worker has an id, its
        gradient is returned unchanged.

    Raises:
        DataError: no parts, or arrays whose dtypes or shapes do not fit.

    Blocks until done. Thread-safe.
    """
    scratch = scratch or Scratch()
    dim = _dim(parts)
    ((ids, inverses),) = unique([[ids for ids, _ in parts]], pool, scratch)
    # Weights are relative to the first, and the division comes last: equal weights then sum the gradients unscaled, as
    # do the modes that do not know the divisor in advance.
    divisor, holders = np.full(len(ids), total or 0.0), np.zeros(len(ids), np.int64)
    for inverse, weight in zip(inverses, weights, strict=True):
        holders[inverse] += 1
        if total is None:
            divisor[inverse] += weight
    factor = (weights[0] / divisor).astype(np.float32)
    unshared = (holders == 1) if total is None else np.zeros(len(ids), np.bool_)
    factor[unshared] = 1.0
    scaled = [
        gradients
        if weight == weights[0]
        else gradients * np.where(unshared[inverse], np.float32(1.0), np.float32(weight / weights[0]))[:, None]
        for (_, gradients), inverse, weight in zip(parts, inverses, weights, strict=True)
    ]
    merged = _sum_rows(len(ids), dim, inverses, scaled, pool, scratch)
    merged *= factor[:, None]
    return ids, merged


def _dim(parts: Sequence[tuple[Ids, Floats]]) -> int:
    if not parts:
        raise DataError("There are no gradients to merge; give at least one pair (ids, gradients).")
    dims = {gradients.shape[1:] for _, gradients in parts}
    if len(dims) != 1 or len(next(iter(dims))) != 1:
        raise DataError(f"Gradients of one table must be [n, dim] with one dim; got trailing shapes {sorted(dims)}.")
    return int(next(iter(dims))[0])


def _sum_rows(
    rows: int, dim: int, inverses: Sequence[Inverse], parts: Sequence[Floats], pool: ThreadPool, scratch: Scratch
) -> Floats:
    """Sums, part after part, the rows whose inverse is i into row i."""
    merged = np.empty((rows, dim), np.float32)
    with as_data_error:
        plans = [(0, inverse, None, 0, None, None) for inverse in inverses]
        core.pool_backward(plans, list(parts), [merged], pool, scratch)
    return merged
