"""Synchronous training: a step looks up its rows once the step before is applied."""

from __future__ import annotations

from persia.modes.base import Arrival, Decision, Dense, OnArrival, Reduction, check_reduction, hold_until_full
from persia.modes.registry import register

__all__ = ["Sync"]


@register
class Sync(OnArrival, frozen=True, tag="sync"):
    """Applies every gradient before the next lookup: staleness 0, deterministic for a given seed.

    Args:
        reduction: how the gradients of several NN workers are combined, weighted by their rows. "per_id" averages the
            gradient of an id over the NN workers whose batch has the id: updates are as large as in the other modes, so
            that a switch needs no tuning. "global" averages over all: the gradient of one large batch. Without effect
            with one NN worker.
    """

    reduction: Reduction = "per_id"

    def __post_init__(self) -> None:
        check_reduction("Sync", self.reduction)

    def initial_depth(self) -> int | None:
        """Returns 0: a lookup waits for all own steps."""
        return 0

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
