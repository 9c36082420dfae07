"""Schedule of the steps at which a frozen v is updated, at increasing distances."""

from __future__ import annotations

__all__ = ["VarianceRefresh"]

MOST_WEIGHT = 0.05
"""Maximum weight of one gradient: with fewer than about 20 squares, v is tiny by chance for some elements."""


class VarianceRefresh:
    """Schedule of the updates of a frozen v, as in 0/1 Adam (arXiv 2202.06009, section 6).

    The j-th update comes 2^floor(j / kappa) steps after the previous one; update 0 is the last step of the warm-up.
    D steps after it, an update in step t, with the average g of the gradients, is::

        v <- (1 - w) v + w g^2,  w = min((1 - beta2^D) / (1 - beta2^t), max(0.05, 1 - beta2))

    Without the limit of 0.05 this is Adam's corrected v after D equal gradients; with large D it would be the square of
    one gradient.

    Args:
        kappa: number of updates at the same distance.

    Attributes:
        count: number of updates since v was frozen.
        last: step of the last update.
    """

    def __init__(self, kappa: int) -> None:
        self._kappa = kappa
        self.count = self.last = 0

    def due(self, step: int) -> bool:
        """Whether v is updated in this step."""
        return step - self.last >= 1 << self.count // self._kappa

    def weight(self, beta2: float, step: int, updates: int) -> float:
        """Returns w for an update in this step.

        Args:
            beta2: decay of v in Adam.
            step: the step.
            updates: number of steps so far, including this one, in which the parameter had a gradient.
        """
        share = (1.0 - beta2 ** (step - self.last)) / (1.0 - beta2 ** max(1, updates))
        return min(share, max(MOST_WEIGHT, 1.0 - beta2))

    def updated(self, step: int) -> None:
        """Counts the update of this step."""
        self.count, self.last = self.count + 1, step

    def restart(self, step: int) -> None:
        """Restarts the schedule: v was frozen after this step."""
        self.count, self.last = 0, step
