"""The running sum of a step's gradients in asynchronous modes (docs/reference/protocol.md, section 12).

GBA (arXiv 2205.11048, appendix B): "we could execute the weighted sum over some gradients in advance based on the
tokens". One sum and one divisor per id are kept, however many gradients make a step.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from persia import batching
from persia.modes import Reduction
from persia.types import Floats, Gradients

__all__ = ["GradientAccumulator", "WeightedGradients"]

WeightedGradients = Mapping[str, tuple[Gradients, Floats]]
"""By table, a gradient and, float32 `[n]`, the weight 0 or 1 of each of its rows."""


class GradientAccumulator:
    """Sums the gradients of one step. Not thread-safe. `pushes.reference.ReferenceAccumulator` is its readable twin.

    Args:
        reduction: what the weighted sum of an id is divided by.
    """

    def __init__(self, reduction: Reduction) -> None:
        self._reduction = reduction
        self._sums: dict[str, batching.RowSums] = {}
        self._dims: dict[str, int] = {}
        self._unit = 0.0
        self._total = 0.0

    @property
    def nbytes(self) -> int:
        """Memory of what is held."""
        return sum(held.nbytes for held in self._sums.values())

    def add(self, gradients: WeightedGradients, rows: int) -> None:
        """Adds the gradient of a batch.

        Args:
            gradients: of the batch's ids here.
            rows: samples of the batch; with 0 its ids count nothing.
        """
        self._unit = self._unit or float(rows)
        share = rows / self._unit if rows else 0.0
        self._total += share
        if not share:
            return
        for table, ((ids, values), weights) in gradients.items():
            held = self._sums.get(table)
            if held is None:
                held = self._sums[table] = batching.RowSums(values.shape[1])
                self._dims[table] = values.shape[1]
            held.add(np.ascontiguousarray(ids), np.ascontiguousarray(values), weights, share)

    def take(self) -> dict[str, Gradients]:
        """The mean of each id for which something counts, by table; then nothing is held any more."""
        means: dict[str, Gradients] = {}
        for table, held in self._sums.items():
            count = held.counted()
            mean = Gradients(np.empty(count, np.uint64), np.empty((count, self._dims[table]), np.float32))
            held.take(self._total if self._reduction == "global" else 0.0, *mean)
            if count:
                means[table] = mean
        self._unit = self._total = 0.0
        return means
