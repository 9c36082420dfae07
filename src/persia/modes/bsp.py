"""Asynchronous bulk-synchronous training: BSP of the GBA paper (arXiv 2205.11048, sections 3.2 and 5.1)."""

from __future__ import annotations

from persia.modes.base import Arrival, Asynchronous, Decision, check_whole, hold_until_full
from persia.modes.registry import register

__all__ = ["Bsp"]


@register
class Bsp(Asynchronous, frozen=True, tag="bsp"):
    """Any `batches` gradients are averaged and applied, whatever their version: Gba without tokens.

    Args:
        batches: gradients that make a step, the paper's b2.
    """

    batches: int

    def __post_init__(self) -> None:
        check_whole("Bsp", "batches", self.batches, 1, "how many gradients are applied together")

    def group(self, nn_workers: int, local_batch: int) -> int:
        """`batches`, of any NN workers."""
        return self.batches

    def arrive(self, arrival: Arrival) -> Decision:
        """Held until there are `batches`."""
        return hold_until_full(arrival)
