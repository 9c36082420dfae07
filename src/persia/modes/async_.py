"""Asynchronous training: every gradient is applied as it arrives."""

from __future__ import annotations

from persia.modes.base import Asynchronous, check_whole
from persia.modes.registry import register

__all__ = ["Async"]


@register
class Async(Asynchronous, frozen=True, tag="async"):
    """Rows and dense parameters change with each gradient, by whichever NN worker and however old.

    A step is one local batch: learning rates of Sync do not fit, and the dense parameters are stale by about as many
    versions as there are NN workers. Fast, and the baseline of all other modes.

    Args:
        staleness: at most so many own steps of an NN worker lack their applied gradient at a lookup, as in Hybrid;
            0 waits for the own gradient before the next batch. None: no bound.
    """

    staleness: int | None = None

    def __post_init__(self) -> None:
        if self.staleness is not None:
            check_whole("Async", "staleness", self.staleness, 0, "own steps in flight, or None for no bound")

    def initial_depth(self) -> int | None:
        """The bound itself."""
        return self.staleness

    @property
    def waits_for_step(self) -> bool:
        """Whether the bound is 0."""
        return self.staleness == 0
