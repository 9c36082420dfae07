"""The slow, readable twins of `persia.pushes.accumulator`, for tests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from persia.modes import Reduction
from persia.pushes.accumulator import WeightedGradients
from persia.pushes.step_barrier import ArrivedPush
from persia.types import Floats

__all__ = ["ReferenceAccumulator", "average_step"]


def average_step(arrived: Sequence[ArrivedPush], reduction: Reduction) -> dict[str, dict[int, Floats]]:
    """Returns the average gradient of a step, by table and id: the same bits as `accumulator.average_step`."""
    weights: dict[int, int] = defaultdict(int)
    pushed: dict[str, list[int]] = {}
    sums: dict[str, dict[int, dict[int, Floats]]] = {}  # table, id, rank: the sum of the rank's parts
    for header, gradients, _ in arrived:
        weights[header.rank] += header.rows
        for table, (ids, values) in gradients.items():
            pushed.setdefault(table, []).append(header.rank)
            for id_, value in zip(ids.tolist(), values, strict=True):
                ranks = sums.setdefault(table, {}).setdefault(id_, {})
                ranks[header.rank] = ranks[header.rank] + value if header.rank in ranks else value
    result: dict[str, dict[int, Floats]] = {}
    # Weights are relative to that of the first rank which pushed the table.
    for table, of_table in sums.items():
        first = next((weights[rank] for rank in pushed[table] if weights[rank] > 0), 0)
        for id_, ranks in of_table.items():
            having = [rank for rank in ranks if weights[rank] > 0]
            divisor = float(sum(weights[rank] for rank in (weights if reduction == "global" else having)))
            average = np.zeros(len(next(iter(ranks.values()))), np.float32)
            if reduction == "per_id" and len(having) == 1:
                average += ranks[having[0]]
            else:
                for rank in having:
                    average += np.float32(weights[rank] / first) * ranks[rank]
                average *= np.float32(first / divisor) if having else np.float32(1)
            if having:
                result.setdefault(table, {})[id_] = average
    return result


class ReferenceAccumulator:
    """A `GradientAccumulator` that keeps all gradients of the step."""

    def __init__(self, reduction: Reduction) -> None:
        self._reduction = reduction
        self._arrived: list[tuple[WeightedGradients, int]] = []

    def add(self, gradients: WeightedGradients, rows: int) -> None:
        """Keeps the gradient of a batch."""
        self._arrived.append((gradients, rows))

    def take(self) -> dict[str, dict[int, NDArray[np.float64]]]:
        """Returns by table the mean of each id that has a gradient with weight, in float64."""
        counting = [(gradients, rows) for gradients, rows in self._arrived if rows]
        total = sum(rows for _, rows in counting)
        sums: dict[tuple[str, int], NDArray[np.float64]] = {}
        having: dict[tuple[str, int], int] = defaultdict(int)
        for of_tables, rows in counting:
            for table, ((ids, values), weights) in of_tables.items():
                for id_, value, weight in zip(ids.tolist(), values, weights, strict=True):
                    having[table, id_] += rows
                    if weight:
                        held = sums.get((table, id_), np.zeros(len(value)))
                        sums[table, id_] = held + rows * value.astype(np.float64)
        result: dict[str, dict[int, NDArray[np.float64]]] = {}
        for (table, id_), value in sums.items():
            divisor = total if self._reduction == "global" else having[table, id_]
            result.setdefault(table, {})[id_] = value / divisor
        self._arrived.clear()
        return result
