"""How many own steps are between lookup and applied gradient: the gate, and its measurement."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import NamedTuple

from persia.modes import Mode, Observation

__all__ = ["Staleness", "StalenessGate", "Window"]


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


WINDOW = 128
"""Batches between two looks of a mode that adapts its depth: a hiccup of one step is below what it reacts to."""


class Staleness(NamedTuple):
    """Measured staleness: at each lookup, how many earlier own steps had no applied gradient yet.

    Attributes:
        mean: over all lookups.
        max: over all lookups.
        lookups: how many batches were looked up.
    """

    mean: float = 0.0
    max: int = 0
    lookups: int = 0


class StalenessGate:
    """Lets lookups pass as the mode allows. A step is one batch, or `accumulation_steps` of them.

    Safe to use from several threads.
    """

    def __init__(self, mode: Mode, accumulation_steps: int) -> None:
        self.mode = mode
        self.depth = mode.initial_depth()
        self.versions: list[int] | None = None
        """When a list: the number of applied steps at each lookup is appended (to replay a run)."""
        self._accumulation = accumulation_steps
        # Of the current pass over the data, in batches; earlier passes count as `_steps_before`.
        self._looked_up = 0
        self._done = 0
        self._steps_before = 0
        self._open = False
        self._changed = threading.Condition()
        self._lookups = 0
        self._sum = 0
        self._max = 0
        self._window = Window(accumulation_steps)
        self._held: deque[float] = deque()  # of batches that are looked up and not drawn
        self._drawn_at: float | None = None

    @property
    def measured(self) -> Staleness:
        """Staleness so far."""
        with self._changed:
            return Staleness(self._sum / max(1, self._lookups), self._max, self._lookups)

    def open(self) -> None:
        """Begins a pass over data: nothing is in flight."""
        with self._changed:
            self._steps_before += -(-self._done // self._accumulation)
            self._looked_up = self._done = 0
            self._open = True
            self._window.restart()
            self._held.clear()
            self._drawn_at = None

    def close(self) -> None:
        """Wakes the waiter, who gets False."""
        with self._changed:
            self._open = False
            self._changed.notify_all()

    def pass_lookup(self) -> bool:
        """Blocks until the next lookup is allowed and counts it; False when closed instead.

        There is no deadline on purpose: the gate opens by the caller's own backward pass, which may take its time.
        """
        with self._changed:
            began = time.monotonic()
            while self._open and not self.mode.gate(self._in_flight(), self.depth):
                self._changed.wait()
            if not self._open:
                return False
            staleness = self._in_flight()
            self._sum += staleness
            self._max = max(self._max, staleness)
            if self.versions is not None:
                self.versions.append(self._steps_before + self._done // self._accumulation)
            self._lookups += 1
            self._looked_up += 1
            self._held.append(time.monotonic() - began)
            return True

    def done(self, batches: int) -> None:
        """So many looked-up batches are applied or released."""
        with self._changed:
            self._done += batches
            self._changed.notify_all()

    def drawn(self, lead: float) -> None:
        """The training thread drew a batch.

        Args:
            lead: seconds that its rows had been ready; negative: seconds that the thread waited for them.
        """
        with self._changed:
            now = time.monotonic()
            held = self._held.popleft()
            before, self._drawn_at = self._drawn_at, now
            if before is None:
                return  # Nothing is known about the first one: the threads have just begun.
            self._window.add(now - before, lead, held)
            if self._window.draws < WINDOW:
                return
            depth = self.mode.next_depth(self.depth, self._window.observation())
            if depth is not None and self.depth is not None and depth != self.depth:
                self._window.changed(depth - self.depth)
                self.depth = depth
                self._changed.notify_all()

    def _in_flight(self) -> int:
        """Steps before that of the next batch which lack their applied gradient."""
        return self._looked_up // self._accumulation - self._done // self._accumulation
