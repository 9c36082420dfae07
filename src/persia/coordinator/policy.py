"""What `Auto` is decided by: the step times of all NN workers, and the verdicts that follow from them."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence

from persia.modes import Auto, AutoEvidence, AutoState, ModeChoice, StepTime, decide
from persia.types import StepTiming

__all__ = ["SwitchPolicy"]

LOG = logging.getLogger("persia.modes")

MOST_KEPT = 1_000_000
"""Step times and verdicts are kept for `persia.modes.rehearse`, so many of the last ones."""


class SwitchPolicy:
    """Decides at the end of each window. Not thread-safe.

    A window is decided when all NN workers have reported beyond its end, so that the decisions are those that
    `persia.modes.rehearse` makes of the step times; or one window later, whoever is late.

    Args:
        auto: the rule.
        nn_workers: how many there are.
        strained: whether the asynchronous mode is in force.
    """

    def __init__(self, auto: Auto, nn_workers: int, strained: bool) -> None:
        self.auto = auto
        self._nn_workers = nn_workers
        self._state = AutoState(strained)
        self._end: float | None = None
        self._reported: dict[int, float] = {}
        self._recent: list[StepTime] = []
        self._steps: deque[StepTime] = deque(maxlen=MOST_KEPT)
        self._verdicts: deque[ModeChoice] = deque(maxlen=MOST_KEPT)

    @property
    def strained(self) -> bool:
        """Whether it has decided for the asynchronous mode."""
        return self._state.strained

    def begin(self, strained: bool) -> None:
        """Training goes on after a rest: what was under way at its beginning is not known.

        Args:
            strained: whether the asynchronous mode is in force: after a death it may be the mode of before a switch.
        """
        if strained != self._state.strained:
            self._state = AutoState(strained)
        self._end = None
        self._recent.clear()
        self._reported.clear()

    def add(self, rank: int, laps: Sequence[StepTiming], now: float) -> ModeChoice | None:
        """Takes a report.

        Args:
            rank: of the NN worker.
            laps: its batches since its last report.
            now: seconds on the clock of all.

        Returns:
            The verdict to switch, if there is one.
        """
        steps = [StepTime(rank, now - lap.ago, lap.seconds) for lap in laps]
        self._recent += steps
        self._steps.extend(steps)
        self._reported[rank] = now
        if self._end is None:
            if not steps:
                return None
            self._end = min(step.began for step in steps) + self.auto.seconds
        while self._complete(now):
            verdict = self._decide(self._end)
            self._end += self.auto.seconds
            if verdict is not None and verdict.switch:
                return verdict
        return None

    def evidence(self) -> AutoEvidence:
        """The step times and verdicts so far, the last million of each."""
        return AutoEvidence(list(self._steps), list(self._verdicts))

    def _complete(self, now: float) -> bool:
        assert self._end is not None
        if now >= self._end + self.auto.seconds:
            return True
        return len(self._reported) == self._nn_workers and min(self._reported.values()) >= self._end

    def _decide(self, end: float) -> ModeChoice | None:
        known = [step for step in self._recent if step.began + step.seconds <= end]
        self._state, verdict = decide(self.auto, self._state, known, end)
        # What is older than the window counts only where nothing newer is known.
        newest: dict[int, StepTime] = {}
        for step in known:
            if step.worker not in newest or step.began > newest[step.worker].began:
                newest[step.worker] = step
        self._recent = [step for step in self._recent if step.began + step.seconds > end - self.auto.seconds] + [
            step for step in newest.values() if step.began + step.seconds <= end - self.auto.seconds
        ]
        if verdict is not None:
            self._verdicts.append(verdict)
            LOG.log(logging.INFO if verdict.switch else logging.DEBUG, "%s", verdict)
        return verdict
