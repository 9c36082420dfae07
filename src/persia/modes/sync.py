"""Synchronous training: the rows of a step have the updates of all steps before it."""

from __future__ import annotations

from persia.modes.base import Arrival, Decision, Dense, OnArrival, Reduction, check_reduction, hold_until_full
from persia.modes.registry import register

__all__ = ["Sync"]

LOOKAHEAD = 4
"""Number of steps by which lookups run ahead, where rows are elsewhere or on disk. More hide longer lookups, and cost
memory."""


@register
class Sync(OnArrival, frozen=True, tag="sync"):
    """Applies every gradient before the next batch is used: staleness 0, deterministic for a given seed.

    Lookups run ahead where rows are elsewhere or on disk, with the same results (docs/concepts/fresh-rows.md).

    Args:
        reduction: divisor of the sum of an id's gradients over NN workers, weighted by the rows of their batches.
            "global" divides by the rows of all NN workers, for the gradient of one large batch: a step does not depend
            on the number of NN workers that share it. "per_id" divides by the rows of the NN workers whose batch has
            the id: updates of rare ids are larger, by up to the number of NN workers. Without effect with one.
    """

    reduction: Reduction = "global"

    def __post_init__(self) -> None:
        check_reduction("Sync", self.reduction)

    def initial_depth(self) -> int | None:
        """Returns 0: rows lack no step."""
        return 0

    @property
    def refresh(self) -> bool:
        """True: rows that were looked up ahead are current when they are used."""
        return True

    @property
    def lookahead(self) -> int:
        """Returns 4."""
        return LOOKAHEAD

    @property
    def waits_for_step(self) -> bool:
        """True: staleness is 0."""
        return True

    def group(self, nn_workers: int, local_batch: int) -> int:
        """Returns the number of NN workers."""
        return nn_workers

    def arrive(self, arrival: Arrival) -> Decision:
        """Holds gradients until all NN workers have pushed theirs."""
        return hold_until_full(arrival)

    def dense(self) -> Dense:
        """Returns all-reduce."""
        return Dense.ALL_REDUCE
