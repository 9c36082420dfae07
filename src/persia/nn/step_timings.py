"""How long this NN worker computes each batch: told to the coordinator now and then, for `persia.modes.Auto`."""

from __future__ import annotations

import time
from collections.abc import Callable

from persia.services import Tokens
from persia.types import StepTiming

__all__ = ["StepTimings"]


class StepTimings:
    """For one thread.

    Args:
        tokens: who is told.
        rank: of this NN worker.
        every: seconds between two reports, at least.
        again: tells the coordinator what to decide by, in case that it has started anew.
    """

    def __init__(self, tokens: Tokens, rank: int, every: float, again: Callable[[], object]) -> None:
        self._tokens = tokens
        self._rank = rank
        self._every = every
        self._again = again
        self._sent = time.monotonic()
        self._untold: list[tuple[float, float]] = []

    def add(self, began: float) -> None:
        """A batch that was begun at `began` on the monotonic clock is computed. Calls the coordinator now and then."""
        now = time.monotonic()
        self._untold.append((began, now - began))
        if now - self._sent < self._every:
            return
        self._sent = now
        untold, self._untold = self._untold, []
        if not self._tokens.timed(self._rank, [StepTiming(now - start, seconds) for start, seconds in untold]):
            self._again()
