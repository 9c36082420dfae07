"""Looks rows up and pushes their gradients in the training thread: for depth 0, with rows in memory of this process.

Nothing can be hidden there: a lookup has to wait for the gradients of the step before, and no row is fetched from
elsewhere. So each hand-over between threads would only cost time, and the cores are the network's and the store's in
turn.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from persia.nn.channel import Closed, get_or_idle
from persia.nn.pass_threads import PassSteps, late_batch
from persia.nn.prepared import PreparedBatch
from persia.nn.reading_thread import ReadingThread
from persia.telemetry.tracing import Tracer

__all__ = ["InlinePass", "uninterrupted"]


class InlinePass:
    """Runs a pass over a loader, or a part of one, without its own threads. For the training thread.

    A draw pushes the gradients since the draw before, takes a batch from the reading thread, and looks its rows up. The
    order is that of `Sync`, and so are the bits.

    Args:
        steps: what is done with each batch; `drawn` gets the seconds of pushing and looking up, which threads would
            hide, as a wait.
        reading: reads the batches; its owner stops it.
        timeout: seconds that the loader may take for a batch.
        tracer: records what a draw does.
        endless: whether the loader may be idle for any time.
        number: of the first batch within the pass.
        idle: called now and then by a draw that waits for the loader; None for no calls.
    """

    ready = 0
    """Number of batches that are looked up and not drawn yet."""

    def __init__(
        self,
        steps: PassSteps,
        reading: ReadingThread,
        timeout: float,
        tracer: Tracer | None = None,
        endless: bool = False,
        number: int = 0,
        idle: Callable[[], None] | None = None,
    ) -> None:
        self.number = number
        """Number of the next batch within the pass."""
        self.push_failure: BaseException | None = None
        """The failure of the first push that failed."""
        self.failed = False
        """Whether another NN worker is known to have left the pass, or a push has failed."""
        self._steps = steps
        self._reading = reading
        self._timeout = timeout
        self._tracer = tracer or Tracer()
        self._endless = endless
        self._idle = idle
        self._pushes: deque[Callable[[], None]] = deque()

    @property
    def unpushed(self) -> int:
        """Number of pushes that were handed over and have not succeeded yet."""
        return len(self._pushes)

    def draw(self) -> PreparedBatch:
        """Returns the next batch.

        Raises:
            StopIteration: the loader has ended.
            DeadlineError: the loader was late.
            Exception: the failure of the loader, the lookup, or an earlier push.
        """
        began = time.monotonic()
        self.await_pushes()
        pushed = time.monotonic()
        batch = self._read()
        read = time.monotonic()
        try:
            prepared, make_ready = self._look_up(batch)
            make_ready()
        except BaseException as error:
            self._name_batch(error)
            raise
        self.number += 1
        self._steps.drawn(-(pushed - began) - (time.monotonic() - read), inline=True)
        return prepared

    def push(self, task: Callable[[], None]) -> None:
        """Keeps a push until the next draw; no-op after a failed push."""
        if self.push_failure is None:
            self._pushes.append(task)

    def await_pushes(self) -> None:
        """Runs the pushes that were handed over. Raises the failure of one, also of an earlier one."""
        self._push_until(0)

    def _push_until(self, left: int) -> None:
        """Runs pushes until at most `left` are left; see `await_pushes`."""
        with uninterrupted():
            while len(self._pushes) > left and self.push_failure is None:
                try:
                    self._pushes[0]()
                    self._pushes.popleft()
                except Exception as error:
                    error.add_note("Raised by a push of prefetch.")
                    self.push_failure, self.failed = error, True
                    self._pushes.clear()
        if self.push_failure is not None:
            raise self.push_failure

    def close(self, *, finish: bool = True, last: bool = True) -> None:
        """Ends the part: runs the pushes that were handed over, or drops them. A failure stays in `push_failure`.

        Args:
            finish: whether they are run.
            last: whether no other part of the pass follows.
        """
        if finish and self.push_failure is None:
            try:
                self.await_pushes()
            except Exception as error:
                if error is not self.push_failure:
                    raise
        self._pushes.clear()
        if last:
            self._steps.close()

    def _look_up(self, batch: object) -> tuple[PreparedBatch, Callable[[], None]]:
        """Registers a batch and looks it up. Its lookup has to be allowed, as nobody else pushes."""
        with self._tracer.span("register"):
            registered = self._steps.register(batch)
        self._steps.may_look_up()  # Staleness is counted here.
        return self._steps.look_up(registered)

    def _name_batch(self, error: BaseException) -> None:
        """Adds the number of the batch to an error of its lookup."""
        error.add_note(f"Raised at the lookup of batch {self.number} of prefetch.")

    def _read(self) -> object:
        while True:
            try:
                read = get_or_idle(self._reading.next, self._timeout, self._idle)
                break
            except Closed:
                raise StopIteration from None
            except TimeoutError:
                if not self._endless:
                    raise late_batch(self.number, f"data loader: batch {self.number}", self._timeout) from None
        if read.error is not None:
            raise read.error
        return read.batch


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Delays the KeyboardInterrupt of a loop of the user to its end: a push that is cut short is applied in part."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    interrupted = []
    signal.signal(signal.SIGINT, lambda *_: interrupted.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if interrupted:
            raise KeyboardInterrupt
