"""Combines the gradients of a step to one update (docs/reference/protocol.md, sections 5 and 12).

A mean over rows is not a mean over workers: the gradient of each NN worker is of its own mean loss, so it is weighted
by its rows. GBA (arXiv 2205.11048, appendix B, Algorithm 2) divides the sum of an id by the workers that have the id.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

import numpy as np

from persia import batching
from persia.modes import Reduction
from persia.pushes.step_barrier import ArrivedPush
from persia.types import Floats, Gradients

__all__ = ["GradientAccumulator", "WeightedGradients", "average_step"]

WeightedGradients = Mapping[str, tuple[Gradients, Floats]]
"""Gradient by table, with the weight of each of its rows, 0 or 1: float32 `[n]`."""


class GradientAccumulator:
    """The running sum of the gradients of a step in asynchronous modes. Not thread-safe.

    It holds one sum and one divisor per id, for any number of gradients in a step: "we could execute the weighted sum
    over some gradients in advance based on the tokens" (GBA, appendix B). Its readable twin is in
    `tests/support/twins/pushes.py`.

    Args:
        reduction: divisor of the weighted sum of an id.
    """

    def __init__(self, reduction: Reduction) -> None:
        self._reduction = reduction
        self._sums: dict[str, batching.RowSums] = {}
        self._dims: dict[str, int] = {}
        self._unit = 0.0
        self._total = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of the accumulated gradients."""
        return sum(sums.nbytes for sums in self._sums.values())

    def add(self, gradients: WeightedGradients, rows: int) -> None:
        """Adds the gradient of a batch.

        Args:
            gradients: gradients of the ids of this PS.
            rows: number of samples in the batch. With 0, the gradients have no weight.
        """
        self._unit = self._unit or float(rows)
        share = rows / self._unit if rows else 0.0
        self._total += share
        if not share:
            return
        for table, ((ids, values), weights) in gradients.items():
            sums = self._sums.get(table)
            if sums is None:
                sums = self._sums[table] = batching.RowSums(values.shape[1])
                self._dims[table] = values.shape[1]
            sums.add(np.ascontiguousarray(ids), np.ascontiguousarray(values), weights, share)

    def take(self) -> dict[str, Gradients]:
        """Returns the mean of each id that has a gradient with weight, by table, and empties the accumulator."""
        means: dict[str, Gradients] = {}
        for table, sums in self._sums.items():
            count = sums.counted()
            mean = Gradients(np.empty(count, np.uint64), np.empty((count, self._dims[table]), np.float32))
            sums.take(self._total if self._reduction == "global" else 0.0, *mean)
            if count:
                means[table] = mean
        self._unit = self._total = 0.0
        return means


def average_step(
    arrived: Sequence[ArrivedPush], reduction: Reduction, pool: batching.ThreadPool, scratch: batching.Scratch
) -> dict[str, Gradients]:
    """Returns the average gradient of a step, by table. Its readable twin is in `tests/support/twins/pushes.py`.

    Args:
        arrived: pushes by (rank, part). Parts of a rank are summed, ranks are averaged by their rows.
        reduction: divisor of the weighted sum.
        pool: threads to run on.
        scratch: memory reused from call to call.
    """
    ranks = [list(parts) for _, parts in groupby(arrived, key=lambda a: a.header.rank)]
    weights = [sum(part.header.rows for part in parts) for parts in ranks]
    total = float(sum(weights)) if reduction == "global" else None
    result: dict[str, Gradients] = {}
    for table in dict.fromkeys(name for one in arrived for name in one.gradients):
        gradients: list[Gradients] = []
        gradient_weights: list[float] = []
        for parts, weight in zip(ranks, weights, strict=True):
            own = [part.gradients[table] for part in parts if table in part.gradients]
            if own and weight > 0:
                gradients.append(own[0] if len(own) == 1 else Gradients(*batching.merge_gradients(own, pool, scratch)))
                gradient_weights.append(weight)
        if gradients:
            result[table] = Gradients(*batching.average_gradients(gradients, gradient_weights, total, pool, scratch))
    return result
