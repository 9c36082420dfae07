"""Bounds of the phases of a `fit` call: checkpoints, recovery points, evaluations, and its end."""

from __future__ import annotations

import time
from collections.abc import Callable

from persia.nn.dense_step import DenseStep
from persia.nn.replicas import Replicas
from persia.trainer.options import TrainerOptions
from persia.trainer.state import TrainingState

__all__ = ["Bounds", "Interval"]

FIRST_CHECK = 16
"""Steps after which an interval in seconds is checked first. Later checks are predicted from the speed of training."""

ALMOST = 0.95
"""Fraction of an interval in seconds after which it is due."""


class Interval:
    """Decides when something is due that is done every n global steps, every n seconds, or both.

    All NN workers make the same calls and get the same answers.

    Args:
        step: returns the global step.
        replicas: the first NN worker's time counts.
        every_steps: None for no bound in steps.
        every_seconds: None for no bound in seconds.
        aligned: whether intervals in steps end at multiples of `every_steps`, in whatever calls of `fit`; otherwise
            they are counted from the last time that it was due.
    """

    def __init__(
        self,
        step: Callable[[], int],
        replicas: Replicas,
        every_steps: int | None,
        every_seconds: float | None,
        *,
        aligned: bool = False,
    ) -> None:
        self._step = step
        self._replicas = replicas
        self._every_steps = every_steps
        self._every_seconds = every_seconds
        self._aligned = aligned
        self._began = self._last = time.monotonic()
        self._first_step = step()
        self._next_step = self._step_after()

    def boundary(self) -> int | None:
        """Returns the global step at which it may be due, where the phase has to end; None for never."""
        if self._every_seconds is None:
            return self._next_step
        check = self._step() + self._replicas.run_on_rank0(self._steps_left, int)
        return check if self._next_step is None else min(check, self._next_step)

    def due(self) -> bool:
        """Returns whether it is due now; if so, the next interval begins here. Call it between two phases."""
        due = self._next_step is not None and self._step() >= self._next_step
        if self._every_seconds is not None and not due:
            late = (time.monotonic() - self._last) / self._every_seconds
            due = self._replicas.run_on_rank0(lambda: late >= ALMOST, bool)
        if due:
            self._next_step, self._last = self._step_after(), time.monotonic()
        return due

    def _step_after(self) -> int | None:
        """Returns the step at which the next interval in steps ends."""
        if self._every_steps is None:
            return None
        step = self._step()
        return step + self._every_steps - (step % self._every_steps if self._aligned else 0)

    def _steps_left(self) -> int:
        """Predicts how many steps fit into the rest of the interval in seconds; 1 at least."""
        assert self._every_seconds is not None
        now = time.monotonic()
        steps = self._step() - self._first_step
        rate = steps / (now - self._began)
        return max(1, int((self._last + self._every_seconds - now) * rate)) if steps else FIRST_CHECK


class Bounds:
    """Decides where the phases of one `fit` call end, and when the call itself does.

    All NN workers make the same calls, between two phases, and get the same answers.

    Args:
        state: has the global step.
        network: its replicas agree.
        options: has the intervals of checkpoints, recovery points and evaluations.
        max_steps: most global steps of this call; None for no bound.
        recovery: whether recovery points are kept, as on clusters of processes.
        should_stop: whether this NN worker was asked to stop.
    """

    def __init__(
        self,
        state: TrainingState,
        network: DenseStep,
        options: TrainerOptions,
        max_steps: int | None,
        recovery: bool,
        should_stop: Callable[[], bool],
    ) -> None:
        self._state = state
        self._replicas = network.replicas
        self._should_stop = should_stop
        self._last_step = None if max_steps is None else state.global_step + max_steps
        self._stopped = False
        self._ended_early = False

        def step() -> int:
            return state.global_step

        every_seconds = options.checkpoint_seconds(in_processes=recovery)
        self.checkpoints = Interval(step, self._replicas, options.checkpoint_every_steps, every_seconds)
        seconds = options.recovery_point_every_seconds if recovery else None
        self.recovery_points = Interval(step, self._replicas, None, seconds)
        self.evaluations = Interval(step, self._replicas, options.eval_every_steps, None, aligned=True)

    def end_early(self) -> None:
        """Ends the call between two phases. All NN workers call it."""
        self._ended_early = True

    def stop_requested(self) -> bool:
        """Returns whether any NN worker was asked to stop. Blocks until all have called it."""
        self._stopped = any(self._replicas.gather(b"stop" if self._should_stop() else b""))
        return self._stopped

    def reached(self) -> bool:
        """Returns whether `max_steps` is reached, or the call was asked to stop, or ends early."""
        if self._stopped or self._ended_early:
            return True
        return self._last_step is not None and self._state.global_step >= self._last_step

    def steps_left(self, next_switch: int | None) -> int | None:
        """Returns how many steps the next phase may make; None for any number.

        Args:
            next_switch: global step at which the schedule changes the mode, if it does.
        """
        intervals = (self.checkpoints, self.recovery_points, self.evaluations)
        candidates = (self._last_step, *(interval.boundary() for interval in intervals), next_switch)
        bounds = [step for step in candidates if step is not None]
        return min(bounds) - self._state.global_step if bounds else None
