"""Assigns ids to embedding PSs (docs/reference/protocol.md, section 2), and sorts batches by them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from persia.batching.duplicates import UniqueIds
from persia.batching.native import Scratch, ThreadPool, as_data_error, core
from persia.types import Ids, Int64Array

__all__ = ["group_by_owner", "owners"]


def group_by_owner(
    tables: Sequence[str],
    unique_ids: Sequence[UniqueIds],
    servers: int,
    pool: ThreadPool,
    scratch: Scratch | None = None,
) -> list[Int64Array]:
    """Sorts the distinct ids of each table by the PS that owns them, in place, and updates the inverses.

    The ids sent to a PS, and the rows that it returns, are then one slice: no row is gathered or scattered.

    Args:
        tables: names of the tables.
        unique_ids: the result of `unique`; ids of one PS keep their order.
        servers: number of PSs.
        pool: threads to run on, over tables.
        scratch: memory reused from call to call.

    Returns:
        For each table int64 `[servers + 1]`: PS p owns `ids[bounds[p]:bounds[p + 1]]`.

    Raises:
        DataError: arrays that `unique` cannot have returned.

    Blocks until done, without the GIL. Thread-safe.
    """
    bounds = np.empty((len(tables), servers + 1), np.int64)
    with as_data_error:
        groups = [(table, ids, list(inverses)) for table, (ids, inverses) in zip(tables, unique_ids, strict=True)]
        core.group_by_owner(groups, bounds, pool, scratch or Scratch())
    return list(bounds)


def owners(table: str, ids: Ids, servers: int) -> NDArray[np.uint16]:
    """The number of the PS that owns each id, uint16 `[n]`; for whole tables, as in checkpoints."""
    order = np.arange(len(ids), dtype=np.uint32)
    scratch = np.empty(len(ids), np.uint64)
    scratch[:] = ids  # `copy()` would keep the byte order of the file that the ids come from.
    (bounds,) = group_by_owner([table], [(scratch, [order])], servers, ThreadPool(1))
    # `order` is now the position of each id among the sorted ones.
    return (np.searchsorted(bounds, order, side="right") - 1).astype(np.uint16)
