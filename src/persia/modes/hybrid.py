"""Hybrid training (Persia paper, section 3): embeddings asynchronous with bounded staleness, dense synchronous."""

from __future__ import annotations

from typing import Literal, cast

import msgspec

from persia.errors import ConfigError
from persia.modes.base import Aggregation, Dense, Observation, Reduction

__all__ = ["Hybrid"]

MAX_AUTO_DEPTH = 64
"""More own steps in flight than this hide no latency that a healthy network has."""

RAISE_ABOVE = 0.02
"""Share of the time spent waiting for rows above which "auto" looks further ahead."""


class Hybrid(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="hybrid"):
    """Lookups run ahead of the step; at most `staleness` own steps lack their gradient at a lookup.

    Args:
        staleness: a number >= 1; "auto" keeps as few steps in flight as keep the training thread from waiting;
            None ("unbounded" in a file) sets no bound.
    """

    staleness: int | Literal["auto", "unbounded"] | None = "auto"

    def __post_init__(self) -> None:
        if self.staleness == "unbounded":  # TOML has no null.
            msgspec.structs.force_setattr(self, "staleness", None)
        number = isinstance(self.staleness, int) and not isinstance(self.staleness, bool) and self.staleness >= 1
        if not (number or self.staleness is None or self.staleness == "auto"):
            raise ConfigError(
                f"Hybrid.staleness = {self.staleness!r}; give a whole number >= 1, 'auto', or None for no bound "
                "(staleness 0 is the mode Sync).",
                field="mode.staleness",
            )

    def initial_depth(self) -> int | None:
        """The bound itself, or the least that overlaps anything."""
        return 1 if self.staleness == "auto" else cast("int | None", self.staleness)

    def next_depth(self, depth: int | None, seen: Observation) -> int | None:
        """Fixed, unless "auto": one more while the training thread waits, one less while it does not."""
        if self.staleness != "auto":
            return depth
        assert depth is not None
        if seen.waited > RAISE_ABOVE * seen.elapsed:
            return min(depth + 1, MAX_AUTO_DEPTH)
        return max(depth - 1, 1)

    def gate(self, in_flight: int, depth: int | None) -> bool:
        """Opens while fewer than depth + 1 own steps are between lookup and applied gradient."""
        return depth is None or in_flight <= depth

    def aggregate(self, arrived: int, nn_workers: int) -> Aggregation:
        """On arrival."""
        return Aggregation.APPLY

    @property
    def reduction(self) -> Reduction:
        """Of no effect: gradients of several NN workers are never summed."""
        return "per_id"

    def dense(self) -> Dense:
        """All-reduce, overlapped with the backward pass."""
        return Dense.ALL_REDUCE
