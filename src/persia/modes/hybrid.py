"""Hybrid training (Persia paper, section 3): embeddings asynchronous with bounded staleness, dense synchronous."""

from __future__ import annotations

from typing import Literal, cast

import msgspec

from persia.checks import MAX_COUNT, check_flag, plain_fields
from persia.errors import ConfigError
from persia.modes.base import (
    Arrival,
    Decision,
    Dense,
    Observation,
    OnArrival,
    Reduction,
    check_reduction,
    check_whole,
    hold_until_full,
)
from persia.modes.registry import register

__all__ = ["Hybrid"]

MAX_AUTO_DEPTH = 64
"""Maximum depth; more steps in flight would hide latencies above those of a healthy network."""

RAISE_ABOVE = 0.02
"""Share of time spent waiting for the gate, above which "auto" raises the depth."""

LOWER_BELOW = 0.01
"""Share of time that one step fewer in flight would cost, below which "auto" lowers the depth."""

LAST_STEP = 0.15
"""Share of time that depth 0, the order of Sync, would cost, below which "auto" lowers the depth from 1 to 0.

On clicks in time order even one step of delay costs accuracy throughout (docs/modes.md).
"""

HELPED = 0.9
"""Ratio of the wait per step after and before a raise, up to which the raise has helped."""

RETRY_WINDOWS = 8
"""Number of windows before "auto" repeats a change that did not help."""

FASTER = 0.5
"""Part of `LAST_STEP` by which the first step in flight must have made training faster, else it is taken back."""

RETRY_FIRST = 64
"""Number of windows before "auto" repeats a first step in flight that did not: training is slower while it tries."""

WARMUP = 500
"""Global steps of the warm-up by default: a delay costs most at the start of a run (docs/papers/persia.md)."""


@register
class Hybrid(OnArrival, frozen=True, tag="hybrid"):
    """Looks rows up ahead of the step: Sync with rows that lack at most the last `staleness` steps.

    As in Sync, a PS applies the gradients of all NN workers of a step as one update, once all have pushed.

    Args:
        staleness: a number >= 1; "auto" for the smallest number with which the training thread does not wait, or 0, as
            in Sync, where that costs less than 15 % of the time; None ("unbounded" in a file) for no limit.
        combine: False applies each gradient to rows on arrival: N updates per step with N NN workers, as up to version
            0.1. For NN workers that do not make steps together, as in a loop without averaging. Without effect with one
            NN worker.
        reduction: divisor of the sum of an id's gradients, as in `Sync`. Without effect with `combine=False`.
        warmup: number of global steps in which the limit rises from 0, as in Sync, to `staleness`. By default 500; 0 if
            there is no limit. Old rows cost most accuracy at the start of training.
        refresh: whether rows that were looked up ahead are brought up to date before their batch is used. A row then
            lacks only steps that were not applied when the batch before was drawn, whatever `staleness` is. False is
            the paper's algorithm: rows stay as they were looked up.
    """

    staleness: int | Literal["auto", "unbounded"] | None = "auto"
    combine: bool = True
    reduction: Reduction = "global"
    warmup: int | None = None
    refresh: bool = True

    def __post_init__(self) -> None:
        plain_fields(self)
        if self.staleness == "unbounded":  # TOML has no null.
            msgspec.structs.force_setattr(self, "staleness", None)
        if self.warmup is None:
            msgspec.structs.force_setattr(self, "warmup", WARMUP if self.staleness is not None else 0)
        check_flag("Hybrid.combine", self.combine, field="mode.combine")
        check_flag("Hybrid.refresh", self.refresh, field="mode.refresh")
        check_reduction("Hybrid", self.reduction)
        staleness = self.staleness
        number = isinstance(staleness, int) and not isinstance(staleness, bool) and 1 <= staleness <= MAX_COUNT
        if not (number or staleness is None or staleness == "auto"):
            raise ConfigError(
                f"Invalid Hybrid.staleness = {staleness!r}; expected a whole number from 1 to {MAX_COUNT}, 'auto', or "
                "None for no limit. For staleness 0 use the mode Sync.",
                field="mode.staleness",
            )
        check_whole("Hybrid", "warmup", self.warmup, 0, "the global steps in which the limit on staleness rises")
        if self.warmup and self.staleness is None:
            raise ConfigError(
                f"Invalid Hybrid.warmup = {self.warmup}; expected 0, as staleness = None has no limit for a warm-up to "
                "rise to. Set staleness to a number or 'auto', or leave warmup out.",
                field="mode.warmup",
            )

    def group(self, nn_workers: int, local_batch: int) -> int:
        """Returns the number of NN workers; 1 if gradients are not combined."""
        return nn_workers if self.combine else 1

    def arrive(self, arrival: Arrival) -> Decision:
        """Holds gradients until all of the step have arrived."""
        return hold_until_full(arrival)

    @property
    def lookahead(self) -> int:
        """Returns 1 for "auto", whose depth may be 0; else 0."""
        return int(self.staleness == "auto")

    def initial_depth(self) -> int | None:
        """Returns `staleness`, or 1 for "auto"."""
        return 1 if self.staleness == "auto" else cast("int | None", self.staleness)

    def next_depth(self, depth: int | None, seen: Observation) -> int | None:
        """Returns the depth for the next window; it changes only with "auto".

        Raises it by one if the training thread waited for the gate. If the raise did not help, something else is slow,
        such as a PS, and the depth is lowered by two, from 2 or 1 by one. Lowers it by one if that would cost no
        waiting, but not soon after a raise. A change that did not help is not repeated for some windows, so that the
        depth does not oscillate. The last step in flight must save more, `LAST_STEP`, and prove it: where all roles
        share the cores, lookups that are hidden may slow down what hides them.
        """
        if self.staleness != "auto":
            return depth
        assert depth is not None
        settled = seen.change <= 0 or seen.windows >= RETRY_WINDOWS
        seconds, least = seen.elapsed / seen.steps, FASTER * LAST_STEP
        if depth == 1 and seen.change > 0 and seen.windows == 1 and seconds > (1 - least) * seen.seconds_before > 0:
            return 0
        no_slower = 0 < seconds < (1 + least) * seen.seconds_before
        if depth == 0 and seen.change < 0 and no_slower and seen.windows < RETRY_FIRST:
            return 0
        if depth == 1 and settled and seen.waited + seen.would_wait < LAST_STEP * seen.elapsed:
            return 0
        if seen.waited > (RAISE_ABOVE if depth else LAST_STEP) * seen.elapsed:
            raised = depth > 0 and seen.change > 0 and seen.windows == 1
            if raised and seen.waited > HELPED * seen.before * seen.steps:
                # By two, but to 1 first; otherwise noise would slowly raise a useless depth.
                return max(depth - 2, min(depth - 1, 1))
            taken_back = seen.change < 0 and seen.before * seen.steps > RAISE_ABOVE * seen.elapsed
            if taken_back and seen.windows < RETRY_WINDOWS:
                return depth
            return min(depth + 1, MAX_AUTO_DEPTH)
        if not (settled and depth):
            return depth
        return depth - 1 if seen.would_wait < LOWER_BELOW * seen.elapsed else depth

    def depth_at(self, depth: int | None, step: int) -> int | None:
        """Returns a share of the depth in the warm-up, rounded down."""
        warmup = cast("int", self.warmup)
        return depth if depth is None or step >= warmup else depth * step // warmup

    def dense(self) -> Dense:
        """Returns all-reduce, which overlaps with the backward pass."""
        return Dense.ALL_REDUCE
