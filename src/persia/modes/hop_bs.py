"""Bounded staleness between NN workers: Hop-BS of the GBA paper, section 5.1 (Luo et al., Hop, ASPLOS 2019)."""

from __future__ import annotations

from persia.modes.base import Asynchronous, check_whole
from persia.modes.registry import register

__all__ = ["HopBs"]


@register
class HopBs(Asynchronous, frozen=True, tag="hop_bs"):
    """Applied on arrival, but the fastest NN worker is never more than `bound` steps ahead of the slowest.

    As fast as the slowest NN worker in the long run: it only evens out what is slow for a moment.

    Args:
        bound: the largest gap, the paper's b1. With 1 all NN workers go in lock-step.
    """

    bound: int

    def __post_init__(self) -> None:
        check_whole("HopBs", "bound", self.bound, 1, "steps that an NN worker may be ahead of the slowest")

    def gate(self, in_flight: int, depth: int | None, ahead: int = 0) -> bool:
        """Shut for an NN worker that is `bound` steps ahead: after one more it would be too far."""
        return ahead < self.bound
