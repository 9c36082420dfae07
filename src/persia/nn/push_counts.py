"""Counts of the outcome of gradients and batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from persia.types import UpdateCounts, sum_counts

__all__ = ["PushCounter", "PushCounts"]


class PushCounts(NamedTuple):
    """Outcome of the gradients so far, in rows, and of batches without a gradient.

    Attributes:
        applied: rows updated.
        absent: rows that are not in the table (not admitted, or evicted): skipped.
        non_finite: rows whose gradient had a NaN or Inf: dropped.
        released: batches that were drawn and never back-propagated.
        lost_batches: batches whose rows could not be looked up, as their embedding worker was gone: skipped.
        lost_rows: samples of those.
        lost_gradients: batches whose gradient could not be pushed, for the same reason.
    """

    applied: int = 0
    absent: int = 0
    non_finite: int = 0
    released: int = 0
    lost_batches: int = 0
    lost_rows: int = 0
    lost_gradients: int = 0


class PushCounter:
    """Counts the outcome of gradients and batches. Each count is written by one thread, and may be read by any."""

    def __init__(self) -> None:
        self._updates: dict[str, UpdateCounts] = {}
        self._released = 0
        self._lost_batches = 0
        self._lost_rows = 0

    def pushed(self, counts: Mapping[str, UpdateCounts]) -> None:
        """Adds the outcome of a push, by table."""
        self._updates = sum_counts([self._updates, counts])

    def released(self) -> None:
        """Counts a batch that was drawn and never back-propagated."""
        self._released += 1

    def lost(self, rows: int) -> None:
        """Counts a batch of `rows` samples that was lost with its embedding worker before its lookup."""
        self._lost_batches += 1
        self._lost_rows += rows

    def result(self, lost_gradients: int) -> PushCounts:
        """Returns all counts; the batches whose gradient could not be pushed are counted elsewhere."""
        total = sum(self._updates.values(), UpdateCounts())
        return PushCounts(
            total.applied,
            total.absent,
            total.non_finite,
            self._released,
            self._lost_batches,
            self._lost_rows,
            lost_gradients,
        )
