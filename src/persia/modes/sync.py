"""Synchronous training: a step looks up its rows after the step before has been applied."""

from __future__ import annotations

import msgspec

from persia.errors import ConfigError
from persia.modes.base import Aggregation, Dense, Observation, Reduction

__all__ = ["Sync"]


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
        if self.reduction not in ("per_id", "global"):
            raise ConfigError(
                f"Sync.reduction = {self.reduction!r}; give 'per_id' or 'global'.", field="mode.reduction"
            )

    def initial_depth(self) -> int | None:
        """No step may be missing."""
        return 0

    def next_depth(self, depth: int | None, seen: Observation) -> int | None:
        """Never changes."""
        return depth

    def gate(self, in_flight: int, depth: int | None) -> bool:
        """Opens when all earlier steps are applied."""
        return in_flight == 0

    def aggregate(self, arrived: int, nn_workers: int) -> Aggregation:
        """The gradients of all NN workers of a step are applied together."""
        return Aggregation.APPLY if arrived >= nn_workers else Aggregation.HOLD

    def dense(self) -> Dense:
        """All-reduce."""
        return Dense.ALL_REDUCE
