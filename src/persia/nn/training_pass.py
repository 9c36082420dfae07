"""`TrainingPass`: what passes of all modes share. `StepPass` and `TokenPass` define the order of a step."""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator
from typing import ClassVar, NamedTuple

from persia.batching.batch import Batch
from persia.errors import PersiaError
from persia.nn.batch_counts import BatchCounts
from persia.nn.draw_waits import DrawWaits
from persia.nn.gate import StalenessGate
from persia.nn.gradients import GradientCollector
from persia.nn.inline_pass import InlinePass
from persia.nn.pass_threads import PassThreads
from persia.nn.prepared import PreparedBatch
from persia.nn.push_log import PushLog
from persia.nn.reading_thread import READ_AHEAD, ReadingThread
from persia.nn.replicas import EqualSteps
from persia.nn.staging import Ready
from persia.nn.training_lookup import TrainingLookup
from persia.nn.transfer import Encoded
from persia.types import RegisteredBatch

__all__ = ["PassContext", "PassData", "Push", "TrainingPass"]

Push = Callable[[], None]


class PassContext(NamedTuple):
    """The parts that the training passes over a collection share.

    Attributes:
        log: counts pushes.
        lookup: looks rows up.
        gradients: collects the gradients of batches.
        gate: bounds how far lookups run ahead.
        waits: receives the time that the network waits for batches.
        timeout: seconds that a draw, or the end of the last push, may take.
    """

    log: PushLog
    lookup: TrainingLookup
    gradients: GradientCollector
    gate: StalenessGate
    waits: DrawWaits
    timeout: float


class PassData(NamedTuple):
    """The data of a training pass.

    Attributes:
        source: the loader's iterator.
        start: number of the batch, within the pass over the data, at which all NN workers begin.
        endless: whether the loader may be idle for any time; draws then wait for its next batch without a deadline.
        idle: called now and then by a draw that waits; None for no calls.
    """

    source: Iterator[Batch | RegisteredBatch]
    start: int = 0
    endless: bool = False
    idle: Callable[[], None] | None = None


