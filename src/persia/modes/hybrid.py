"""Hybrid training (Persia paper, section 3): embeddings asynchronous with bounded staleness, dense synchronous."""

from __future__ import annotations

from typing import Literal, cast

import msgspec

from persia.errors import ConfigError
from persia.modes.base import Dense, Observation, OnArrival
from persia.modes.registry import register

__all__ = ["Hybrid"]

MAX_AUTO_DEPTH = 64
"""More own steps in flight than this hide no latency that a healthy network has."""

RAISE_ABOVE = 0.02
"""Share of the time spent waiting for the gate above which "auto" looks further ahead."""

LOWER_BELOW = 0.01
"""Share of the time that one step fewer in flight would cost, below which "auto" does with one fewer."""

HELPED = 0.9
"""Looking further ahead has helped if the wait per step fell below so much of what it was."""

PATIENCE = 8
"""Windows before "auto" tries again what has just proved wrong."""


@register
class Hybrid(OnArrival, frozen=True, tag="hybrid"):
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
        """Fixed, unless "auto": then as few as keep the training thread from waiting.

        One more where it waits for the gate. If that did not help, something else is slow, such as the PS: it is taken
        back, and one more with it. One fewer where that would cost no waiting, but not soon after a raise. What has
        failed is not tried again for some windows, so the depth does not swing between two values.
        """
        if self.staleness != "auto":
            return depth
        assert depth is not None
        if seen.waited > RAISE_ABOVE * seen.elapsed:
            raised = seen.change > 0 and seen.windows == 1
            if raised and seen.waited > HELPED * seen.before * seen.steps:
                return max(depth - 2, 1)  # By two, else chance would slowly lift a depth that is of no use.
            taken_back = seen.change < 0 and seen.before * seen.steps > RAISE_ABOVE * seen.elapsed
            if taken_back and seen.windows < PATIENCE:
                return depth
            return min(depth + 1, MAX_AUTO_DEPTH)
        if seen.change > 0 and seen.windows < PATIENCE:
            return depth
        return max(depth - 1, 1) if seen.would_wait < LOWER_BELOW * seen.elapsed else depth

    def dense(self) -> Dense:
        """All-reduce, overlapped with the backward pass."""
        return Dense.ALL_REDUCE
