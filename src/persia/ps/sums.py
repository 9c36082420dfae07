"""The running sum of a step's gradients in asynchronous modes (docs/reference/protocol.md, section 12).

GBA (arXiv 2205.11048, appendix B): "we could execute the weighted sum over some gradients in advance based on the
tokens". One sum and one divisor per id are kept, however many gradients make a step.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from persia import batching
from persia.modes import Reduction
from persia.types import Floats, Gradients, Ids

__all__ = ["RunningSums", "Weighed"]

DIVISOR, COUNTED = -2, -1
"""Columns beside the sum: weights of all gradients with the id, and of those that count."""

Weighed = Mapping[str, tuple[Gradients, Floats]]
"""By table, a gradient and, float32 `[n]`, the weight 0 or 1 of each of its rows."""


class RunningSums:
    """Sums gradients of one step. Not thread-safe; :class:`persia.ps.reference.SlowSums` is its readable twin.

    Args:
        reduction: what the weighted sum of an id is divided by.
        pool: threads to run on.
        scratch: memory kept from call to call.
    """

    def __init__(self, reduction: Reduction, pool: batching.ThreadPool, scratch: batching.Scratch) -> None:
        self._reduction = reduction
        self._pool = pool
        self._scratch = scratch
        self._sums: dict[str, tuple[Ids, Floats]] = {}
        self._unit = 0.0
        self._total = 0.0

    def add(self, gradients: Weighed, rows: int) -> None:
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
            wide = np.empty((len(ids), values.shape[1] + 2), np.float32)
            np.multiply(values, np.float32(share), out=wide[:, :DIVISOR])
            wide[:, DIVISOR] = share
            wide[:, COUNTED] = weights * share
            wide[weights == 0, :DIVISOR] = 0.0  # Not a product: it may be NaN.
            held = self._sums.get(table)
            self._sums[table] = (
                (ids, wide)
                if held is None
                else batching.merge_gradients([held, (ids, wide)], self._pool, self._scratch)
            )

    def take(self) -> dict[str, Gradients]:
        """The mean of each id for which something counts, by table; then nothing is held any more."""
        means: dict[str, Gradients] = {}
        for table, (ids, wide) in self._sums.items():
            counted = wide[:, COUNTED] > 0
            if not counted.all():
                ids, wide = np.ascontiguousarray(ids[counted]), wide[counted]
            divisor = np.float64(self._total) if self._reduction == "global" else np.float64(wide[:, DIVISOR, None])
            means[table] = Gradients(ids, wide[:, :DIVISOR] * (1.0 / divisor).astype(np.float32))
        self._sums.clear()
        self._unit = self._total = 0.0
        return means
