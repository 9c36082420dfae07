"""The scale of v by tensor, which follows the gradients after v is frozen."""

from __future__ import annotations

__all__ = ["TrackedScale"]


class TrackedScale:
    """Running mean of the squared norm of each tensor's gradients, and its value when v was frozen.

    With g_w,p the gradient of worker w for tensor p, n the number of workers and q_p^ the corrected mean::

        q_p <- beta2 q_p + (1 - beta2) 1/n sum_w |g_w,p|^2,  u_p <- beta2 u_p + (1 - beta2),  q_p^ = q_p / u_p
        s_p = sqrt(max(q_p^ / q_p^ when v was frozen, floor))

    After the warm-up no worker has the average gradient, so the norms are norms of the workers' own gradients; noise
    that raises all of them cancels in the ratio. All values are float64 and the same on all workers.

    Args:
        count: number of tensors.
        floor: minimum of s_p^2. Compression gives a tensor noise as large as its neighbors' momentum, which division by
            a scale near 0 would amplify.

    Attributes:
        values: (q, u, q^ when v was frozen) by tensor. Before v is frozen, the last one is 0 and the scale is 1.
    """

    def __init__(self, count: int, floor: float) -> None:
        self._floor = floor
        self.values: list[tuple[float, float, float]] = [(0.0, 0.0, 0.0)] * count

    def observe(self, number: int, square: float, beta2: float) -> None:
        """Adds the mean of the squared norms of the workers' gradients for a tensor."""
        q, u, frozen = self.values[number]
        self.values[number] = (beta2 * q + (1.0 - beta2) * square, beta2 * u + (1.0 - beta2), frozen)

    def freeze(self) -> None:
        """Sets all scales to 1, relative to the current means."""
        self.values = [(q, u, q / u if u else 0.0) for q, u, _ in self.values]

    def fold(self) -> list[float]:
        """Returns the scales and resets them to 1. Tensors whose v was frozen untracked remain untracked."""
        factors = self.factors()
        self.values = [(q, u, q / u if frozen else 0.0) for q, u, frozen in self.values]
        return factors

    def factors(self) -> list[float]:
        """Returns s by tensor."""
        return [max(q / u / frozen, self._floor) ** 0.5 or 1.0 if u and frozen else 1.0 for q, u, frozen in self.values]
