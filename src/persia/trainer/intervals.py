"""`Interval`: checkpoints and recovery points by global steps, or by time."""

from __future__ import annotations

import time
from collections.abc import Callable

from persia.nn.replicas import Replicas

__all__ = ["Interval"]

FIRST_LOOK = 16
"""Steps before the speed of training is known well enough to predict the step at which a time is over."""

ALMOST = 0.95
"""Fraction of an interval in seconds after which it is due."""


class Interval:
    """Decides when something is due that is done every so many global steps, seconds, or both.

    All NN workers make the same calls and get the same answers.

    Args:
        step: returns the global step.
        replicas: the time is that of the first NN worker.
        every_steps: None for no bound in steps.
        every_seconds: None for no bound in seconds.
    """

    def __init__(
        self, step: Callable[[], int], replicas: Replicas, every_steps: int | None, every_seconds: float | None
    ) -> None:
        self._step = step
        self._replicas = replicas
        self._every_steps = every_steps
        self._every_seconds = every_seconds
        self._began = self._last = time.monotonic()
        self._first_step = step()
        self._next_step = self._after()

    def boundary(self) -> int | None:
        """Returns the global step at which it may be due, where the phase has to end; None for never."""
        if self._every_seconds is None:
            return self._next_step
        look = self._step() + self._replicas.run_on_rank0(self._steps_left, int)
        return look if self._next_step is None else min(look, self._next_step)

    def due(self) -> bool:
        """Returns whether it is due now; if so, the next interval begins here. Call it between two phases."""
        due = self._next_step is not None and self._step() >= self._next_step
        if self._every_seconds is not None and not due:
            late = (time.monotonic() - self._last) / self._every_seconds
            due = self._replicas.run_on_rank0(lambda: late >= ALMOST, bool)
        if due:
            self._next_step, self._last = self._after(), time.monotonic()
        return due

    def _after(self) -> int | None:
        return None if self._every_steps is None else self._step() + self._every_steps

    def _steps_left(self) -> int:
        assert self._every_seconds is not None
        now = time.monotonic()
        steps = self._step() - self._first_step
        rate = steps / (now - self._began)
        return max(1, int((self._last + self._every_seconds - now) * rate)) if steps else FIRST_LOOK
