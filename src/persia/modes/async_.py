"""Asynchronous training: each gradient is applied on arrival."""

from __future__ import annotations

from persia.checks import plain_fields
from persia.modes.base import Asynchronous, check_whole
from persia.modes.registry import register

__all__ = ["Async"]


@register
class Async(Asynchronous, frozen=True, tag="async"):
    """Applies each gradient on arrival, to rows and dense parameters, whatever its age.

    A step is one local batch, so the learning rates of Sync do not fit. The dense parameters are stale by about as many
    versions as there are NN workers. The fastest mode, and the baseline of the others.

    Args:
        staleness: maximum number of an NN worker's own steps in flight at a lookup, as in Hybrid; None for no limit. An
            NN worker draws its next token once its own gradient is applied, so none is ever in flight, and numbers from
            1 on act like None. 0 also waits for the gradients of other NN workers that have arrived.
    """

    staleness: int | None = None

    def __post_init__(self) -> None:
        plain_fields(self)
        if self.staleness is not None:
            check_whole("Async", "staleness", self.staleness, 0, "own steps in flight, or None for no limit")

    def initial_depth(self) -> int | None:
        """Returns `staleness`."""
        return self.staleness

    @property
    def waits_for_step(self) -> bool:
        """Whether `staleness` is 0."""
        return self.staleness == 0
