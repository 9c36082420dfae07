"""Asynchronous bulk-synchronous training: BSP of the GBA paper (arXiv 2205.11048, sections 3.2 and 5.1)."""

from __future__ import annotations

from persia.checks import plain_fields
from persia.modes.base import (
    Arrival,
    Asynchronous,
    Decision,
    Reduction,
    check_reduction,
    check_whole,
    hold_until_full,
)
from persia.modes.registry import register

__all__ = ["Bsp"]


@register
class Bsp(Asynchronous, frozen=True, tag="bsp"):
    """Averages and applies any `batches` gradients, whatever their version: Gba without tokens.

    Args:
        batches: number of gradients of a step, the paper's b2.
        reduction: divisor of the sum of an id's gradients, as in `Sync`.
    """

    batches: int
    reduction: Reduction = "global"

    def __post_init__(self) -> None:
        plain_fields(self)
        check_whole("Bsp", "batches", self.batches, 1, "gradients of a step")
        check_reduction("Bsp", self.reduction)

    def group(self, nn_workers: int, local_batch: int) -> int:
        """Returns `batches`."""
        return self.batches

    def arrive(self, arrival: Arrival) -> Decision:
        """Holds gradients until there are `batches`."""
        return hold_until_full(arrival)
