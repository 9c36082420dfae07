"""Dynamic batching: joins requests that wait, computes them in one thread, and splits the result."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

from persia.batching.batch import Batch
from persia.errors import ClosedError, DataError, OverloadedError
from persia.serve.http.compute_times import ComputeTimes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from persia.metrics import Answers
    from persia.serve.http.limits import ServeLimits
    from persia.serve.predictor import Prediction

__all__ = ["Batcher", "BatcherCounts", "JobResult", "PredictionJob", "expired"]

RESERVE = 2.0
"""A request is accepted if this many times the expected time of queue and computation remains until its deadline. This
allows for errors of the estimate, and for the event loop before and after."""


class JobResult(NamedTuple):
    """Predictions of the samples of one request.

    Attributes:
        values: the answers, float32 `[rows, columns]`.
        answers: label, kind, unit and classes of the columns.
        step: global step of the network.
        epoch: epoch of the log of changes.
    """

    values: NDArray[np.float32]
    answers: Answers
    step: int
    epoch: int


class PredictionJob:
    """A request that waits or is being computed.

    Args:
        rows: number of samples, for the limits.
        work: its samples, which may be joined with other requests' samples, or a call that runs separately.
        deadline: `time.monotonic()` by which it must be answered.

    Attributes:
        future: future of the result; may be cancelled while the request waits.
    """

    __slots__ = ("arrived", "deadline", "future", "rows", "work")

    def __init__(self, rows: int, work: Batch | Callable[[], Any], deadline: float) -> None:
        self.rows = rows
        self.work = work
        self.deadline = deadline
        self.arrived = time.monotonic()
        self.future: Future[Any] = Future()


class BatcherCounts(NamedTuple):
    """Counts of a batcher since its start, and its queue.

    Attributes:
        rows: number of computed samples.
        batches: number of computations.
        expired: number of requests whose deadline passed while they waited.
        overloaded: number of requests that were refused immediately.
        queue: number of waiting requests.
        queue_rows: number of waiting samples.
    """

    rows: int
    batches: int
    expired: int
    overloaded: int
    queue: int
    queue_rows: int


class Batcher:
    """A queue of requests, and the thread that computes them in order. Thread-safe.

    Args:
        predict: computes a batch; called from one thread only.
        limits: limits of batches and of the queue.
        observe: receives the time of each computation, and the waiting time of each request.
    """

    def __init__(
        self,
        predict: Callable[[Batch], Prediction],
        limits: ServeLimits,
        observe: Callable[[str, float], object] = lambda _name, _seconds: None,
    ) -> None:
        self._predict = predict
        self._limits = limits
        self._observe = observe
        self._changed = threading.Condition()
        self._queue: deque[PredictionJob] = deque()
        self._rows = 0
        self._running: tuple[int, float] | None = None
        """Number of samples that are being computed, and the start time."""
        self._times = ComputeTimes()
        self._counts = dict.fromkeys(("rows", "batches", "expired", "overloaded"), 0)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="persia-predict", daemon=True)
        self._thread.start()

    def check(self, rows: int = 1, deadline: float = math.inf) -> None:
        """Checks whether a request would be accepted, for example before its body is read.

        Args:
            rows: number of its samples; 1 if it is not known yet.
            deadline: as in `PredictionJob`.

        Raises:
            OverloadedError: the queue is full, or the request would wait past its deadline.
            ClosedError: the batcher is closed.
        """
        with self._changed:
            self._check(rows, deadline)

    def submit(self, job: PredictionJob) -> None:
        """Queues a request. Does not block.

        Raises:
            OverloadedError: as `check` does.
            ClosedError: the batcher is closed.
        """
        with self._changed:
            self._check(job.rows, job.deadline)
            self._queue.append(job)
            self._rows += job.rows
            self._changed.notify()

    def counts(self) -> BatcherCounts:
        """Returns the counts so far."""
        with self._changed:
            return BatcherCounts(**self._counts, queue=len(self._queue), queue_rows=self._rows)

    def close(self) -> None:
        """Computes waiting requests, and ends the thread. Blocks. A second call is a no-op."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _check(self, rows: int, deadline: float) -> None:
        if self._closed:
            raise ClosedError("The server is shutting down; send the request to another one.")
        if not self._queue and self._running is None:  # Even if estimates are bad: computing improves them.
            return
        limits = self._limits
        wait = self._wait() + self._times.seconds(rows)
        full = len(self._queue) >= limits.max_queue or self._rows + rows > limits.max_queue_rows
        if not full and time.monotonic() + RESERVE * wait <= deadline:
            return
        self._counts["overloaded"] += 1
        reason = (
            f"{len(self._queue)} requests with {self._rows} samples wait already (max_queue = {limits.max_queue}, "
            f"max_queue_rows = {limits.max_queue_rows})"
            if full
            else f"an answer takes about {1000 * wait:.0f} ms, too near to the deadline of the request"
        )
        raise OverloadedError(
            f"The server is overloaded: {reason}. Try again later, or add servers.", retry_after=max(1, math.ceil(wait))
        )

    def _wait(self) -> float:
        """Returns the expected time until a new request would be computed."""
        wait = self._times.queue(self._rows, self._limits.max_batch)
        if self._running is not None:
            rows, started = self._running
            wait += max(0.0, self._times.seconds(rows) - (time.monotonic() - started))
        return wait

    def _run(self) -> None:
        while jobs := self._next():
            started = time.monotonic()
            live = []
            for job in jobs:
                if job.deadline < started:
                    self._expire(job)
                elif job.future.set_running_or_notify_cancel():
                    self._observe("queue", started - job.arrived)
                    live.append(job)
            if live:
                rows = sum(job.rows for job in live)
                with self._changed:
                    self._running = rows, started
                self._compute(live)
                seconds = time.monotonic() - started
                self._observe("compute", seconds)
                with self._changed:
                    self._running = None
                    self._times.add(rows, seconds)
                    self._counts["rows"] += rows
                    self._counts["batches"] += 1

    def _next(self) -> list[PredictionJob]:
        """Waits for requests, and dequeues the ones to compute together; empty once the batcher is closed."""
        limits = self._limits
        with self._changed:
            while True:
                if not self._queue:
                    if self._closed:
                        return []
                    self._changed.wait()
                    continue
                count, rows = self._joined()
                ready = count < len(self._queue) or rows >= limits.max_batch or self._closed
                left = self._queue[0].arrived + limits.max_wait_ms / 1000 - time.monotonic()
                if ready or left <= 0 or not isinstance(self._queue[0].work, Batch):
                    self._rows -= rows
                    return [self._queue.popleft() for _ in range(count)]
                self._changed.wait(left)

    def _joined(self) -> tuple[int, int]:
        """Returns the numbers of requests at the head of the queue to compute together, and of their samples."""
        count = rows = 0
        for job in self._queue:
            joins = isinstance(job.work, Batch)
            if count and (not joins or rows + job.rows > self._limits.max_batch):
                break
            count, rows = count + 1, rows + job.rows
            if not joins:
                break
        return count, rows

    def _expire(self, job: PredictionJob) -> None:
        with self._changed:
            self._counts["expired"] += 1
            wait = self._wait()
        if job.future.set_running_or_notify_cancel():
            job.future.set_exception(expired(wait))

    def _compute(self, jobs: list[PredictionJob]) -> None:
        try:
            if not isinstance(jobs[0].work, Batch):
                jobs[0].future.set_result(jobs[0].work())
                return
            scored = self._predict(Batch.concat([job.work for job in jobs if isinstance(job.work, Batch)]))
        except DataError as error:
            if len(jobs) == 1:
                jobs[0].future.set_exception(error)
            else:  # Computes each by itself, so that only the invalid requests fail.
                for job in jobs:
                    self._compute([job])
        except BaseException as error:
            for job in jobs:
                job.future.set_exception(error)
        else:
            start, values, answers = 0, scored.values, scored.answers
            for job in jobs:
                part = values[start : start + job.rows]
                job.future.set_result(JobResult(part, answers, scored.step, scored.epoch))
                start += job.rows


def expired(wait: float = 0.0) -> OverloadedError:
    """Returns the error for a request whose deadline passed while it waited."""
    return OverloadedError(
        "The deadline of the request passed while it waited, so it was not computed. Try again later, or allow more "
        "time (Persia-Deadline-Ms, up to the --deadline-ms of the server).",
        retry_after=max(1, math.ceil(wait)),
    )
