"""What the draws of a window tell a mode that adapts its depth."""

from __future__ import annotations

from persia.modes import Observation

__all__ = ["Window"]


class Window:
    """Sums over the draws of consecutive windows. Not thread-safe.

    It rests on one fact: with one step fewer in flight the gate opens later by the time of one step, and rows that
    had to pass it are ready later by as much.

    Args:
        accumulation: batches per step.
    """

    def __init__(self, accumulation: int) -> None:
        self._accumulation = accumulation
        self._change = 0
        self._windows = 0
        self._before = 0.0
        self._previous = 0.0  # seconds waited per batch in the window before
        self.restart()

    def restart(self) -> None:
        """Begins a window."""
        self._waited = self._would_wait = self._elapsed = 0.0
        self.draws = 0

    def add(self, seconds: float, lead: float, held: float) -> None:
        """Counts a draw.

        Args:
            seconds: since the draw before, waiting included.
            lead: how long the rows had been ready; negative: how long the training thread waited for them.
            held: how long the gate had held their lookup back.
        """
        wait = max(-lead, 0.0)
        step = self._accumulation * (seconds - wait)
        self._waited += min(wait, held)
        self._would_wait += max(step - max(lead, 0.0), 0.0)
        self._elapsed += seconds
        self.draws += 1

    def observation(self) -> Observation:
        """Ends the window."""
        self._windows += 1
        seen = Observation(
            self._waited, self._elapsed, self.draws, self._would_wait, self._change, self._windows, self._before
        )
        self._previous = self._waited / self.draws
        self.restart()
        return seen

    def changed(self, by: int) -> None:
        """The depth was changed after the window that has just ended."""
        self._change, self._windows, self._before = by, 0, self._previous
