"""Runs lookups ahead of the step and pushes behind it, in background threads, as far as the mode allows.

`PassThreads` run a pass over a loader, or a part of one. One thread registers batches and looks their rows up when the
gate opens, and one or more push gradients. A failure of any of them is raised at the next draw, with a note about its
origin. `close` ends all of them.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from persia.errors import DeadlineError
from persia.nn.channel import Channel, Closed, get_or_idle
from persia.nn.prepared import PreparedBatch
from persia.nn.reading_thread import ReadingThread
from persia.retry import Deadline
from persia.telemetry.tracing import Tracer

__all__ = ["PassSteps", "PassThreads", "late_batch"]

PUSH_GRACE = 2.0
"""Seconds to wait for each push at the end of a pass that has failed, if they wait for pushes of other NN workers."""

END_GRACE = 1.0
"""Seconds to wait for each thread at the exit of a program."""

PUSH_POLL = 0.05
"""Seconds between two looks at pushes that are waited for in this way."""

MOST_READY = 64
"""Batches to look up before they are needed if the mode sets no bound."""


class PassSteps(Protocol):
    """The steps that a pass takes with each batch, in this order. Threads take them, or the training thread alone."""

    def begin_lookups(self) -> None:
        """Prepares the thread that looks up. Not called where the training thread does so."""

    def register(self, batch: Any) -> Any:
        """Registers a batch of the loader. Returns what `look_up` takes."""

    def may_look_up(self) -> bool:
        """Blocks until the next lookup is allowed; False once `close` was called."""

    def look_up(self, batch: Any) -> tuple[PreparedBatch, Callable[[], None]]:
        """Looks up a batch. Returns it, and the function that makes it ready, in the training thread."""

    def drawn(self, lead: float, *, inline: bool) -> None:
        """Notes that the training thread has drawn a batch.

        Args:
            lead: seconds that the batch had been ready; negative: seconds that the draw waited.
            inline: whether the training thread has pushed and looked up by itself in that time.
        """

    def close(self) -> None:
        """Makes a blocked `may_look_up` return False. For any thread."""


class _Failure(NamedTuple):
    error: BaseException


class _Ready(NamedTuple):
    batch: PreparedBatch
    make_ready: Callable[[], None]
    at: float


class PassThreads:
    """The threads of a pass over a loader, or of a part of one. Used by the training thread.

    Args:
        steps: what the threads do with each batch.
        reading: reads the batches; its owner stops it before `close`.
        timeout: seconds that a draw, or the end of the last push, may take.
        ready: maximum number of batches looked up ahead.
        pushing: maximum number of pushes in flight, each in a thread. They start in order.
        tracer: records what the threads do.
        endless: whether the loader may be idle for any time; draws then wait for its next batch without a deadline.
        number: of the first batch within the pass.
        idle: called now and then by a draw that waits; None for no calls.
    """

    def __init__(
        self,
        steps: PassSteps,
        reading: ReadingThread,
        timeout: float,
        ready: int = MOST_READY,
        pushing: int = 1,
        tracer: Tracer | None = None,
        endless: bool = False,
        number: int = 0,
        idle: Callable[[], None] | None = None,
    ) -> None:
        self._reading = reading
        self._endless = endless
        self._idle = idle
        self._awaits_loader = False
        self._steps = steps
        self._timeout = timeout
        self._tracer = tracer or Tracer()
        self._ready: Channel[_Ready | _Failure] = Channel(ready)
        self._pushes: Channel[Callable[[], None]] = Channel(MOST_READY)
        self.push_failure: BaseException | None = None
        """The failure of the first push that failed."""
        self.failed = False
        """Whether another NN worker is known to have left the pass, or a push has failed."""
        self._lock = threading.Condition()  # Of what push threads change.
        self._returned = 0
        """Number of pushes that have succeeded."""
        self._handed_over = 0
        self._doing = "data loader: waiting for its first batch"
        self.number = number
        """Number of the next batch within the pass."""
        self.lookups_ended = False
        """Whether `end_lookups` was called, so that the last batch is not the loader's last."""
        self._most_threads = 1 + pushing
        self._threads: list[threading.Thread] = []
        self._process = os.getpid()

    def start(self) -> None:
        """Starts the threads."""
        # A thread that returns from native code while the interpreter ends crashes the process.
        atexit.register(self._end_with_the_process)
        self._start(self._run_lookup, "lookup")
        self._start(self._run_push, "push")

    @property
    def ready(self) -> int:
        """Number of batches that are looked up and not drawn yet."""
        return len(self._ready)

    @property
    def unpushed(self) -> int:
        """Number of pushes that were handed over and have not succeeded yet."""
        return self._handed_over - self._returned

    def draw(self) -> PreparedBatch:
        """Returns the next batch.

        Raises:
            StopIteration: the loader has ended.
            DeadlineError: no batch came in time; the error names the late stage.
            Exception: the failure of a background thread.
        """
        began = time.monotonic()
        if self.push_failure is not None:
            raise self.push_failure
        item: _Ready | _Failure | None = None
        while item is None:
            try:
                item = get_or_idle(self._ready.get, self._timeout, self._idle)
            except Closed:
                raise StopIteration from None
            except TimeoutError:
                if self._endless and self._awaits_loader:
                    continue
                raise late_batch(self.number, self._doing, self._timeout) from None
        if isinstance(item, _Failure):
            raise item.error
        self.number += 1
        item.make_ready()
        self._steps.drawn(began - item.at, inline=False)
        return item.batch

    def end_lookups(self) -> None:
        """Looks up no more than the batch that the thread is at, if any. `draw` then ends after the last one."""
        self.lookups_ended = True

    def push(self, task: Callable[[], None]) -> None:
        """Runs the task in a push thread, started in order; no-op after a failed push.

        Blocks while 64 pushes wait, so that memory stays bounded with a slow server.
        """
        with contextlib.suppress(Closed):
            self._pushes.put(task)
            self._handed_over += 1
            # Most loops need one thread: pushes are faster than steps.
            if len(self._threads) < self._most_threads and self._pushes.unclaimed:
                self._start(self._run_push, "push")

    def await_pushes(self) -> None:
        """Blocks until the pushes that were handed over have succeeded.

        Raises:
            DeadlineError: they have not in time.
            Exception: the failure of a push.
        """
        with self._lock:
            done = self._lock.wait_for(lambda: not self.unpushed or self.push_failure is not None, self._timeout)
        if self.push_failure is not None:
            raise self.push_failure
        if not done:
            raise DeadlineError(
                f"{self.unpushed} pushes have not returned within {self._timeout:g} s. Late: embedding worker: push. "
                "Check what blocks that stage, or raise `timeout`.",
                stage="embedding worker: push",
                timeout=self._timeout,
            )

    def close(self, *, finish: bool = True, last: bool = True) -> None:
        """Ends the threads; finishes pushes that were handed over, and drops batches that were not drawn.

        Stop the reading thread before, unless `end_lookups` was called and the last batch is drawn.

        Args:
            finish: False waits for pushes only while one succeeds every few seconds, as they may wait for NN workers
                that push no more. Then those that have not started are dropped, the others end in the background.
            last: whether no other part of the pass follows.

        Raises:
            DeadlineError: a lookup or a push in progress does not end.
        """
        self._stop(last)
        lookup, pushing = self._threads[:1], self._threads[1:]  # None if they could not be started.
        for thread in lookup:
            self._join(thread, "embedding worker: lookup")
        if finish:
            for thread in pushing:
                self._join(thread, "embedding worker: push")
        else:
            self._join_while_pushes_return(pushing)
            self._pushes.close(discard=True)
        if not any(thread.is_alive() for thread in self._threads):
            atexit.unregister(self._end_with_the_process)

    def _start(self, run: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=run, name=f"persia-{name}", daemon=True)
        thread.start()
        self._threads.append(thread)

    def _stop(self, last: bool) -> None:
        if last:
            self._steps.close()
        self._ready.close(discard=True)
        self._pushes.close()

    def _end_with_the_process(self) -> None:
        """Ends the threads at the exit of a program that never left its loop; gives each of them a moment."""
        if os.getpid() != self._process:  # A forked child does not have the threads, and their locks may be taken.
            return
        self._reading.stop()
        self._stop(last=True)
        for thread in self._threads:
            if thread.is_alive():  # A signal may have come before it was started.
                thread.join(END_GRACE)

    def _join(self, thread: threading.Thread, what: str) -> None:
        thread.join(self._timeout)
        if thread.is_alive():
            raise DeadlineError(
                f"The pass did not end within {self._timeout:g} s. Late: {what}. Check what blocks that stage, "
                "or raise `timeout`.",
                stage=what,
                timeout=self._timeout,
            )

    def _join_while_pushes_return(self, threads: Sequence[threading.Thread]) -> None:
        returned, grace = self._returned, Deadline(PUSH_GRACE)
        for thread in threads:
            while thread.is_alive() and not grace.passed:
                thread.join(PUSH_POLL)
                if self._returned != returned:
                    returned, grace = self._returned, Deadline(PUSH_GRACE)

    def _run_lookup(self) -> None:
        number = self.number
        try:
            self._steps.begin_lookups()
            while not self.lookups_ended:
                self._doing = f"data loader: batch {number}"
                self._awaits_loader = True
                read = self._reading.next()
                if read.error is not None:
                    self._put_failure(self._ready, read.error)
                    break
                self._awaits_loader = False
                self._doing = f"embedding worker: registering batch {number}"
                with self._tracer.span("register"):
                    registered = self._steps.register(read.batch)
                self._doing = f"embedding worker: pushed gradients that batch {number} has to wait for"
                with self._tracer.span("gate"):
                    may_look_up = self._steps.may_look_up()
                if not may_look_up:
                    break
                self._doing = f"embedding worker: looking up batch {number}"
                self._ready.put(_Ready(*self._steps.look_up(registered), time.monotonic()))
                number += 1
        except Closed:
            pass
        except BaseException as error:
            error.add_note(f"Raised at the lookup of batch {number} of prefetch.")
            self._put_failure(self._ready, error)
        self._ready.close()

    def _run_push(self) -> None:
        try:
            while True:
                self._pushes.get()()
                with self._lock:
                    self._returned += 1
                    self._lock.notify_all()
        except Closed:
            pass
        except BaseException as error:
            self._pushes.close(discard=True)
            error.add_note("Raised by a push of prefetch.")
            with self._lock:
                if self.push_failure is not None:  # Most likely due to that one.
                    return
                self.push_failure, self.failed = error, True
                self._lock.notify_all()
            # The gate may never open now: wake a draw that waits behind it.
            self._put_failure(self._ready, error)

    @staticmethod
    def _put_failure(channel: Channel[Any], error: BaseException) -> None:
        with contextlib.suppress(Closed):
            channel.put(_Failure(error))


def late_batch(number: int, stage: str, timeout: float) -> DeadlineError:
    """Returns the error of a batch that was not ready in time.

    Args:
        number: of the batch within the pass.
        stage: which is late.
        timeout: in seconds.
    """
    return DeadlineError(
        f"Batch {number} was not ready within {timeout:g} s. Late: {stage}. Check what blocks that stage, or raise "
        "`timeout`.",
        batch=number,
        stage=stage,
        timeout=timeout,
    )
