"""Runs lookups ahead of the step and pushes behind it, in background threads, as far as the mode allows.

One :class:`Pipeline` is one pass over a loader. One thread reads batches ahead, one registers them and looks their rows
up when the gate opens, and one or more push gradients. A failure of any of them is raised at the next draw, with a note
about its origin. Closing the pipeline ends all of them.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from persia.errors import DeadlineError, PersiaError
from persia.nn.batch_counts import BatchCounts
from persia.nn.prepared import PreparedBatch
from persia.retry import Deadline
from persia.telemetry.tracing import Tracer

__all__ = ["READ_AHEAD", "Channel", "Closed", "Pipeline", "Stages"]

T = TypeVar("T")


class Closed(Exception):  # noqa: N818 - not an error: the other side has ended
    """Raised by operations on a closed channel."""


class Channel(Generic[T]):
    """A bounded queue that can be closed, like `queue.Queue` with the `shutdown` of Python 3.13."""

    def __init__(self, capacity: int) -> None:
        self._items: deque[T] = deque()
        self._capacity = capacity
        self._closed = False
        self._getting = 0
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._items)

    @property
    def unclaimed(self) -> int:
        """Number of items that no waiting `get` is about to take."""
        with self._changed:
            return max(0, len(self._items) - self._getting)

    def put(self, item: T) -> None:
        """Blocks while full. Raises Closed when closed."""
        with self._changed:
            while len(self._items) >= self._capacity and not self._closed:
                self._changed.wait()
            if self._closed:
                raise Closed
            self._items.append(item)
            self._changed.notify_all()

    def await_demand(self) -> None:
        """Blocks until a `get` waits for an item. Raises Closed when closed."""
        with self._changed:
            while not self._closed and not (self._getting and not self._items):
                self._changed.wait()
            if self._closed:
                raise Closed

    def get(self, timeout: float | None = None) -> T:
        """Blocks while empty, at most `timeout` seconds.

        Raises:
            Closed: closed, and nothing is left.
            TimeoutError: nothing came in time.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            self._getting += 1
            self._changed.notify_all()
            try:
                while not self._items:
                    if self._closed:
                        raise Closed
                    remaining = None if deadline is None else deadline - time.monotonic()
                    if remaining is not None and remaining <= 0:
                        raise TimeoutError
                    self._changed.wait(remaining)
                item = self._items.popleft()
            finally:
                self._getting -= 1
            self._changed.notify_all()
            return item

    def close(self, *, discard: bool = False) -> None:
        """Refuses further items; those inside can still be got, unless discarded."""
        with self._changed:
            self._closed = True
            if discard:
                self._items.clear()
            self._changed.notify_all()


READ_AHEAD = 16
"""Batches to read before they are needed; more only costs memory."""

LOADER_GRACE = 1.0
"""Seconds to wait for the loader at the end of a pass."""

PUSH_GRACE = 2.0
"""Seconds to wait for each push at the end of a pass that has failed, if they wait for those of other NN workers."""

PUSH_POLL = 0.05
"""Seconds between two looks at pushes that are waited for in this way."""

MOST_READY = 64
"""Batches to look up before they are needed if the mode sets no bound."""


class Stages(NamedTuple):
    """The work of a pipeline's threads.

    Attributes:
        register: registers a batch of the loader; its result goes to `lookup`.
        may_lookup: blocks until the lookup is allowed; False when the pipeline is being closed.
        lookup: returns the batch to train, and the function that makes it ready.
        drawn: gets at each draw the seconds that the batch had been ready; negative: those that the draw waited.
        stop: makes a blocked `may_lookup` return False.
        begin: called by the thread that looks up, before anything else.
    """

    register: Callable[[Any], Any]
    may_lookup: Callable[[], bool]
    lookup: Callable[[Any], tuple[PreparedBatch, Callable[[], None]]]
    drawn: Callable[[float], None]
    stop: Callable[[], None]
    begin: Callable[[], None]


class _Failure(NamedTuple):
    error: BaseException


class _Ready(NamedTuple):
    batch: PreparedBatch
    make_ready: Callable[[], None]
    at: float


