"""The policy of `Auto`: mode choices by the step timings of all NN workers."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence

from persia.modes import Auto, AutoEvidence, AutoState, ModeChoice, StepTime, decide
from persia.telemetry.logs import get_logger
from persia.types import StepTiming

__all__ = ["SwitchPolicy"]

LOG = get_logger("persia.modes")

MAX_EVIDENCE = 1_000_000
"""Maximum number of step times, and of mode choices, retained for `persia.modes.rehearse`."""


class SwitchPolicy:
    """Chooses a mode at the end of each window. Not thread-safe.

    A window is decided once all NN workers have reported beyond its end, so that the choices equal those of
    `persia.modes.rehearse` on the same step times; at the latest one window after its end.

    Args:
        auto: the rule.
        nn_workers: number of NN workers.
        asynchronous: whether the asynchronous mode is in force.
    """

    def __init__(self, auto: Auto, nn_workers: int, asynchronous: bool) -> None:
        self.auto = auto
        self.nn_workers = nn_workers
        self._state = AutoState(asynchronous)
        self._end: float | None = None
        self._reported: dict[int, float] = {}
        self._recent: list[StepTime] = []
        self._steps: deque[StepTime] = deque(maxlen=MAX_EVIDENCE)
        self._choices: deque[ModeChoice] = deque(maxlen=MAX_EVIDENCE)

    @property
    def asynchronous(self) -> bool:
        """Whether the last choice was the asynchronous mode."""
        return self._state.asynchronous

    def begin(self, asynchronous: bool) -> None:
        """Discards the open window, as training continues after a pause.

        Args:
            asynchronous: whether the asynchronous mode is in force; a restart may undo a switch.
        """
        if asynchronous != self._state.asynchronous:
            self._state = AutoState(asynchronous)
        self._end = None
        self._recent.clear()
        self._reported.clear()

    def add(self, rank: int, timings: Sequence[StepTiming], now: float) -> ModeChoice | None:
        """Adds a report.

        Args:
            rank: rank of the NN worker.
            timings: step timings since the last report of the NN worker.
            now: seconds since the policy began.

        Returns:
            The choice to switch, if any.
        """
        steps = [StepTime(rank, now - timing.ago, timing.seconds) for timing in timings]
        self._recent += steps
        self._steps.extend(steps)
        self._reported[rank] = now
        if self._end is None:
            if not steps:
                return None
            self._end = min(step.began for step in steps) + self.auto.seconds
        while self._complete(now):
            choice = self._decide(self._end)
            self._end += self.auto.seconds
            if choice is not None and choice.switch:
                return choice
        return None

    def evidence(self) -> AutoEvidence:
        """Returns the last step times and mode choices, up to a million of each."""
        return AutoEvidence(list(self._steps), list(self._choices))

    def _complete(self, now: float) -> bool:
        assert self._end is not None
        if now >= self._end + self.auto.seconds:
            return True
        return len(self._reported) == self.nn_workers and min(self._reported.values()) >= self._end

    def _decide(self, end: float) -> ModeChoice | None:
        known = [step for step in self._recent if step.began + step.seconds <= end]
        self._state, choice = decide(self.auto, self._state, known, end)
        # A step from before the window counts only for a worker without a later one.
        newest: dict[int, StepTime] = {}
        for step in known:
            if step.worker not in newest or step.began > newest[step.worker].began:
                newest[step.worker] = step
        self._recent = [step for step in self._recent if step.began + step.seconds > end - self.auto.seconds] + [
            step for step in newest.values() if step.began + step.seconds <= end - self.auto.seconds
        ]
        if choice is not None:
            self._choices.append(choice)
            LOG.log(logging.INFO if choice.switch else logging.DEBUG, "%s", choice)
        return choice
