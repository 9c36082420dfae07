"""The records that a store hands out."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["PushResult", "Rows", "ShardState"]

ShardState = dict[str, NDArray[np.generic]]
"""Clocks, client sequences, counters and admission sketch of one shard, as small arrays by name."""


class Rows(NamedTuple):
    """Whole rows, column by column.

    Attributes:
        ids: uint64 [rows].
        embeddings: float32 [rows, dim].
        states: float32 [rows, state width], the optimizer's state.
        update_counts: uint32 [rows], updates applied to each row.
        last_steps: uint32 [rows], global step or token of the last one.
        stamps: uint32 [rows], recency within the shard: larger is more recent.
    """

    ids: NDArray[np.uint64]
    embeddings: NDArray[np.float32]
    states: NDArray[np.float32]
    update_counts: NDArray[np.uint32]
    last_steps: NDArray[np.uint32]
    stamps: NDArray[np.uint32]


class PushResult(NamedTuple):
    """What became of the gradients of one table.

    Attributes:
        applied: gradients that changed a row.
        absent: ids without a row (not admitted, or evicted): skipped.
        nonfinite: gradients with NaN or infinity: dropped.
        duplicates: gradients of a push that had been applied before: skipped.
    """

    applied: int
    absent: int
    nonfinite: int
    duplicates: int