class Pipeline:
    """One pass over a loader. Used by one thread; owns several more.

    Args:
        source: the loader's iterator.
        stages: the work of the threads.
        timeout: seconds that a draw, or the end of the last push, may take.
        ready: maximum number of batches looked up ahead.
        read_ahead: maximum number of batches read ahead of that; 0: one, which is read when its lookup is next.
        counts: of the batches of all NN workers, if all have to make the same number of steps.
        pushing: maximum number of pushes in flight, each in a thread. They start in order.
        tracer: records what the threads do.
        endless: whether the loader may be idle for any time; draws then wait for its next batch without a deadline.
    """

    def __init__(
        self,
        source: Iterator[Any],
        stages: Stages,
        timeout: float,
        ready: int = MOST_READY,
        read_ahead: int = READ_AHEAD,
        counts: BatchCounts | None = None,
        pushing: int = 1,
        tracer: Tracer | None = None,
        endless: bool = False,
    ) -> None:
        self._source = source
        self._endless = endless
        self._awaits_loader = False
        self._stages = stages
        self._timeout = timeout
        self._tracer = tracer or Tracer()
        self._read: Channel[Any] = Channel(max(1, read_ahead))
        self._on_demand = read_ahead == 0
        self._counts = counts
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
        self._number = 0
        self._most_threads = 2 + pushing
        self._threads: list[threading.Thread] = []
        # A thread that returns from native code while the interpreter ends crashes the process.
        self._process = os.getpid()
        atexit.register(self._end_with_the_process)
        self._start(self._run_read, "read")
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
                item = self._ready.get(self._timeout)
            except Closed:
                raise StopIteration from None
            except TimeoutError:
                if self._endless and self._awaits_loader:
                    continue
                raise DeadlineError(
                    f"Batch {self._number} was not ready within {self._timeout:g} s. Late: {self._doing}. "
                    "Check what blocks that stage, or raise `timeout`.",
                    batch=self._number,
                    stage=self._doing,
                    timeout=self._timeout,
                ) from None
        if isinstance(item, _Failure):
            raise item.error
        self._number += 1
        item.make_ready()
        self._stages.drawn(began - item.at)
        return item.batch

    def check_others(self) -> None:
        """Waits until all NN workers are known to have the batch that was drawn last.

        Raises:
            UnequalStepsError: an NN worker has run out of batches.
            DeadlineError: an NN worker was late.
        """
        if self._counts is not None:
            try:
                self._counts.check(self._number - 1)
            except PersiaError:
                self.failed = True
                raise

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

    def close(self, *, finish: bool = True) -> None:
        """Ends the threads; finishes pushes that were handed over, and drops batches that were not drawn.

        Args:
            finish: False waits for pushes only while one succeeds every few seconds, as they may wait for NN workers
                that push no more. Then those that have not started are dropped, the others end in the background.

        Raises:
            DeadlineError: a lookup or a push in progress does not end.
        """
        self._stop()
        # The loader may block in its `next` for long; its thread ends after that without being joined.
        self._threads[0].join(LOADER_GRACE)
        _, lookup, *pushing = self._threads
        self._join(lookup, "embedding worker: lookup")
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

    def _stop(self) -> None:
        if self._counts is not None:
            self._counts.end("left its loop")
        self._stages.stop()
        self._read.close(discard=True)
        self._ready.close(discard=True)
        self._pushes.close()

    def _end_with_the_process(self) -> None:
        """Ends the threads at the exit of a program that never left its loop; gives each of them a moment."""
        if os.getpid() != self._process:  # A forked child does not have the threads, and their locks may be taken.
            return
        self._stop()
        for thread in self._threads:
            if thread.is_alive():  # A signal may have come before it was started.
                thread.join(LOADER_GRACE)

    def _join(self, thread: threading.Thread, what: str) -> None:
        thread.join(self._timeout)
        if thread.is_alive():
            raise DeadlineError(
                f"The pipeline did not end within {self._timeout:g} s. Late: {what}. Check what blocks that stage, "
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

    def _run_read(self) -> None:
        number = 0
        try:
            while True:
                if self._on_demand:
                    self._read.await_demand()
                try:
                    with self._tracer.span("read"):
                        batch = next(self._source)
                except StopIteration:
                    break
                if self._counts is not None:
                    self._counts.add()
                self._read.put(batch)
                number += 1
            if self._counts is not None:
                self._counts.end()
        except Closed:
            pass
        except BaseException as error:
            if self._counts is not None:
                self._counts.end(f"could not read it ({type(error).__name__}: {error})")
            place = "" if isinstance(error, PersiaError) and "batch" in error.fields else f", at batch {number}"
            error.add_note(f"Raised by the loader, in the reading thread of prefetch{place}.")
            self._put_failure(self._read, error)
        self._read.close()

    def _run_lookup(self) -> None:
        number = 0
        try:
            self._stages.begin()
            while True:
                self._doing = f"data loader: batch {number}"
                self._awaits_loader = True
                item = self._read.get()
                self._awaits_loader = False
                if isinstance(item, _Failure):
                    self._ready.put(item)
                    break
                self._doing = f"embedding worker: registering batch {number}"
                with self._tracer.span("register"):
                    registered = self._stages.register(item)
                self._doing = f"embedding worker: pushed gradients that batch {number} has to wait for"
                with self._tracer.span("gate"):
                    may_look_up = self._stages.may_lookup()
                if not may_look_up:
                    break
                self._doing = f"embedding worker: looking up batch {number}"
                self._ready.put(_Ready(*self._stages.lookup(registered), time.monotonic()))
                number += 1
        except Closed:
            pass
        except BaseException as error:
            error.add_note(f"Raised in the lookup thread of prefetch, at batch {number}.")
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
            error.add_note("Raised in a push thread of prefetch.")
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
