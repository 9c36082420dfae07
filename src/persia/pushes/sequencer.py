"""Runs pushes one by one, in the same order on all parameter servers (docs/reference/protocol.md, section 12).

Embedding PS and dense PS use it. It does not depend on the kind of parameters.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from persia.errors import DeadlineError, PersiaError, StalePushError, StoreError
from persia.types import PushHeader

__all__ = ["PushSequencer"]

T = TypeVar("T")

MOST_QUEUED = 64
"""Maximum number of queued pushes. Further calls block."""


class _Queued(NamedTuple, Generic[T]):
    header: PushHeader
    work: Callable[[bool], T]


class PushSequencer(Generic[T]):
    """Runs the work of pushes in the order of their slots. A step has `group` slots.

    An early push is queued and its call returns; the call that fills the gap does its work. Safe to call from several
    threads.

    Args:
        timeout: seconds that a call waits for space in the queue, or for a step.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._changed = threading.Condition()
        self._generation = 0
        self._next = (0, 0)
        self._drained: tuple[int, int] | None = None
        self._queued: dict[tuple[int, int], _Queued[T]] = {}
        self._failure: Exception | None = None

    @property
    def step(self) -> int:
        """The number of complete steps."""
        return self._next[0]

    def begin(self, generation: int, step: int) -> None:
        """Makes the first slot of `step` the next one. May be repeated until the first push.

        Raises:
            PersiaError: there are gradients of an incomplete step.
            StalePushError: NN workers of a later generation have started.
        """
        with self._changed:
            if generation < self._generation:
                raise self._stale(generation)
            if generation == self._generation and (self._next[1] or self._queued) and self._failure is None:
                raise PersiaError(
                    f"Step {self._next[0]} is incomplete: it has {self._next[1]} gradients, and {len(self._queued)} "
                    "are queued. Call `drain` before the next phase begins.",
                    step=self._next[0],
                )
            self._generation, self._next, self._failure, self._drained = generation, (step, 0), None, None
            self._queued.clear()
            self._changed.notify_all()

    def push(self, header: PushHeader, work: Callable[[bool], T]) -> list[T]:
        """Does the work of a push in its turn. A repeated push has no effect.

        Args:
            header: header with slot and group.
            work: called once, with whether it is the last of its step. If it fails, all later calls fail.

        Returns:
            The results of the work done in this call, in the order of slots: of this push and of the queued pushes
            after it. Each result is returned by one call only.

        Raises:
            StalePushError: the push is of an earlier generation.
            DeadlineError: the queue is full, as an earlier slot is missing.
        """
        if not 0 <= header.slot < header.group:
            raise StoreError(
                f"Invalid slot {header.slot} in a push: a step has {header.group} slots, from 0.", slot=header.slot
            )
        place = header.step, header.slot
        with self._changed:
            self._check(header.generation)
            if place < self._next or place in self._queued:
                return []
            ready = self._changed.wait_for(
                lambda: place == self._next or len(self._queued) < MOST_QUEUED or self._failure is not None,
                self._timeout,
            )
            self._check(header.generation)
            if place < self._next or place in self._queued:  # A concurrent repetition was faster.
                return []
            if not ready:
                raise self.late(f"a push of NN worker {header.rank} for step {header.step}")
            self._queued[place] = _Queued(header, work)
            return self._run()

    def drain(self, generation: int, step: int, held: int, apply: Callable[[], None]) -> None:
        """Applies an incomplete step; no-op if it has no gradients.

        Args:
            generation: generation of the NN workers.
            step: the incomplete step.
            held: number of its gradients, from slot 0.
            apply: applies them.

        Raises:
            PersiaError: this server has other gradients and is out of phase.
        """
        with self._changed:
            self._check(generation)
            if self._drained == (step, held) and self._next == (step + 1, 0):
                return
            if self._next != (step, held) or self._queued:
                raise PersiaError(
                    f"Out of phase: this server has {self._next[1]} gradients of step {self._next[0]} and "
                    f"{len(self._queued)} queued ones, not {held} of step {step}. This is a bug; please report it.",
                    step=step,
                )
            if held:
                apply()
                self._next, self._drained = (step + 1, 0), (step, held)
                self._changed.notify_all()

    def await_step(self, least: int, timeout: float) -> bool:
        """Waits until `least` steps are complete. Returns False after `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._next[0] >= least or self._failure is not None, timeout)
            if self._failure is not None:
                self._raise_failure()
            return self._next[0] >= least

    def late(self, what: str) -> DeadlineError:
        """Returns the error that names the missing slot."""
        step, slot = self._next
        return DeadlineError(
            f"{what}: slot {slot} of step {step} has not arrived within {self._timeout:g} s, and {len(self._queued)} "
            "pushes wait behind it. Check whether an NN worker has died or hangs.",
            step=step,
            slot=slot,
            timeout=self._timeout,
        )

    def _run(self) -> list[T]:
        """Does all work whose turn it is. The lock is held, so its work is done when `push` returns."""
        began = time.monotonic()
        results = []
        while (item := self._queued.pop(self._next, None)) is not None:
            step, slot = self._next
            last = slot + 1 == item.header.group
            try:
                results.append(item.work(last))
            except Exception as error:
                error.add_note(f"In step {step}, slot {slot}, {time.monotonic() - began:.1f} s into its push.")
                self._failure = error
                self._changed.notify_all()
                raise
            self._next = (step + 1, 0) if last else (step, slot + 1)
        self._changed.notify_all()
        return results

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
