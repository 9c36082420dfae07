"""Holds the gradients of a step until the mode applies them (docs/reference/protocol.md, section 5).

It knows neither tables nor rows: the caller applies a complete step.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from persia.errors import DeadlineError, StalePushError, StoreError
from persia.modes import Action, Arrival, Decision
from persia.types import Gradients, PushHeader, UpdateCounts

__all__ = ["ArrivedPush", "StepBarrier", "completes_step"]


class ArrivedPush(NamedTuple):
    """A push, or one part of it."""

    header: PushHeader
    gradients: Mapping[str, Gradients]


Counts = dict[str, UpdateCounts]
Apply = Callable[[Sequence[ArrivedPush]], Counts]
"""Applies a complete step, given in the order of (rank, part)."""


def completes_step(arrive: Callable[[Arrival], Decision], step: int, held: int = 0, group: int = 1) -> bool:
    """Asks a mode whether the gradient of one more NN worker completes a step.

    Args:
        arrive: `Mode.arrive`.
        step: the step in work.
        held: NN workers whose gradients are here.
        group: NN workers whose gradients make a step.
    """
    return arrive(Arrival(step, held, step, group)).action is Action.APPLY


class _Step:
    """The step in work."""

    def __init__(self, turn: int, counts: Counts | None = None) -> None:
        self.turn = turn
        self.arrived: dict[tuple[int, int], ArrivedPush] = {}
        self.applying = counts is not None
        self.counts = counts
        self.failure: Exception | None = None

    def over(self) -> bool:
        return self.counts is not None or self.failure is not None

    def missing(self, ranks: Sequence[int]) -> list[int]:
        """Returns the ranks whose parts are not all here."""
        parts = {arrived.header.rank: arrived.header.parts for arrived in self.arrived.values()}
        return [
            rank
            for rank in ranks
            if rank not in parts or any((rank, part) not in self.arrived for part in range(parts[rank]))
        ]


class StepBarrier:
    """A barrier for the pushes of a step: they wait for each other and return together. One step at a time.

    Safe to call from several threads. A call blocks until its step is applied, by the thread that completes it.

    Args:
        ranks: the NN workers that make a step.
        timeout: seconds that a push waits.
        arrive: `Mode.arrive`, asked once for each NN worker of a step. The step is complete when it says to apply.
        apply: applies a complete step. If it raises, all pushes of the step do, and may be repeated.
        last: generation and turn of the step that the process before applied last. It may have answered some NN workers
            and not others; those that were answered do not push again.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        timeout: float,
        arrive: Callable[[Arrival], Decision],
        apply: Apply,
        last: tuple[int, int] | None = None,
    ) -> None:
        self._ranks = ranks
        self._timeout = timeout
        self._arrive = arrive
        self._apply = apply
        self._changed = threading.Condition()
        self._generation = 0
        self._step: _Step | None = None
        self._last: _Step | None = None
        """The step that was applied last, which answers repeated pushes."""
        if last is not None:
            self._generation = last[0]
            self._last = _Step(last[1], counts={})  # The process before has its counts.

    def renew(self, generation: int) -> None:
        """Starts a generation of NN workers: pushes of earlier ones fail, those that wait too."""
        with self._changed:
            self._enter(generation)

    def push(self, turn: int, arrived: ArrivedPush) -> Counts:
        """Adds one push to step `turn`, and returns when the step is applied.

        Args:
            turn: rises from step to step.
            arrived: the push. If one of the same rank and part is here already, that one counts.

        Returns:
            The outcome of the step's gradients for part 0 of the lowest rank; empty for the others.

        Raises:
            DeadlineError: pushes of the NN workers that it names are missing. This push stays held.
            StalePushError: the generation is over, or another step is in work.
        """
        header = arrived.header
        if header.rank not in self._ranks or not 0 <= header.part < header.parts or header.weight < 0:
            raise StoreError(
                f"Invalid push of NN worker {header.rank}, part {header.part} of {header.parts}, weight "
                f"{header.weight}: a step has the NN workers {list(self._ranks)}. Start PSs and NN workers with the "
                "same number of NN workers.",
                rank=header.rank,
            )
        with self._changed:
            self._enter(header.generation)
            step = self._step_of(turn, header)
            complete = self._add(step, arrived)
        if complete is not None:
            self._finish(step, complete)
        return self._await(step, header)

    def _add(self, step: _Step, arrived: ArrivedPush) -> list[ArrivedPush] | None:
        """Adds a push. Returns the whole step, sorted, if the push completes it."""
        if step.applying:
            return None
        header = arrived.header
        if any(a.header.rank == header.rank and a.header.parts != header.parts for a in step.arrived.values()):
            raise StoreError(
                f"Pushes of NN worker {header.rank} for step {step.turn} differ in their number of parts, such as "
                f"{header.parts}.",
                rank=header.rank,
                step=step.turn,
            )
        if (header.rank, header.part) in step.arrived:
            return None
        step.arrived[header.rank, header.part] = arrived
        missing = step.missing(self._ranks)
        if header.rank in missing:
            return None
        held = len(self._ranks) - len(missing) - 1
        if not completes_step(self._arrive, header.step, held, len(self._ranks)):
            return None
        step.applying = True
        return [step.arrived[key] for key in sorted(step.arrived)]

    def _enter(self, generation: int) -> None:
        """Starts a later generation of NN workers, which drops the incomplete step of the one before."""
        if generation < self._generation:
            raise StalePushError(
                f"A push of generation {generation} of the NN workers arrived after generation {self._generation} had "
                "started. It is not applied.",
                generation=generation,
            )
        if generation == self._generation:
            return
        if self._step is not None and not self._step.applying:
            self._step.failure = StalePushError(
                f"The NN workers have restarted, as generation {generation}, while step {self._step.turn} of "
                f"generation {self._generation} was incomplete. It is not applied.",
                generation=self._generation,
                step=self._step.turn,
            )
            self._changed.notify_all()
        self._generation, self._step, self._last = generation, None, None

    def _step_of(self, turn: int, header: PushHeader) -> _Step:
        if self._last is not None and turn == self._last.turn:
            return self._last
        step, last = self._step, self._last
        if step is None and (last is None or turn > last.turn):
            step = self._step = _Step(turn)
        if step is None or turn != step.turn:
            place = f"{step.turn} is in work" if step is not None else f"{last.turn} is applied" if last else ""
            raise StalePushError(
                f"NN worker {header.rank} pushed gradients of step {turn}, but step {place}. NN workers must push "
                "every step once, in order.",
                rank=header.rank,
                step=turn,
            )
        return step

    def _finish(self, step: _Step, complete: list[ArrivedPush]) -> None:
        counts: Counts | None = None
        failure: Exception | None = None
        try:
            counts = self._apply(complete)
        except Exception as error:
            failure = error
        with self._changed:
            step.counts, step.failure = counts, failure
            step.arrived.clear()  # `_last` keeps the counts only.
            if self._step is step:  # Else a new generation has started meanwhile.
                self._step = None
                if failure is None:
                    self._last = step
            self._changed.notify_all()

    def _await(self, step: _Step, header: PushHeader) -> Counts:
        began = time.monotonic()
        with self._changed:
            if not self._changed.wait_for(step.over, self._timeout):
                missing = step.missing(self._ranks)
                late = (
                    f"NN workers {', '.join(map(str, missing))} have not pushed" if missing else "it is being applied"
                )
                raise DeadlineError(
                    f"Step {step.turn} (generation {header.generation}) was not complete within "
                    f"{time.monotonic() - began:.1f} s: {late}. Check for processes that hang, or raise `timeout`.",
                    step=step.turn,
                    missing=missing,
                    timeout=self._timeout,
                )
        if step.failure is not None:
            raise copy.copy(step.failure) from step.failure  # A copy for each thread: raising writes a traceback to it.
        assert step.counts is not None
        return step.counts if (header.rank, header.part) == (min(self._ranks), 0) else {}
