"""Assigns ids to embedding PSs (docs/reference/protocol.md, section 2), and sorts batches by them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from persia.batching.duplicates import UniqueIds
from persia.batching.native import Scratch, ThreadPool, as_data_error, core, native
from persia.types import BucketMap, Ids, Int64Array

__all__ = ["buckets_of", "group_by_owner", "owners"]


def group_by_owner(
    tables: Sequence[str],
    unique_ids: Sequence[UniqueIds],
    buckets: BucketMap,
    pool: ThreadPool,
    scratch: Scratch | None = None,
) -> list[Int64Array]:
    """Sorts the distinct ids of each table by the PS that owns them, in place, and updates the inverses.

    The ids sent to a PS, and the rows that it returns, are then one slice: no row is gathered or scattered.

    Args:
        tables: names of the tables.
        unique_ids: the result of `unique`; ids of one PS keep their order.
        buckets: the PS of each bucket.
        pool: threads to run on, over tables.
        scratch: memory reused from call to call.

    Returns:
        For each table int64 `[servers + 1]`: PS p owns `ids[bounds[p]:bounds[p + 1]]`.

    Raises:
        DataError: arrays that `unique` cannot have returned.

    Blocks until done, without the GIL. Thread-safe.
    """
    bounds = np.empty((len(tables), buckets.servers + 1), np.int64)
    with as_data_error:
        groups = [(table, ids, list(inverses)) for table, (ids, inverses) in zip(tables, unique_ids, strict=True)]
        core.group_by_owner(groups, buckets.owners, bounds, pool, scratch or Scratch())
    return list(bounds)


def buckets_of(table: str, ids: Ids) -> NDArray[np.uint16]:
    """Returns the bucket of each id, uint16 `[n]`, below `persia.types.BUCKETS`."""
    buckets = np.empty(len(ids), np.uint16)
    with as_data_error:
        core.buckets_of(table, native(ids, "Q"), buckets)
    return buckets


def owners(table: str, ids: Ids, buckets: BucketMap) -> NDArray[np.uint16]:
    """Returns the number of the PS that owns each id, uint16 `[n]`; for whole tables, as in checkpoints."""
    return buckets.owners[buckets_of(table, ids)]
