"""A training pass over a loader: draws batches that are looked up ahead, and ends with all gradients pushed."""

from __future__ import annotations

import time
from collections.abc import Callable

from persia.nn.outbox import Outbox, run_now
from persia.nn.pipeline import Pipeline
from persia.nn.prepared import PreparedBatch
from persia.nn.pushing import Pusher
from persia.nn.replicas import EqualSteps
from persia.telemetry.metrics import Histogram

__all__ = ["TrainingPass", "finish"]


class TrainingPass:
    """A training pass over a loader. Used by the training thread; the pipeline has threads of its own.

    Args:
        pipeline: looks batches up and pushes their gradients.
        pusher: groups gradients to pushes.
        outbox: gets the pushes.
        waits: gets the time that the network waits for batches.
        equal_steps: the replicas of the network, which make the same number of steps; None if they are not known.
        dummy: makes the batch with which this NN worker takes part in a step for which it has no data.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        pusher: Pusher,
        outbox: Outbox,
        waits: Histogram,
        equal_steps: EqualSteps | None,
        dummy: Callable[[], PreparedBatch],
    ) -> None:
        self.pipeline = pipeline
        self.pusher = pusher
        self._outbox = outbox
        self._waits = waits
        self._equal_steps = equal_steps
        self._dummy = dummy
        outbox.submit = pipeline.push

    def draw(self) -> PreparedBatch | None:
        """Returns the next batch; after the last one dummy batches while other NN workers have data, then None."""
        equal_steps = self._equal_steps
        self.pusher.want()
        try:
            with self._waits.timed(), self._outbox.tracer.span("wait"):
                batch = self.pipeline.draw()
        except StopIteration:
            if equal_steps is None:
                return None
            equal_steps.start(0, has_data=False)
            return None if equal_steps.over() else self._dummy()
        if equal_steps is not None:
            equal_steps.start(batch.weight, has_data=True)
        batch.began = time.monotonic()
        return batch

    def end(self, left: PreparedBatch | None, *, complete: bool, failure: BaseException | None) -> None:
        """Ends the pass, also when its loop is left early: batches with a gradient are applied, others released.

        Args:
            left: the batch that was drawn last, if the loop was left before the next draw.
            complete: whether all batches were drawn.
            failure: the error that ended the pass; gets a note if a push has failed as well.
        """
        pipeline, pusher = self.pipeline, self.pusher
        if left is not None and left.close():
            self._outbox.released += 1
        pusher.end(complete, left)
        try:
            failed = failure is not None or pipeline.failed
            pipeline.close(finish=not (failed and pusher.combined))
            if pipeline.push_failure is None:
                pusher.abandon()
        finally:
            self._outbox.submit = run_now
            self._outbox.release_all()
            push_failure = pipeline.push_failure
            if failure is not None and push_failure not in (None, failure):
                failure.add_note(f"A push has failed, too ({type(push_failure).__name__}: {push_failure}).")


def finish(batch: PreparedBatch, outbox: Outbox, pusher: Pusher) -> None:
    """Ends a drawn batch; one without a gradient still counts."""
    if batch.close():
        outbox.release(batch)
    elif not batch.dummy:
        return  # Its gradient is on the way.
    pusher.skipped(batch)
