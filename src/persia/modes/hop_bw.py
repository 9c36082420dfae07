"""Backup workers: Hop-BW of the GBA paper, section 5.1 (Luo et al., Hop, ASPLOS 2019)."""

from __future__ import annotations

from persia.checks import plain_fields
from persia.errors import ConfigError
from persia.modes.base import (
    Action,
    Arrival,
    Asynchronous,
    Decision,
    Reduction,
    check_reduction,
    check_whole,
    hold_until_full,
)
from persia.modes.registry import register

__all__ = ["HopBw"]


@register
class HopBw(Asynchronous, frozen=True, tag="hop_bw"):
    """Averages and applies the first N - backup gradients of each step; drops the later ones.

    No gradient is stale, but training loses the batches of the slowest NN workers. Drops are counted.

    Args:
        backup: number of gradients per step that it does not wait for, the paper's b3; below the number of NN workers.
        reduction: divisor of the sum of an id's gradients, as in `Sync`.
    """

    backup: int
    reduction: Reduction = "global"

    def __post_init__(self) -> None:
        plain_fields(self)
        check_whole("HopBw", "backup", self.backup, 0, "gradients of a step that are not waited for")
        check_reduction("HopBw", self.reduction)

    def initial_depth(self) -> int | None:
        """Returns 0: a lookup waits for all own steps."""
        return 0

    @property
    def waits_for_step(self) -> bool:
        """True: the gradient of an older step would be dropped."""
        return True

    def group(self, nn_workers: int, local_batch: int) -> int:
        """Returns the number of NN workers less `backup`."""
        if self.backup >= nn_workers:
            raise ConfigError(
                f"Invalid HopBw.backup = {self.backup} with {nn_workers} NN workers; expected at most "
                f"{nn_workers - 1}.",
                field="mode.backup",
            )
        return nn_workers - self.backup

    def arrive(self, arrival: Arrival) -> Decision:
        """Drops a gradient of an earlier step; holds others until the step is complete."""
        return Decision(Action.DROP, 0.0) if arrival.token < arrival.step else hold_until_full(arrival)
