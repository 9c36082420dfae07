"""`ReadingThread`: reads the batches of a loader in a thread, ahead of their use or when one is wanted."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

from persia.errors import PersiaError
from persia.nn.batch_counts import BatchCounts
from persia.nn.channel import Channel, Closed
from persia.telemetry.metrics import WaitClock
from persia.telemetry.tracing import Tracer

__all__ = ["READ_AHEAD", "Read", "ReadingThread"]

READ_AHEAD = 16
"""Batches to read before they are needed; more only costs memory."""

LOADER_GRACE = 1.0
"""Seconds to wait for the loader at the end of a pass."""


class Read(NamedTuple):
    """A batch that was read, or the error that the loader has raised, with a note."""

    batch: Any
    error: BaseException | None = None


class ReadingThread:
    """Reads the batches of a loader. Its batches are for one thread; its own thread starts with it.

    A thread also where nothing else has one: the loader is the user's, and may block for ever. Whoever waits for the
    thread has a deadline, and gets signals.

    Args:
        source: the loader's iterator.
        read_ahead: maximum number of batches read ahead; 0: one, which is read when it is wanted.
        counts: of the batches of all NN workers, if all have to make the same number of steps.
        tracer: records when it reads.
    """

    def __init__(
        self,
        source: Iterator[Any],
        read_ahead: int = READ_AHEAD,
        counts: BatchCounts | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self.counts = counts
        self.waits = WaitClock()
        """Waits of the thread that takes the batches."""
        self._source = source
        self._tracer = tracer or Tracer()
        self._read: Channel[Read] = Channel(max(1, read_ahead))
        self._on_demand = read_ahead == 0
        # A thread that returns from native code while the interpreter ends crashes the process.
        self._process = os.getpid()
        atexit.register(self._end_with_the_process)
        self._thread = threading.Thread(target=self._run, name="persia-read", daemon=True)
        self._thread.start()

    @property
    def ready(self) -> int:
        """Number of batches, or errors, that `next` returns without waiting."""
        return len(self._read)

    def next(self, timeout: float | None = None) -> Read:
        """Returns the next batch, or the loader's error. Blocks, at most `timeout` seconds.

        Raises:
            Closed: the loader has ended, or `stop` was called.
            TimeoutError: the loader is late.
        """
        with self.waits.waiting():
            return self._read.get(timeout)

    def stop(self) -> None:
        """Drops the batches that were read. The thread ends when the loader returns from its `next`."""
        if self.counts is not None:
            self.counts.end("left its loop")
        self._read.close(discard=True)

    def join(self) -> None:
        """Gives the thread a moment to end. If the loader blocks for longer, it ends without being joined."""
        self._thread.join(LOADER_GRACE)
        if not self._thread.is_alive():
            atexit.unregister(self._end_with_the_process)

    def _end_with_the_process(self) -> None:
        """Ends the thread at the exit of a program that never left its loop."""
        if os.getpid() != self._process:  # A forked child does not have it, and its lock may be taken.
            return
        self.stop()
        if self._thread.is_alive():  # A signal may have come before it was started.
            self._thread.join(LOADER_GRACE)

    def _run(self) -> None:
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
                if self.counts is not None:
                    self.counts.add()
                self._read.put(Read(batch))
                number += 1
            if self.counts is not None:
                self.counts.end()
        except Closed:
            pass
        except BaseException as error:
            if self.counts is not None:
                self.counts.end(f"could not read it ({type(error).__name__}: {error})")
            place = "" if isinstance(error, PersiaError) and "batch" in error.fields else f", at batch {number}"
            error.add_note(f"Raised by the loader, in the reading thread of prefetch{place}.")
            with contextlib.suppress(Closed):
                self._read.put(Read(None, error))
        self._read.close()