class TrainingPass(ABC):
    """A training pass over a loader: draws batches with their rows, and ends with all gradients pushed.

    The training thread uses it. Its runner calls `register`, `may_look_up`, `look_up` and the pushes: in threads of
    their own, or in the training thread.

    Args:
        context: what passes share.
        data: what is read.
        equal_steps: the replicas of the network, which make the same number of steps; None if they are not known.
        counts: of the batches of all NN workers, if these are to be compared.

    Attributes:
        unraised_failure: failure of a push of a pass that has ended without an error.
    """

    read_ahead: ClassVar[int] = READ_AHEAD
    """Maximum number of batches to read before they are needed; 0: one, which is read when its lookup is next."""

    def __init__(
        self, context: PassContext, data: PassData, equal_steps: EqualSteps | None, counts: BatchCounts | None
    ) -> None:
        self._context = context
        self._log = context.log
        self._lookup = context.lookup
        self._data = data
        self._equal_steps = equal_steps
        self.unraised_failure: BaseException | None = None
        self._runner: PassThreads | InlinePass | None = None
        self._reading = ReadingThread(data.source, self.read_ahead, counts, context.log.tracer)
        try:
            self._begin_runner(0, ahead=self._wants_ahead())
        except BaseException:
            self._reading.stop()
            self._reading.join()
            raise

    # --- the steps of a batch, in their order -------------------------------------------------------------------

    def begin_lookups(self) -> None:
        """Prepares the thread that looks up."""
        self._lookup.begin()

    def register(self, batch: Batch | RegisteredBatch) -> RegisteredBatch:
        """Registers a batch, unless a data loader has."""
        return self._lookup.register(batch)

    @abstractmethod
    def may_look_up(self) -> bool:
        """Blocks until the mode allows the next lookup; False once `close` was called."""

    @abstractmethod
    def look_up(self, batch: RegisteredBatch) -> tuple[PreparedBatch, Ready]:
        """Looks up a batch. The second result makes it ready, in the training thread."""

    @abstractmethod
    def drawn(self, lead: float, *, inline: bool) -> None:
        """Notes that the training thread has drawn a batch; see `PassSteps`."""

    def end_of_backward(self, batch: PreparedBatch) -> None:
        """Takes the gradients of a batch. Autograd calls it at the end of the backward pass."""
        self._computed(batch, self._context.gradients.take(batch, self.runner.unpushed))

    @abstractmethod
    def _computed(self, batch: PreparedBatch, gradients: Callable[[], Encoded]) -> None:
        """Pushes a batch with its gradients, or keeps it until its step is complete."""

    @abstractmethod
    def _skipped(self, batch: PreparedBatch) -> None:
        """Takes note of a batch without a gradient: a dummy, or one that was never back-propagated."""

    # --- the training thread --------------------------------------------------------------------------------------

    @property
    def rows_of_dummy(self) -> int:
        """Number of samples of a dummy batch."""
        return self._equal_steps.dummy_rows if self._equal_steps is not None else 1

    def batches(self) -> Generator[PreparedBatch, None, None]:
        """Yields the batches. Ends the pass after the last one, or when the loop is left."""
        batch: PreparedBatch | None = None
        complete = False
        failure: BaseException | None = None
        try:
            while True:
                batch = self._draw()
                if batch is None:
                    break
                if self._equal_steps is not None or not batch.dummy:
                    yield batch
                self._finish(batch)
                batch = None
            complete = True
        except GeneratorExit:  # The loop was left, by a `break` or an error.
            raise
        except BaseException as error:
            failure = error
            raise
        finally:
            if sys.is_finalizing():  # At the exit of a program: the threads have ended, and torch is being taken down.
                raise
            self._end(batch, complete=complete, failure=failure)

    def check_others(self) -> None:
        """Waits until all NN workers are known to have the batch that was drawn last.

        Raises:
            UnequalStepsError: an NN worker has run out of batches.
            DeadlineError: an NN worker was late.
        """
        if self._reading.counts is not None:
            try:
                self._reading.counts.check(self.runner.number - 1)
            except PersiaError:
                self.runner.failed = True
                raise

    def _draw(self) -> PreparedBatch | None:
        """Returns the next batch; after the last one dummy batches while other NN workers have data, then None."""
        equal_steps = self._equal_steps
        try:
            with self._context.waits.timed(self._reading.waits), self._log.tracer.span("wait"):
                batch = self._drawn_batch()
        except StopIteration:
            if equal_steps is None:
                return None
            equal_steps.start(0, has_data=False)
            return None if equal_steps.over() else self._lookup.dummy(equal_steps.dummy_rows)
        if equal_steps is not None:
            equal_steps.start(batch.samples, has_data=True)
        batch.began = time.monotonic()
        return batch

    def _drawn_batch(self) -> PreparedBatch:
        """Returns the next batch of the loader; raises StopIteration after the last one."""
        ahead = self._wants_ahead()
        if isinstance(self.runner, InlinePass) and ahead:
            self._change_runner(ahead=True)
        elif isinstance(self.runner, PassThreads) and not ahead:
            self.runner.end_lookups()
        try:
            return self.runner.draw()
        except StopIteration:
            if not (isinstance(self.runner, PassThreads) and self.runner.lookups_ended):
                raise
        self._change_runner(ahead=False)
        return self.runner.draw()

    def _finish(self, batch: PreparedBatch) -> None:
        """Ends a drawn batch; one without a gradient still counts."""
        if batch.close():
            self._log.release(batch)
        elif not batch.dummy:
            return  # Its gradient is on the way.
        self._skipped(batch)

    # --- the end ------------------------------------------------------------------------------------------------

    @abstractmethod
    def close(self) -> None:
        """Makes a blocked `may_look_up` return False. For any thread."""

    @property
    @abstractmethod
    def _waits_for_others(self) -> bool:
        """Whether a push returns only after pushes of all NN workers."""

    @abstractmethod
    def _end_steps(self, left: PreparedBatch | None, *, complete: bool) -> None:
        """Pushes what is left, while the threads still run.

        Args:
            left: the batch that was drawn last, if the loop was left before the next draw.
            complete: whether all batches were drawn.
        """

    @abstractmethod
    def _abandon(self) -> None:
        """Gives up what was looked up and never used. Called after the threads have ended, unless a push has failed."""

    def _end(self, left: PreparedBatch | None, *, complete: bool, failure: BaseException | None) -> None:
        """Ends the pass, also when its loop is left early: batches with a gradient are applied, others released.

        Args:
            left: the batch that was drawn last, if the loop was left before the next draw.
            complete: whether all batches were drawn.
            failure: the error that ended the pass; gets a note if a push has failed as well.
        """
        if left is not None and left.close():
            self._log.released += 1
        try:
            self._end_steps(left, complete=complete)
            failed = failure is not None or self.runner.failed
            self._reading.stop()
            self.runner.close(finish=not (failed and self._waits_for_others))
            if self.runner.push_failure is None:
                self._abandon()
        finally:
            self._reading.join()
            self._log.release_all()
            push_failure = self.runner.push_failure
            self._runner = None  # A cycle would keep the rows of a Trainer that is dropped.
            if failure is None:
                self.unraised_failure = push_failure
            elif push_failure not in (None, failure):
                failure.add_note(f"A push has failed, too ({type(push_failure).__name__}: {push_failure}).")

    # --- where lookups and pushes run ---------------------------------------------------------------------------

    @property
    def runner(self) -> PassThreads | InlinePass:
        """Looks up and pushes now. For the training thread and the runner's own, until the pass has ended."""
        assert self._runner is not None
        return self._runner

    @property
    def ready(self) -> int:
        """Number of batches that are looked up and not drawn yet. For any thread."""
        runner = self._runner
        return runner.ready if runner is not None else 0

    @property
    def ahead(self) -> bool:
        """Whether rows are looked up ahead, in threads. For any thread."""
        return isinstance(self._runner, PassThreads)

    def await_pushes(self) -> None:
        """Blocks until the pushes so far have succeeded; see `PassThreads.await_pushes`."""
        self.runner.await_pushes()

    def submit(self, push: Push | None) -> None:
        """Makes a push after the pushes before it; no-op without one."""
        if push is not None:
            self.runner.push(push)

    @property
    def _most_pushes(self) -> int:
        """Maximum number of pushes in flight."""
        return 1

    def _wants_ahead(self) -> bool:
        """Whether the next batch is to be looked up ahead, in a thread."""
        return True

    def _begin_runner(self, number: int, *, ahead: bool) -> None:
        """Begins to look up batches from a number on, and to push their gradients."""
        data, timeout, tracer = self._data, self._context.timeout, self._log.tracer
        if not ahead:
            self._runner = self._runner_in_this_thread(number)
            return
        threads = PassThreads(
            self,
            self._reading,
            timeout,
            pushing=self._most_pushes,
            tracer=tracer,
            endless=data.endless,
            number=number,
            idle=data.idle,
        )
        self._runner = threads  # The threads use it.
        threads.start()

    def _runner_in_this_thread(self, number: int) -> InlinePass:
        data, timeout, tracer = self._data, self._context.timeout, self._log.tracer
        return InlinePass(self, self._reading, timeout, tracer, data.endless, number, data.idle)

    def _change_runner(self, *, ahead: bool) -> None:
        """Goes on in threads, or without, with nothing in flight. Raises the failure of a push."""
        before = self.runner
        before.close(last=False)
        if before.push_failure is not None:
            raise before.push_failure
        self._begin_runner(before.number, ahead=ahead)
