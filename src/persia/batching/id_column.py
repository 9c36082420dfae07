"""`IdColumn`: the ids of one feature of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from persia.types import Floats, Ids, Int64Array

__all__ = ["IdColumn"]

_Index: TypeAlias = slice | Int64Array


@dataclass(frozen=True, slots=True)
class IdColumn:
    """The ids of one feature: `values[offsets[i]:offsets[i + 1]]` belong to sample i, like a jagged tensor.

    Attributes:
        values: uint64 `[n]`.
        offsets: int64 `[batch + 1]`, from 0 to n; None when each sample has exactly one id (n = batch).
        weights: float32 `[n]`, the factor of each id's embedding in pooling; None for 1.
    """

    values: Ids
    offsets: Int64Array | None = None
    weights: Floats | None = None

    def __len__(self) -> int:
        return len(self.values) if self.offsets is None else max(len(self.offsets) - 1, 0)

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return sum(part.nbytes for part in (self.values, self.offsets, self.weights) if part is not None)

    def slice(self, start: int, stop: int) -> IdColumn:
        """The ids of samples `start` to `stop` (0 <= start <= stop <= len); values are a view."""
        if self.offsets is None:
            return IdColumn(self.values[start:stop], None, self._weights(slice(start, stop)))
        low, high = self.offsets[start], self.offsets[stop]
        weights = self._weights(slice(low, high))
        return IdColumn(self.values[low:high], self.offsets[start : stop + 1] - low, weights)

    def take(self, rows: Int64Array) -> IdColumn:
        """The ids of these samples, in this order; a copy."""
        if self.offsets is None:
            return IdColumn(self.values[rows], None, self._weights(rows))
        starts = self.offsets[rows]
        lengths = self.offsets[rows + 1] - starts
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        index = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
        return IdColumn(self.values[index], offsets, self._weights(index))

    def _weights(self, index: _Index) -> Floats | None:
        return None if self.weights is None else self.weights[index]

    @staticmethod
    def concat(columns: Sequence[IdColumn]) -> IdColumn:
        """The samples of all columns, one after another; a copy."""
        values = np.concatenate([c.values for c in columns])
        weights = None
        if any(c.weights is not None for c in columns):
            parts = [np.ones(len(c.values), np.float32) if c.weights is None else c.weights for c in columns]
            weights = np.concatenate(parts)
        if all(c.offsets is None for c in columns):
            return IdColumn(values, None, weights)
        lengths = [np.ones(len(c.values), np.int64) if c.offsets is None else np.diff(c.offsets) for c in columns]
        offsets = np.zeros(sum(map(len, lengths)) + 1, np.int64)
        np.cumsum(np.concatenate(lengths), out=offsets[1:])
        return IdColumn(values, offsets, weights)
