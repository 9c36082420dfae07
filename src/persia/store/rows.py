"""The records that a store hands out."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Rows", "ShardState", "Spill"]

ShardState = dict[str, NDArray[np.generic]]
"""Clocks, client sequences, counters and admission sketch of one shard, as small arrays by name."""


class Rows(NamedTuple):
    """Whole rows, column by column.

    Attributes:
        ids: uint64 [rows].
        embeddings: float32 [rows, dim].
        state: float32 [rows, state width], the optimizer's state.
        update_count: uint32 [rows], updates applied to each row.
        last_step: uint32 [rows], global step or token of the last one.
        stamp: uint32 [rows], recency within the shard: larger is more recent.
    """

    ids: NDArray[np.uint64]
    embeddings: NDArray[np.float32]
    state: NDArray[np.float32]
    update_count: NDArray[np.uint32]
    last_step: NDArray[np.uint32]
    stamp: NDArray[np.uint32]


class Spill(NamedTuple):
    """How a store keeps old rows for a cut.

    Attributes:
        directory: of the file for those that do not fit in memory; it must be on a disk of this machine.
        buffer_bytes: memory per shard, and once more while it is written.
        evicted_limit: ids of evicted rows that each shard remembers between two cuts, 8 bytes each.
        live: keep none: rows are read as they are by then, each of one moment.
    """

    directory: str
    buffer_bytes: int = 1 << 20
    evicted_limit: int = 1 << 18
    live: bool = False
