"""Counts the pushes of asynchronous modes at a parameter server (docs/reference/protocol.md, section 12).

Embedding PS and dense PS use it. It does not depend on the kind of parameters.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from persia.errors import DeadlineError, PersiaError, StalePushError, StoreError
from persia.types import PushHeader, PushId

__all__ = ["PushSequencer"]

T = TypeVar("T")


class PushSequencer(Generic[T]):
    """Runs the work of pushes one by one, as they come; `group` of them make a step.

    No push waits for another one, so an NN worker that stalls before its push delays nobody. All PSs get the same
    pushes, each once, so they have the same numbers of steps and pushes whenever no push is in flight. Meanwhile a push
    may be in different steps at different PSs. Safe to call from several threads.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._generation = 0
        self._next = (0, 0)
        """The number of complete steps, and the number of pushes since."""
        self._first = 0
        """The step at which the phase began."""
        self._counted: dict[int, int] = {}
        """Sequence number of the last push of each NN worker in this generation. It has one push in flight."""
        self._drained: tuple[int, int] | None = None
        self._failure: Exception | None = None

    @property
    def step(self) -> int:
        """The number of complete steps."""
        return self._next[0]

    def begin(self, generation: int, step: int) -> None:
        """Begins a phase at a step. May be repeated until the first push.

        Raises:
            PersiaError: there are gradients of an incomplete step.
            StalePushError: NN workers of a later generation have started.
        """
        with self._changed:
            if generation < self._generation:
                raise self._stale(generation)
            if generation == self._generation and self._next[1] and self._failure is None:
                raise PersiaError(
                    f"Step {self._next[0]} is incomplete: it has {self._next[1]} gradients. Call `drain` before the "
                    "next phase begins.",
                    step=self._next[0],
                )
            if generation > self._generation:  # Else repetitions of earlier pushes may still arrive.
                self._counted = {}
            self._generation, self._next, self._failure, self._drained = generation, (step, 0), None, None
            self._first = step
            self._changed.notify_all()

    def refuse_earlier(self, generation: int) -> None:
        """Raises StalePushError if a later generation of NN workers has begun a phase."""
        with self._changed:
            if generation < self._generation:
                raise self._stale(generation)

    def push(self, header: PushHeader, work: Callable[[int, bool], T]) -> T | None:
        """Counts a push and does its work. A repeated push has no effect.

        Args:
            header: header with slot and group.
            work: called once, with the step that the push belongs to here, and whether it is the last one of the step.
                If it fails, all later calls fail.

        Returns:
            The result of the work; None for a repetition.

        Raises:
            StalePushError: the push is of an earlier generation.
        """
        if not 0 <= header.slot < header.group:
            raise StoreError(
                f"Invalid slot {header.slot} in a push: a step has {header.group} slots, from 0.", slot=header.slot
            )
        with self._changed:
            self._check(header.generation)
            # A process that has restarted since does not know the pushes of the phase before.
            if header.step < self._first or header.sequence <= self._counted.get(header.rank, 0):
                return None
            step, held = self._next
            last = held + 1 == header.group
            try:
                result = work(step, last)  # The lock is held, so the push has taken effect when this call returns.
            except Exception as error:
                error.add_note(f"In push {header.sequence} of NN worker {header.rank}, number {held} of step {step}.")
                self._failure = error
                self._changed.notify_all()
                raise
            self._counted[header.rank] = header.sequence
            self._next = (step + 1, 0) if last else (step, held + 1)
            self._changed.notify_all()
            return result

    def drain(self, generation: int, step: int, held: int, apply: Callable[[], None]) -> None:
        """Applies an incomplete step; no-op if it has no gradients.

        Args:
            generation: generation of the NN workers.
            step: the incomplete step.
            held: number of its gradients.
            apply: applies them.

        Raises:
            PersiaError: this server has other gradients and is out of phase.
        """
        with self._changed:
            self._check(generation)
            if self._drained == (step, held) and self._next == (step + 1, 0):
                return
            if self._next != (step, held):
                raise PersiaError(
                    f"Out of phase: this server has {self._next[1]} gradients of step {self._next[0]}, not {held} of "
                    f"step {step}. This is a bug; please report it.",
                    step=step,
                )
            if held:
                apply()
                self._next, self._drained = (step + 1, 0), (step, held)
                self._changed.notify_all()

    def await_push(self, least: int, after: PushId | None, timeout: float) -> bool:
        """Waits until `least` steps are complete and push `after` is counted. Returns False after `timeout` seconds."""

        def reached() -> bool:
            counted = after is None or self._counted.get(after.rank, 0) >= after.sequence
            return counted and self._next[0] >= least

        with self._changed:
            self._changed.wait_for(lambda: reached() or self._failure is not None, timeout)
            if self._failure is not None:
                self._raise_failure()
            return reached()

    def late(self, what: str, timeout: float) -> DeadlineError:
        """Returns the error of a wait for pushes that have not arrived."""
        step, held = self._next
        return DeadlineError(
            f"{what} has not arrived within {timeout:g} s: there are {held} gradients since step {step}. Check whether "
            "an NN worker has died or hangs.",
            step=step,
            held=held,
            timeout=timeout,
        )

    def _check(self, generation: int) -> None:
        if generation < self._generation:
            raise self._stale(generation)
        if generation > self._generation:
            raise StalePushError(
                f"A push of generation {generation} of the NN workers arrived, but this server serves generation "
                f"{self._generation}: it has restarted, and has lost the gradients of the current step.",
                generation=generation,
                restarted=True,
            )
        if self._failure is not None:
            self._raise_failure()

    def _raise_failure(self) -> None:
        raise PersiaError(
            f"This server failed in step {self._next[0]} and applies no more gradients: {self._failure}"
        ) from self._failure

    def _stale(self, generation: int) -> StalePushError:
        return StalePushError(
            f"A call of generation {generation} of the NN workers arrived after generation {self._generation} had "
            "started.",
            generation=generation,
        )
