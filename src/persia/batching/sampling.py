"""Samples batches, to measure drift."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from persia.batching.batch import Batch
from persia.metrics.drift import count_ids
from persia.types import Floats, Int64Array

__all__ = ["is_sampled", "sampled_ids", "sampled_rows"]

EVERY: Final = 17
"""One of `EVERY` batches is sampled. A prime, so that NN workers that take batches in turn sample equally."""

ROWS: Final = 1024
"""Approximate number of rows that are counted in a sampled batch."""


def is_sampled(number: int) -> bool:
    """Returns whether a batch of a pass is sampled."""
    return number % EVERY == 0


def sampled_rows(rows: Floats) -> Floats:
    """Returns the sampled rows of an array `[batch, ...]`, spread over the batch; a view."""
    return rows[:: _step(len(rows))]


def sampled_ids(batch: Batch, features: Sequence[str]) -> Int64Array:
    """Returns the counts of the ids of the sampled rows, as `count_ids` does.

    Args:
        batch: a valid batch.
        features: names of ID-type features.
    """
    step = _step(len(batch))
    rows = None if step == 1 else np.arange(0, len(batch), step)
    columns = []
    for name in features:
        column = batch.id_features[name]
        column = column if rows is None else column.take(rows)
        columns.append((column.values, column.offsets))
    return count_ids(columns)


def _step(rows: int) -> int:
    return max(1, -(-rows // ROWS))
