"""Brings rows that were looked up ahead up to date, for the batch that the network uses next."""

from __future__ import annotations

import atexit
import functools
import os
import threading
import time
from collections import deque
from collections.abc import Callable

from persia.errors import DeadlineError
from persia.nn.channel import get_or_idle
from persia.nn.prepared import PreparedBatch
from persia.nn.staging import Ready
from persia.retry import Deadline

__all__ = ["RefreshAtUse", "RowRefresher"]

FAILURE_POLL = 0.2
"""Seconds between two looks at pushes, which may have failed, by a `take` that waits for them."""

END_GRACE = 1.0
"""Seconds to wait for the thread at the exit of a program."""


class RowRefresher:
    """Refreshes the rows of the next batch when pushes have returned, in a separate thread.

    The thread that looks up offers batches, push threads report the steps that are applied, and the training thread
    takes batches, in the order in which they were offered. A batch counts as current to a step once its rows have all
    updates of earlier steps of this NN worker; with combined steps, those of all NN workers.

    Args:
        refresh: reads the rows of a batch that have changed; returns the function that overwrites them.
        applied: returns the number of steps of this pass whose pushes have returned.
        timeout: seconds that `take` waits.
        failed: returns the failure of a push, after which no step is applied any more; None so far.
        idle: called now and then by a `take` that waits; None for no calls.
        eager: whether to refresh as pushes return. Otherwise only once all that the batch needs is applied.

    Attributes:
        eager: the same.
    """

    def __init__(
        self,
        refresh: Callable[[PreparedBatch], Ready],
        applied: Callable[[], int],
        timeout: float,
        failed: Callable[[], BaseException | None],
        idle: Callable[[], None] | None = None,
        *,
        eager: bool,
    ) -> None:
        self._refresh = refresh
        self._applied = applied
        self._timeout = timeout
        self._failed = failed
        self._idle = idle
        self.eager = eager
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._waiting: deque[PreparedBatch] = deque()
        self._next = -1
        """Number of the first batch that waits."""
        self._applied_before = 0
        """Steps that were applied when it became the first."""
        self._writing: PreparedBatch | None = None
        """The batch whose rows are being overwritten."""
        self._failure: BaseException | None = None
        self._late = False
        self._closed = False
        self._thread: threading.Thread | None = None

    def offer(self, batch: PreparedBatch) -> None:
        """Adds a batch that was looked up ahead. For the thread that looks up."""
        with self._changed:
            if self._closed:
                return
            if self._thread is None:
                # A thread that returns from native code while the interpreter ends crashes the process.
                atexit.register(self._end_with_the_process)
                self._thread = threading.Thread(target=self._run, name="persia-refresh", daemon=True)
                self._thread.start()
            self._waiting.append(batch)
            self._changed.notify_all()

    def pushed(self) -> None:
        """Notes that a push has returned. For any thread."""
        with self._changed:
            self._changed.notify_all()

    def take(self, batch: PreparedBatch, least: int) -> float:
        """Waits until a batch is current to step `least`, and leaves it alone from then on. For the training thread.

        Returns:
            The seconds that it waited for pushes.

        Raises:
            DeadlineError: its rows did not come in time.
            Exception: the failure of a push or a refresh.
        """
        with self._changed:
            batch.needs_step = least
            self._changed.notify_all()
        try:
            waited = get_or_idle(functools.partial(self._taken, batch, time.monotonic()), self._timeout, self._idle)
        except TimeoutError:
            self._late = True
            applied = self._applied()
            stage = f"embedding worker: {'push' if applied < least else 'refresh'}"
            raise DeadlineError(
                f"The rows of a batch were not brought up to date within {self._timeout:g} s: it needs the updates of "
                f"{least} steps, and {applied} are applied. Late: {stage}. Check what blocks that stage, or raise "
                "`timeout`.",
                stage=stage,
                timeout=self._timeout,
            ) from None
        batch.finish_refresh()
        return waited

    def _taken(self, batch: PreparedBatch, began: float, seconds: float) -> float:
        """Takes a batch once it is current. Returns for how long steps that it needs were not applied since `began`."""
        waited, deadline = 0.0, Deadline(seconds)
        with self._changed:
            while batch.current_to < batch.needs_step or self._writing is batch:
                failure = self._failure or self._failed()
                if failure is not None:
                    raise failure
                if deadline.passed:
                    raise TimeoutError
                behind = self._applied() < batch.needs_step
                self._changed.wait(min(deadline.left, FAILURE_POLL))
                waited = time.monotonic() - began if behind else waited
            if batch in self._waiting:
                self._waiting.remove(batch)
            self._changed.notify_all()
        return waited

    def close(self) -> None:
        """Ends the thread, without waiting for it. For any thread."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()

    def join(self) -> None:
        """Waits until the thread has ended, after `close`; only for a moment if it was late before."""
        if self._thread is not None:
            self._thread.join(END_GRACE if self._late else self._timeout)
            if not self._thread.is_alive():
                atexit.unregister(self._end_with_the_process)

    def _end_with_the_process(self) -> None:
        """Ends the thread at the exit of a program that never left its loop; gives it a moment."""
        # A forked child does not have the thread, and its lock may be taken.
        if os.getpid() == self._process and self._thread is not None:
            self.close()
            self._thread.join(END_GRACE)

    def _due(self) -> PreparedBatch | None:
        """Returns the next batch if there is something to refresh."""
        if not self._waiting:
            return None
        batch, applied = self._waiting[0], self._applied()
        if batch.number != self._next:
            self._next, self._applied_before = batch.number, applied
        if batch.current_to >= applied:
            return None
        needed = batch.current_to < batch.needs_step <= applied
        # One refresh brings the most once only the step that is being computed is missing; or else the next push does.
        worth = self.eager and (applied >= batch.step - 1 or applied > self._applied_before)
        return batch if needed or worth else None

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or self._due() is not None)
                    batch = self._due()
                    if self._closed or batch is None:
                        return
                    applied = self._applied()
                overwrite = self._refresh(batch)
                with self._changed:
                    if batch not in self._waiting:  # It was taken meanwhile.
                        continue
                    self._writing = batch
                overwrite()
                with self._changed:
                    batch.current_to = applied
                    self._writing = None
                    self._changed.notify_all()
        except BaseException as error:
            error.add_note("Raised in the refreshing thread of prefetch.")
            with self._changed:
                self._failure, self._writing = error, None
                self._changed.notify_all()


class RefreshAtUse:
    """Refreshes the rows of a batch when it is used, in the training thread; has the interface of `RowRefresher`.

    Args:
        refresh: reads the rows of a batch that have changed; returns the function that overwrites them.
        applied: returns the number of steps of this pass whose pushes have returned.

    Attributes:
        eager: False, as rows are refreshed once.
    """

    eager = False

    def __init__(self, refresh: Callable[[PreparedBatch], Ready], applied: Callable[[], int]) -> None:
        self._refresh = refresh
        self._applied = applied

    def offer(self, batch: PreparedBatch) -> None:
        """No-op: the batch is used next."""

    def pushed(self) -> None:
        """No-op: pushes return before a batch is used."""

    def take(self, batch: PreparedBatch, least: int) -> float:
        """Refreshes a batch if steps were applied since its lookup. Blocks. Returns 0: it does not wait for pushes."""
        applied = self._applied()
        assert applied >= least
        if batch.current_to < applied:
            self._refresh(batch)()
            batch.current_to = applied
        batch.finish_refresh()
        return 0.0

    def close(self) -> None:
        """No-op: there is no thread."""

    def join(self) -> None:
        """No-op: there is no thread."""
