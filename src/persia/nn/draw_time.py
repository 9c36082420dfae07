"""When to draw a token, so that its batch is ready when the network is free, with parameters as new as possible."""

from __future__ import annotations

from collections import deque

__all__ = ["DrawTime"]

RECENT = 8
"""Batches whose times are remembered. The bounds follow a change of speed within as many."""


class DrawTime:
    """Predicts how long after the beginning of a computation the next token is to be drawn. Not thread-safe.

    It is better to draw a little early than to let the network wait: a prediction takes the shortest computation of
    late but one, and the longest draw but one, as one that stalled says nothing about the next.
    """

    def __init__(self) -> None:
        self._computations: deque[float] = deque(maxlen=RECENT)
        self._draws: deque[float] = deque(maxlen=RECENT)

    def computed(self, seconds: float) -> None:
        """Notes how long the network has used a batch."""
        self._computations.append(seconds)

    def drew(self, seconds: float) -> None:
        """Notes how long a draw took: until parameters and rows were there, without waits for other NN workers."""
        self._draws.append(seconds)

    @property
    def delay(self) -> float | None:
        """Seconds from the beginning of a computation to the next draw, at least 0; None before both are known."""
        if not self._computations or not self._draws:
            return None
        return max(0.0, sorted(self._computations)[:2][-1] - sorted(self._draws)[-2:][0])
