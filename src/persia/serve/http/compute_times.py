"""Estimates how long a queue takes, from times of computation by number of samples."""

from __future__ import annotations

__all__ = ["ComputeTimes"]

WEIGHT = 0.2
"""Weight of the newest time in the running mean."""


class ComputeTimes:
    """Running means of the time that a computation takes, by number of samples in powers of two.

    Not thread-safe.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def add(self, rows: int, seconds: float) -> None:
        """Adds a computation of `rows` samples."""
        size = rows.bit_length()
        mean = self._seconds.get(size, seconds)
        self._seconds[size] = mean + WEIGHT * (seconds - mean)

    def seconds(self, rows: int) -> float:
        """Returns the expected time for `rows` samples. Falls back to the largest smaller size seen, then to 0."""
        size = rows.bit_length()
        known = [each for each in self._seconds if each <= size]
        return self._seconds[max(known)] if known else 0.0

    def queue(self, rows: int, batch: int) -> float:
        """Returns the expected time of `rows` samples in batches of `batch`."""
        whole, rest = divmod(rows, batch)
        return whole * self.seconds(batch) + (self.seconds(rest) if rest else 0.0)
