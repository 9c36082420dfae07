"""Holds the gradients of a step until the mode applies them (docs/reference/protocol.md, section 5).

It does not depend on tables or rows: the caller applies a complete step.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from persia.errors import DeadlineError, StalePushError, StoreError
from persia.modes import Action, Arrival, Decision
from persia.retry import Deadline
from persia.types import Gradients, PushHeader, UpdateCounts

__all__ = ["MOST_OPEN", "ArrivedPush", "StepBarrier", "completes_step"]

MOST_OPEN = 64
"""Maximum number of open steps. NN workers keep far fewer pushes in flight."""

MOST_REPEATED = 8
"""Number of last pushes of an NN worker that may be repeated; it has fewer in flight."""


class ArrivedPush(NamedTuple):
    """A push, or one part of it.

    Attributes:
        header: header of the push.
        gradients: gradients by table.
        deadline: deadline of its wait for space, even if other pushes arrived later; None if it does not wait.
    """

    header: PushHeader
    gradients: Mapping[str, Gradients]
    deadline: Deadline | None = None


Counts = dict[str, UpdateCounts]
Apply = Callable[[Sequence[ArrivedPush]], Counts]
"""Applies a complete step, given in the order of (rank, part)."""


def completes_step(arrive: Callable[[Arrival], Decision], step: int, held: int = 0, group: int = 1) -> bool:
    """Returns whether the gradient of one more NN worker completes a step in a mode.

    Args:
        arrive: `Mode.arrive`.
        step: the current step.
        held: number of NN workers whose gradients have arrived.
        group: number of NN workers whose gradients make a step.
    """
    return arrive(Arrival(step, held, step, group)).action is Action.APPLY


class _Step:
    """An open step: it has pushes and is not applied."""

    def __init__(self, generation: int, turn: int, lock: threading.Lock) -> None:
        self.generation = generation
        self.turn = turn
        self.changed = threading.Condition(lock)  # One per step: only pushes of this step wake up.
        self.arrived: dict[tuple[int, int], ArrivedPush] = {}
        self.complete = False
        self.applying = False
        self.counts: Counts | None = None
        self.failure: Exception | None = None

    @property
    def over(self) -> bool:
        return self.counts is not None or self.failure is not None

    def fail(self, failure: Exception) -> None:
        self.failure = failure
        self.changed.notify_all()

    def missing(self, ranks: Sequence[int]) -> list[int]:
        """Returns the ranks whose parts have not all arrived."""
        parts = {arrived.header.rank: arrived.header.parts for arrived in self.arrived.values()}
        return [
            rank
            for rank in ranks
            if rank not in parts or any((rank, part) not in self.arrived for part in range(parts[rank]))
        ]


class StepBarrier:
    """A barrier for the pushes of each step: they wait for each other and return together.

    Several steps may be open. They are applied in order, so a push also waits for earlier steps. All steps before the
    oldest open one have been applied, possibly by an earlier process.

    Safe to call from several threads. A call blocks until its step is applied, by one of the calls of that step.

    Args:
        ranks: the NN workers that make a step.
        timeout: seconds that a push waits.
        arrive: `Mode.arrive`, called once for each NN worker of a step. The step is complete when it returns "apply".
        apply: applies a complete step. If it raises, all pushes of the step raise, and may be repeated.
        applied: generation and turn of the last applied step; None if the first push of a new generation determines it.
        gaps: whether turns may be skipped, because the barrier gets only some of the pushes of its NN worker, which
            has one in flight.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        timeout: float,
        arrive: Callable[[Arrival], Decision],
        apply: Apply,
        *,
        applied: tuple[int, int] | None = None,
        gaps: bool = False,
    ) -> None:
        self._ranks = ranks
        self._timeout = timeout
        self._arrive = arrive
        self._apply = apply
        self._gaps = gaps
        self._lock = threading.Lock()
        self._generation, last = applied if applied is not None else (-1, -1)
        self._next = last + 1
        """The oldest step that is not applied."""
        self._open: dict[int, _Step] = {}
        self._applied: dict[int, Counts] = {}
        """Counts of the last steps, for repeated pushes."""
        self._offsets: dict[int, int] = {}
        """Step minus sequence number of the pushes of each NN worker, which is constant with one push per step."""
        self._newest: dict[int, int] = {}
        """Last turn that each NN worker has pushed."""

    @property
    def open_steps(self) -> list[int]:
        """Steps that have pushes and are not applied, in order."""
        with self._lock:
            return sorted(self._open)

    def renew(self, generation: int, step: int) -> None:
        """Starts a phase of a generation of NN workers at a step. Waiting pushes fail, as do pushes of earlier ones."""
        with self._lock:
            self._enter(generation, step)
            self._restart(generation, step)

    def push(self, turn: int, arrived: ArrivedPush) -> Counts:
        """Adds one push to step `turn`, and returns when the step is applied.

        Args:
            turn: increases by 1 from step to step.
            arrived: the push. If a push of the same rank and part has already arrived, that one counts.

        Returns:
            The outcome of the step's gradients for part 0 of the lowest rank; empty for other parts.

        Raises:
            DeadlineError: pushes of other NN workers, which the error names, are missing. This push is retained.
            StalePushError: the generation is over, or the NN worker has skipped a step or restarted.
        """
        header = arrived.header
        with self._lock:  # First: an earlier generation may have had NN workers that this one lacks.
            self._refuse_earlier(header.generation)
        if header.rank not in self._ranks or not 0 <= header.part < header.parts or header.rows < 0:
            raise StoreError(
                f"Invalid push of NN worker {header.rank}, part {header.part} of {header.parts}, rows "
                f"{header.rows}: a step has the NN workers {list(self._ranks)}. Start PSs and NN workers with the "
                "same number of NN workers.",
                rank=header.rank,
            )
        with self._lock:
            # Pushes are numbered from 1, one per step, so the first push determines where the generation began.
            self._enter(header.generation, turn - header.sequence + 1)
            if self._gaps:
                self._next = max(self._next, turn)
            self._check_order(turn, header)
            if turn < self._next:  # The reply was lost, or the process that applied the step has died.
                return self._answer(self._applied.get(turn, {}), header)
            step = self._open.get(turn)
            if step is None:
                step = self._open[turn] = _Step(header.generation, turn, self._lock)
            self._add(step, arrived)
            applies = self._await(step)
        if applies:
            self._finish(step)
        if step.failure is not None:
            raise copy.copy(step.failure) from step.failure  # One copy per thread, as raising sets its traceback.
        assert step.counts is not None
        return self._answer(step.counts, header)

    def _answer(self, counts: Counts, header: PushHeader) -> Counts:
        return counts if (header.rank, header.part) == (min(self._ranks), 0) else {}

    def _enter(self, generation: int, step: int) -> None:
        """Starts a later generation of NN workers at a step; refuses an earlier generation."""
        self._refuse_earlier(generation)
        if generation > self._generation:
            self._restart(generation, step)
            self._offsets = dict.fromkeys(self._ranks, step - 1)  # All begin at the same step.

    def _refuse_earlier(self, generation: int) -> None:
        if generation < self._generation:
            raise StalePushError(
                f"A push of generation {generation} of the NN workers arrived after generation {self._generation} had "
                "started. It is not applied.",
                generation=generation,
            )

    def _restart(self, generation: int, step: int) -> None:
        for open_ in self._open.values():
            if not open_.applying:
                open_.fail(
                    StalePushError(
                        f"The NN workers have restarted at step {step}, as generation {generation}, while step "
                        f"{open_.turn} of generation {self._generation} was incomplete. It is not applied.",
                        generation=self._generation,
                        step=open_.turn,
                    )
                )
        self._generation, self._next = generation, step
        self._open, self._applied, self._offsets, self._newest = {}, {}, {}, {}

    def _check_order(self, turn: int, header: PushHeader) -> None:
        """Raises StalePushError if an NN worker has not pushed every step exactly once."""
        rank = header.rank
        offset = self._offsets.setdefault(rank, turn - header.sequence)
        newest = self._newest.get(rank, turn)
        if turn - header.sequence != offset:
            reason = (
                f"as its push {header.sequence}, where step {header.sequence + offset} was due and step {self._next} "
                "is the next to be applied"
            )
        elif turn >= self._next + MOST_OPEN:
            reason = f"more than {MOST_OPEN} steps ahead of step {self._next}, the next to be applied"
        elif turn <= newest - MOST_REPEATED:
            reason = f"again, after it had pushed step {newest} in the same generation"
        else:
            self._newest[rank] = max(newest, turn)
            return
        raise StalePushError(
            f"NN worker {rank} pushed gradients of step {turn} {reason}. They are not applied. NN workers must push "
            "every step once, in order: set the same `global_step` on all before the first one, and train with one "
            "EmbeddingCollection or Trainer in each run of a cluster.",
            rank=rank,
            step=turn,
        )

    def _add(self, step: _Step, arrived: ArrivedPush) -> None:
        header = arrived.header
        if step.complete:
            return
        if (known := step.arrived.get((header.rank, header.part))) is not None:  # A repetition, with a later deadline.
            step.arrived[header.rank, header.part] = known._replace(deadline=arrived.deadline)
            return
        if any(a.header.rank == header.rank and a.header.parts != header.parts for a in step.arrived.values()):
            raise StoreError(
                f"Pushes of NN worker {header.rank} for step {step.turn} differ in their number of parts, such as "
                f"{header.parts}.",
                rank=header.rank,
                step=step.turn,
            )
        step.arrived[header.rank, header.part] = arrived
        missing = step.missing(self._ranks)
        if header.rank in missing:
            return
        held = len(self._ranks) - len(missing) - 1
        if completes_step(self._arrive, header.step, held, len(self._ranks)):
            step.complete = True

    def _is_due(self, step: _Step) -> bool:
        return step.complete and not step.applying and step.turn == self._next

    def _await(self, step: _Step) -> bool:
        """Waits until a step is over. Returns True instead if the caller is to apply it."""
        if not step.changed.wait_for(lambda: step.over or self._is_due(step), self._timeout):
            raise self._late(step)
        if step.over:
            return False
        step.applying = True
        return True

    def _finish(self, step: _Step) -> None:
        """Applies a step, without the lock, and wakes its pushes and the pushes of the next step."""
        counts: Counts | None = None
        failure: Exception | None = None
        try:
            counts = self._apply([step.arrived[key] for key in sorted(step.arrived)])
        except Exception as error:
            failure = error
        with self._lock:
            step.counts, step.failure = counts, failure
            step.arrived.clear()
            step.changed.notify_all()
            if self._open.get(step.turn) is not step:  # A new generation has started.
                return
            del self._open[step.turn]  # Also after a failure, as its pushes may be repeated.
            if counts is None:
                return
            self._next = step.turn + 1
            self._applied[step.turn] = counts
            self._applied.pop(step.turn - MOST_OPEN, None)
            if (following := self._open.get(self._next)) is not None:
                following.changed.notify_all()

    def _late(self, step: _Step) -> DeadlineError:
        """Returns the error that names the NN workers that delay the oldest step."""
        # A step that is being applied ends by itself, even if a new generation has other steps now.
        turn = step.turn if step.applying else self._next
        oldest = step if step.applying else self._open.get(turn)
        missing = oldest.missing(self._ranks) if oldest is not None else list(self._ranks)
        late = f"NN workers {', '.join(map(str, missing))} have not pushed" if missing else "it is being applied"
        waiting = "" if step.turn == turn else f", which step {step.turn} waits for,"
        return DeadlineError(
            f"Step {turn} (generation {step.generation}){waiting} was not complete within {self._timeout:g} s: "
            f"{late}. Check for processes that hang, or raise `timeout`.",
            step=turn,
            missing=missing,
            timeout=self._timeout,
        )
