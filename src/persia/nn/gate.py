"""The gate that bounds the steps between a lookup and its applied gradient, and the measurement of them."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple

from persia.modes import Hybrid, Mode, Observation

__all__ = ["LookupTime", "Staleness", "StalenessGate", "Window"]


class Window:
    """Measures waiting over windows of `WINDOW` batches, for modes that adapt their depth. Not thread-safe.

    Its estimate for one step fewer in flight: the gate opens later by the time of one step, and the rows behind it are
    ready later by as much. Where the training thread looks up and pushes by itself, that counts as waiting, as far as
    cores were idle: others could have done it meanwhile.

    Args:
        accumulation: batches per step.
    """

    def __init__(self, accumulation: int) -> None:
        self._accumulation = accumulation
        self._change = 0
        self._windows = 0
        self._before = 0.0
        self._seconds_before = 0.0
        self._previous = 0.0  # Seconds waited per batch in the last window that has ended.
        self._previous_seconds = 0.0  # Of a batch.
        self.restart()

    def restart(self) -> None:
        """Starts a window."""
        self._waited = self._would_wait = self._elapsed = 0.0
        self._inline = False
        self._computed = time.process_time()
        self.draws = 0

    def add(self, seconds: float, lead: float, held: float, *, inline: bool = False) -> None:
        """Counts a draw.

        Args:
            seconds: since the draw before, waiting included.
            lead: seconds that the rows had been ready; negative: seconds that the training thread waited for them.
            held: seconds that the gate had delayed their lookup.
            inline: whether the thread did not wait, but looked up and pushed by itself.
        """
        self._inline = inline
        wait = max(-lead, 0.0)
        step = self._accumulation * (seconds - wait)
        self._waited += min(wait, held)
        self._would_wait += max(step - max(lead, 0.0), 0.0)
        self._elapsed += seconds
        self.draws += 1

    def observation(self) -> Observation:
        """Ends the window and starts the next one. Returns what was measured."""
        self._windows += 1
        if self._inline:
            computed = (time.process_time() - self._computed) / len(os.sched_getaffinity(0))
            self._waited = max(0.0, min(self._waited, self._elapsed - computed))
        seen = Observation(
            self._waited,
            self._elapsed,
            self.draws,
            self._would_wait,
            self._change,
            self._windows,
            self._before,
            self._seconds_before,
        )
        self._previous, self._previous_seconds = self._waited / self.draws, self._elapsed / self.draws
        self.restart()
        return seen

    def changed(self, by: int) -> None:
        """Notes that the depth was changed after the window that has just ended."""
        self._change, self._windows = by, 0
        self._before, self._seconds_before = self._previous, self._previous_seconds


WINDOW = 128
"""Batches between two decisions of a mode that adapts its depth: long enough to ignore one slow step."""


class Staleness(NamedTuple):
    """Measured staleness: for each lookup, the earlier steps of this NN worker that its rows lack.

    At the lookup; at the use of its batch if rows are refreshed.

    Attributes:
        mean: over all lookups.
        max: over all lookups.
        lookups: number of batches that were looked up, or used if rows are refreshed.
    """

    mean: float = 0.0
    max: int = 0
    lookups: int = 0


class LookupTime(NamedTuple):
    """The moment of a lookup, in steps of the pass.

    Attributes:
        step: of the batch that is looked up.
        applied: steps whose gradients are in the rows that the lookup finds, at least: all before this one.
        limit: number of steps before `step` that a row may lack.
    """

    step: int
    applied: int
    limit: int

    @property
    def in_flight(self) -> int:
        """Number of earlier steps that may be missing in the rows."""
        return self.step - self.applied


class StalenessGate:
    """Lets lookups pass as the mode allows. A step is one batch, or `accumulation_steps` of them.

    Safe to use from several threads.

    Args:
        mode: of the training.
        accumulation_steps: batches of a step.
        near: whether all rows are in memory of this process. `Hybrid("auto")` then begins at depth 0.
    """

    def __init__(self, mode: Mode, accumulation_steps: int, near: bool = False) -> None:
        self._near = near
        self._accumulation = accumulation_steps
        self.adopt(mode)
        self.versions: list[int] | None = None
        """If a list, the number of steps in the rows is appended for each lookup."""
        self.reserves = False
        """Whether lookups run only half as far ahead as the mode allows, so that copies of rows may serve the rest."""
        self.refreshing = False
        """Whether rows are brought up to date at their use, so that lookups may run further ahead; see `lookahead`."""
        self.lookahead = 0
        """Number of steps by which lookups may run ahead even if the depth is smaller, if rows are refreshed."""
        self.on_applied: Callable[[], None] = _nothing
        """Called when a step is applied, in any thread."""
        self.last_lookup = LookupTime(0, 0, 0)
        """The moment of the last lookup that has passed. For the thread that looks up."""
        # Of the current pass over the data, in batches; earlier passes count as `_steps_before`.
        self._looked_up = 0
        self._done = 0
        self._steps_before = 0
        self._first_step = 0
        self._open = False
        self._changed = threading.Condition()
        self._counts: Counter[int] = Counter()
        """Lookups by staleness."""
        self._held: deque[float] = deque()  # Seconds of batches that are looked up and not drawn.
        self._drawn_at: float | None = None

    def adopt(self, mode: Mode) -> None:
        """Changes the mode, between two passes."""
        self.mode = mode
        self.depth = 0 if self._near and _adapts(mode) else mode.initial_depth()
        self._window = Window(self._accumulation)

    def restore(self, depth: int) -> None:
        """Sets the depth of an earlier run, if the mode adapts it. One that begins at 0 has to prove itself again."""
        if _adapts(self.mode) and not self._near:
            self.depth = depth

    @property
    def ahead(self) -> bool:
        """Whether the next lookup may run ahead of the steps before it."""
        with self._changed:
            return self._ahead_at(self._looked_up) != 0

    @property
    def measured(self) -> Staleness:
        """Staleness so far."""
        counts = self.counts
        lookups = sum(counts.values())
        total = sum(staleness * count for staleness, count in counts.items())
        return Staleness(total / max(1, lookups), max(counts, default=0), lookups)

    @property
    def counts(self) -> dict[int, int]:
        """Number of lookups so far, by staleness."""
        with self._changed:
            return dict(self._counts)

    def open(self, step: int = 0) -> None:
        """Starts a pass over the data, with nothing in flight.

        Args:
            step: the global step at which it starts.
        """
        with self._changed:
            self._steps_before += -(-self._done // self._accumulation)
            self._looked_up = self._done = 0
            self._first_step = step
            self._open = True
            self._window.restart()
            self._held.clear()
            self._drawn_at = None

    def forget_refreshing(self) -> None:
        """Refreshes no rows from now on, after a pass that did."""
        with self._changed:
            self.refreshing, self.lookahead, self.on_applied = False, 0, _nothing

    def close(self) -> None:
        """Ends the pass: a waiting `pass_lookup` returns False."""
        with self._changed:
            self._open = False
            self._changed.notify_all()

    def pass_lookup(self) -> bool:
        """Blocks until the next lookup is allowed and counts it; False when closed instead.

        There is no deadline: the user's own backward pass opens the gate, and may take any time.
        """
        with self._changed:
            began = time.monotonic()
            while self._open and not self.mode.gate(self._in_flight(), self._limit_at(self._looked_up)):
                self._changed.wait()
            if not self._open:
                return False
            staleness = self._in_flight()
            step = self._looked_up // self._accumulation
            limit = self._depth_at(self._looked_up)
            self.last_lookup = LookupTime(step, step - staleness, staleness if limit is None else limit)
            if not self.refreshing:
                self._count(staleness, step - staleness)
            self._looked_up += 1
            self._held.append(time.monotonic() - began)
            return True

    @property
    def applied(self) -> int:
        """Number of steps of this pass whose pushes have returned."""
        with self._changed:
            return self._done // self._accumulation

    @property
    def limits(self) -> tuple[int | None, int | None]:
        """How many steps may be in flight at the next lookup, and at the use of its batch; None for any number."""
        with self._changed:
            return self._limit_at(self._looked_up), self._depth_at(self._looked_up)

    def needs(self, lookup: LookupTime) -> int:
        """Returns how many steps of this pass have to be in the rows of a batch when it is used."""
        return max(0, lookup.step - lookup.limit)

    def used(self, lookup: LookupTime, current_to: int) -> None:
        """Notes that a batch whose rows were refreshed is used.

        Args:
            lookup: the moment of its lookup.
            current_to: number of steps of this pass whose updates its rows have, at least.
        """
        with self._changed:
            self._count(max(0, lookup.step - current_to), current_to)

    def _count(self, staleness: int, applied: int) -> None:
        self._counts[staleness] += 1
        if self.versions is not None:
            self.versions.append(self._steps_before + applied)

    def aged(self, staleness: int) -> None:
        """Notes that the oldest row of the last lookup is a copy that lacks this many steps."""
        with self._changed:
            fresh = self.last_lookup.in_flight
            if staleness > fresh:
                self._counts[fresh] -= 1
                self._counts[staleness] += 1

    def done(self, batches: int) -> None:
        """Notes that this many looked-up batches are applied or released."""
        with self._changed:
            self._done += batches
            self._changed.notify_all()
        self.on_applied()

    def drawn(self, lead: float, *, inline: bool = False, use_wait: float = 0.0) -> None:
        """Notes that the training thread drew a batch.

        Args:
            lead: seconds that its rows had been ready; negative: seconds that the thread waited for them.
            inline: whether it looked them up, and pushed gradients, by itself in that time.
            use_wait: seconds that it waited then for pushes whose updates the rows have to have.
        """
        with self._changed:
            now = time.monotonic()
            least = self.depth if self.depth is None else max(self.depth, 1)
            number = self._first_step + (self._looked_up - len(self._held)) // self._accumulation
            warm = self.mode.depth_at(least, number) == least
            held = self._held.popleft()
            if inline:
                held = -lead
            elif use_wait > 0:
                lead, held = min(lead, 0.0) - use_wait, held + use_wait
            before, self._drawn_at = self._drawn_at, now
            if before is None or not warm:
                self._window.restart()
                return  # No interval before the first draw; in a warm-up the gate delays lookups on purpose.
            self._window.add(now - before, lead, held, inline=inline)
            if self._window.draws < WINDOW:
                return
            depth = self.mode.next_depth(self.depth, self._window.observation())
            if depth is not None and self.depth is not None and depth != self.depth:
                self._window.changed(depth - self.depth)
                self.depth = depth
                self._changed.notify_all()

    def _depth_at(self, batch: int) -> int | None:
        """Returns the depth for the lookup of a batch of this pass, by its number."""
        return self.mode.depth_at(self.depth, self._first_step + batch // self._accumulation)

    def _ahead_at(self, batch: int) -> int | None:
        """Returns the number of steps that may be in flight at the lookup of a batch: the depth, or a half of it."""
        depth = self._depth_at(batch)
        return depth if depth is None or not self.reserves else -(-depth // 2)

    def _limit_at(self, batch: int) -> int | None:
        """Returns the number of steps that may be in flight at a lookup, whose rows may be refreshed later."""
        if not self.refreshing:
            return self._ahead_at(batch)
        return None if self.depth is None else max(self.depth, self.lookahead)

    def _in_flight(self) -> int:
        """Returns the number of steps before the next batch's without an applied gradient."""
        return self._looked_up // self._accumulation - self._done // self._accumulation


def _nothing() -> None:
    """No-op."""


def _adapts(mode: Mode) -> bool:
    return isinstance(mode, Hybrid) and mode.staleness == "auto"
