"""Bounded staleness between NN workers: Hop-BS of the GBA paper, section 5.1 (Luo et al., Hop, ASPLOS 2019)."""

from __future__ import annotations

from persia.checks import plain_fields
from persia.modes.base import Asynchronous, check_whole
from persia.modes.registry import register

__all__ = ["HopBs"]


@register
class HopBs(Asynchronous, frozen=True, tag="hop_bs"):
    """Applies gradients on arrival, and keeps the fastest NN worker within `bound` steps of the slowest.

    In the long run as fast as the slowest NN worker: it absorbs only short slowdowns.

    Args:
        bound: maximum gap in steps, the paper's b1. With 1, all NN workers advance in lock-step.
    """

    bound: int

    def __post_init__(self) -> None:
        plain_fields(self)
        check_whole("HopBs", "bound", self.bound, 1, "steps that an NN worker may be ahead of the slowest")

    def gate(self, in_flight: int, depth: int | None, ahead: int = 0) -> bool:
        """Closes for an NN worker that is `bound` steps ahead of the slowest."""
        return ahead < self.bound
