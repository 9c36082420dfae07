"""When something is due that needs a rest: a checkpoint, a snapshot."""

from __future__ import annotations

import time
from collections.abc import Callable

from persia.nn.replicas import Replicas

__all__ = ["Interval"]

FIRST_LOOK = 16
"""Steps after which the speed of training is known well enough to tell when something by time is due."""

ALMOST = 0.95
"""What is by time is due after so much of the time."""


class Interval:
    """Something is done every so many global steps, or every so many seconds, or both. All NN workers ask alike.

    Args:
        step: the global step.
        replicas: agree on the time, which is the first one's.
        every_steps: None for no such bound.
        every_seconds: likewise.
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
        """Global step at which it may be due, so that training is to rest; None for never. The same on each."""
        if self._every_seconds is None:
            return self._next_step
        look = self._step() + int(self._replicas.run_on_rank0(self._steps_left))
        return look if self._next_step is None else min(look, self._next_step)

    def due(self) -> bool:
        """At rest: whether it is to be done now; if so, the next time is counted from here. The same on each."""
        due = self._next_step is not None and self._step() >= self._next_step
        if self._every_seconds is not None and not due:
            late = (time.monotonic() - self._last) / self._every_seconds
            due = bool(self._replicas.run_on_rank0(lambda: "due" if late >= ALMOST else ""))
        if due:
            self._next_step, self._last = self._after(), time.monotonic()
        return due

    def _after(self) -> int | None:
        return None if self._every_steps is None else self._step() + self._every_steps

    def _steps_left(self) -> str:
        assert self._every_seconds is not None
        now = time.monotonic()
        steps = self._step() - self._first_step
        rate = steps / (now - self._began)
        return str(max(1, int((self._last + self._every_seconds - now) * rate)) if steps else FIRST_LOOK)
