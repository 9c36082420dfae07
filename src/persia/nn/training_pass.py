"""A training pass over a loader: draws batches with their rows, and ends with all gradients pushed."""

from __future__ import annotations

import time
from collections.abc import Callable

from persia.errors import PersiaError
from persia.nn.inline import Inline
from persia.nn.outbox import Outbox, run_now
from persia.nn.pipeline import Pipeline
from persia.nn.prepared import PreparedBatch
from persia.nn.pushing import Pusher
from persia.nn.reading_thread import ReadingThread
from persia.nn.replicas import EqualSteps
from persia.telemetry.metrics import Histogram

__all__ = ["TrainingPass", "finish"]


class TrainingPass:
    """A training pass over a loader. Used by the training thread; other threads are those of its parts.

    Args:
        reading: reads the batches.
        begin_part: begins to look up batches from a number on, and to push their gradients: ahead in threads, or in the
            training thread.
        wants_ahead: whether the next batch is to be looked up ahead.
        pusher: groups gradients to pushes.
        outbox: gets the pushes.
        waits: gets the time that the network waits for batches.
        equal_steps: the replicas of the network, which make the same number of steps; None if they are not known.
        dummy: makes the batch with which this NN worker takes part in a step for which it has no data.

    Attributes:
        part: looks up and pushes now.
    """

    def __init__(
        self,
        reading: ReadingThread,
        begin_part: Callable[[int, bool], Pipeline | Inline],
        wants_ahead: Callable[[], bool],
        pusher: Pusher,
        outbox: Outbox,
        waits: Histogram,
        equal_steps: EqualSteps | None,
        dummy: Callable[[], PreparedBatch],
    ) -> None:
        self.pusher = pusher
        self._reading = reading
        self._begin_part = begin_part
        self._wants_ahead = wants_ahead
        self._outbox = outbox
        self._waits = waits
        self._equal_steps = equal_steps
        self._dummy = dummy
        self.part = begin_part(0, wants_ahead())
        outbox.submit = self.part.push

    def draw(self) -> PreparedBatch | None:
        """Returns the next batch; after the last one dummy batches while other NN workers have data, then None."""
        equal_steps = self._equal_steps
        self.pusher.want()
        try:
            with self._waits.timed(), self._outbox.tracer.span("wait"):
                batch = self._drawn()
        except StopIteration:
            if equal_steps is None:
                return None
            equal_steps.start(0, has_data=False)
            return None if equal_steps.over() else self._dummy()
        if equal_steps is not None:
            equal_steps.start(batch.weight, has_data=True)
        batch.began = time.monotonic()
        return batch

    def check_others(self) -> None:
        """Waits until all NN workers are known to have the batch that was drawn last.

        Raises:
            UnequalStepsError: an NN worker has run out of batches.
            DeadlineError: an NN worker was late.
        """
        if self._reading.counts is not None:
            try:
                self._reading.counts.check(self.part.number - 1)
            except PersiaError:
                self.part.failed = True
                raise

    def end(self, left: PreparedBatch | None, *, complete: bool, failure: BaseException | None) -> None:
        """Ends the pass, also when its loop is left early: batches with a gradient are applied, others released.

        Args:
            left: the batch that was drawn last, if the loop was left before the next draw.
            complete: whether all batches were drawn.
            failure: the error that ended the pass; gets a note if a push has failed as well.
        """
        pusher = self.pusher
        if left is not None and left.close():
            self._outbox.released += 1
        try:
            pusher.end(complete, left)
            failed = failure is not None or self.part.failed
            self._reading.stop()
            self.part.close(finish=not (failed and pusher.combined))
            if self.part.push_failure is None:
                pusher.abandon()
        finally:
            self._reading.join()
            self._outbox.submit = run_now
            self._outbox.release_all()
            push_failure = self.part.push_failure
            if failure is not None and push_failure not in (None, failure):
                failure.add_note(f"A push has failed, too ({type(push_failure).__name__}: {push_failure}).")

    def _drawn(self) -> PreparedBatch:
        """Returns the next batch of the loader; raises StopIteration after the last one."""
        ahead = self._wants_ahead()
        if isinstance(self.part, Inline) and ahead:
            self._turn(ahead=True)
        elif isinstance(self.part, Pipeline) and not ahead:
            self.part.end_lookups()
        try:
            return self.part.draw()
        except StopIteration:
            if not (isinstance(self.part, Pipeline) and self.part.lookups_ended):
                raise
        self._turn(ahead=False)
        return self.part.draw()

    def _turn(self, *, ahead: bool) -> None:
        """Begins another part, with nothing in flight. Raises the failure of a push."""
        before = self.part
        before.close(last=False)
        if before.push_failure is not None:
            raise before.push_failure
        self.part = self._begin_part(before.number, ahead)
        self._outbox.submit = self.part.push


def finish(batch: PreparedBatch, outbox: Outbox, pusher: Pusher) -> None:
    """Ends a drawn batch; one without a gradient still counts."""
    if batch.close():
        outbox.release(batch)
    elif not batch.dummy:
        return  # Its gradient is on the way.
    pusher.skipped(batch)
