"""Synchronous training: a step looks up its rows after the step before has been applied."""

from __future__ import annotations

import msgspec

from persia.modes.base import (
    Arrival,
    Decision,
    Dense,
    Observation,
    Reduction,
    RowLimit,
    check_reduction,
    hold_until_full,
)
from persia.modes.registry import register

__all__ = ["Sync"]


@register
class Sync(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="sync"):
    """Every gradient is applied before the next lookup: staleness 0, deterministic given a seed.

    With one NN worker `reduction` changes nothing.

    Args:
        reduction: how the gradients of several NN workers become one, weighted by their rows. "per_id" averages an
            id's gradient over the NN workers whose batch has the id: updates are as large as in the other modes, so
            that a switch needs no tuning. "global" averages over all: exactly the gradient of one large batch.
    """

    reduction: Reduction = "per_id"

    def __post_init__(self) -> None:
        check_reduction("Sync", self.reduction)

    def initial_depth(self) -> int | None:
        """No step may be missing."""
        return 0

    def next_depth(self, depth: int | None, seen: Observation) -> int | None:
        """Never changes."""
        return depth

    def gate(self, in_flight: int, depth: int | None, ahead: int = 0) -> bool:
        """Opens when all earlier steps are applied."""
        return in_flight == 0

    @property
    def waits_for_step(self) -> bool:
        """True: staleness is 0."""
        return True

    def token(self, number: int, version: int, group: int) -> int:
        """The own global step, which equals k."""
        return version

    def group(self, nn_workers: int, local_batch: int) -> int:
        """One gradient of every NN worker."""
        return nn_workers

    def arrive(self, arrival: Arrival) -> Decision:
        """The gradients of all NN workers of a step are applied together."""
        return hold_until_full(arrival)

    def weight(self, step: int, token: int) -> float:
        """Nothing is ever stale."""
        return 1.0

    def row_limit(self, step: int, token: int) -> RowLimit:
        """All rows: nothing is ever stale."""
        return RowLimit(None, step)

    def dense(self) -> Dense:
        """All-reduce."""
        return Dense.ALL_REDUCE
