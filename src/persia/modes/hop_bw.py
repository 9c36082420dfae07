"""Backup workers: Hop-BW of the GBA paper, section 5.1 (Luo et al., Hop, ASPLOS 2019)."""

from __future__ import annotations

from persia.errors import ConfigError
from persia.modes.base import Action, Arrival, Asynchronous, Decision, check_whole, hold_until_full
from persia.modes.registry import register

__all__ = ["HopBw"]


@register
class HopBw(Asynchronous, frozen=True, tag="hop_bw"):
    """Of each step the first N - backup gradients are averaged and applied; later ones of that step are dropped.

    No gradient is stale, but the batches of the slowest NN workers are lost to training. Drops are counted.

    Args:
        backup: gradients of a step that are not waited for, the paper's b3; less than the number of NN workers.
    """

    backup: int

    def __post_init__(self) -> None:
        check_whole("HopBw", "backup", self.backup, 0, "gradients of a step that are not waited for")

    def initial_depth(self) -> int | None:
        """No step may be missing."""
        return 0

    @property
    def waits_for_step(self) -> bool:
        """True: a gradient of an older step would be dropped."""
        return True

    def group(self, nn_workers: int, local_batch: int) -> int:
        """All but `backup` NN workers."""
        if self.backup >= nn_workers:
            raise ConfigError(
                f"HopBw.backup = {self.backup} of {nn_workers} NN workers leaves none to wait for; give at most "
                f"{nn_workers - 1}.",
                field="mode.backup",
            )
        return nn_workers - self.backup

    def arrive(self, arrival: Arrival) -> Decision:
        """Dropped if its step is over, else held until the step has enough."""
        return Decision(Action.DROP, 0.0) if arrival.token < arrival.step else hold_until_full(arrival)
