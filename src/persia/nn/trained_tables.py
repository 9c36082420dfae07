"""The tables whose rows get gradients."""

from __future__ import annotations

from collections.abc import Sequence

from persia.batching import FeaturePlan

__all__ = ["TrainedTables"]


class TrainedTables:
    """Which tables get gradients (`Table.trainable`), by their number.

    Args:
        trained: whether each table gets gradients.

    Attributes:
        count: how many there are.
    """

    def __init__(self, trained: Sequence[bool]) -> None:
        self._trained = list(trained)
        self.count = sum(self._trained)

    def __contains__(self, table: int) -> bool:
        return self._trained[table]

    def constants(self, plans: Sequence[FeaturePlan]) -> list[bool]:
        """Returns which features get no gradient. None, if no table is trained: its arrival ends a backward pass."""
        return [self.count > 0 and plan.table not in self for plan in plans]

    def shapes(self, of_rows: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Returns the shapes of the sums of gradients by table, from the shapes of its rows: empty if not trained."""
        return [(rows if trained else 0, dim) for (rows, dim), trained in zip(of_rows, self._trained, strict=True)]
