"""Steps at which a frozen v is updated, farther and farther apart."""

from __future__ import annotations

__all__ = ["VarianceRefresh"]

LEAST_DECAY = 0.95
"""Largest loss of v in one update: of fewer than about 20 squares, v is tiny by chance for some elements."""


class VarianceRefresh:
    """Schedule of the updates of a frozen v, as in 0/1 Adam (arXiv 2202.06009, section 6).

    The j-th update comes 2^floor(j / kappa) steps after the one before, where update 0 is the last step of the warm-up.
    D steps after it, an update with the average g of the gradients is::

        v <- d v + (1 - d) g^2,  d = max(beta2^D, min(beta2, 0.95))

    so v forgets as fast as in Adam, up to a limit: with the weight of 1 - beta2^D alone, the v of late updates would be
    the square of one gradient.

    Args:
        kappa: number of updates at the same distance.

    Attributes:
        count: number of updates since v was frozen.
        last: step of the last one.
    """

    def __init__(self, kappa: int) -> None:
        self._kappa = kappa
        self.count = self.last = 0

    def due(self, step: int) -> bool:
        """Whether v is updated in this step."""
        return step - self.last >= 1 << self.count // self._kappa

    def decay(self, beta2: float, step: int) -> float:
        """Returns d for an update in this step."""
        return max(beta2 ** (step - self.last), min(beta2, LEAST_DECAY))

    def updated(self, step: int) -> None:
        """Counts the update of this step."""
        self.count, self.last = self.count + 1, step

    def restart(self, step: int) -> None:
        """Starts anew: v was frozen after this step."""
        self.count, self.last = 0, step
