"""Samples from a bounded Zipf distribution without a table, by rejection-inversion (Hörmann and Derflinger, 1996)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from persia.types import Int64Array

__all__ = ["Zipf"]


class Zipf:
    """A Zipf distribution of ranks 0 to n - 1: rank r has a probability proportional to (r + 1) ** -exponent.

    Args:
        n: number of ranks.
        exponent: at least 0 (uniform).
    """

    def __init__(self, n: int, exponent: float) -> None:
        self.n, self.exponent = n, exponent
        self._low = float(self._integral(np.array(1.5))) - 1.0
        self._high = float(self._integral(np.array(n + 0.5)))

    def sample(self, rng: np.random.Generator, count: int) -> Int64Array:
        """Samples `count` ranks. About one candidate in twenty is rejected and sampled again."""
        ranks = np.empty(count, np.int64)
        open_at = np.arange(count)
        while len(open_at):
            area = self._low + rng.random(len(open_at)) * (self._high - self._low)
            x = self._inverse(area)
            k = np.clip(np.floor(x + 0.5), 1, self.n)
            accepted = area >= self._integral(k + 0.5) - k**-self.exponent
            ranks[open_at] = k - 1
            open_at = open_at[~accepted]
        return ranks

    def _integral(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns the antiderivative of x ** -exponent."""
        power = 1.0 - self.exponent
        return np.log(x) if abs(power) < 1e-9 else (x**power - 1.0) / power

    def _inverse(self, y: NDArray[np.float64]) -> NDArray[np.float64]:
        power = 1.0 - self.exponent
        return np.exp(y) if abs(power) < 1e-9 else (1.0 + power * y) ** (1.0 / power)
