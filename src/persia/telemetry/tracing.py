"""Spans of a process: what its threads do at which time, recorded while a trace is taken."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["MAX_SPANS", "NO_STEP", "OFF", "ProcessTrace", "Tracer", "clock_offset"]

MAX_SPANS = 100_000
"""Maximum number of spans that a process records, about 10 MB; further ones are counted and dropped."""

NO_STEP = -1
"""Step of a span that belongs to no step, or to a step that is unknown where the span is recorded."""

PROBES = 8
"""Number of readings of another clock; the one with the shortest round trip counts."""

OFF: AbstractContextManager[None] = contextlib.nullcontext()
"""The span of a tracer that does not record."""


class ProcessTrace(NamedTuple):
    """Spans of one process, as arrays `[spans]`.

    Attributes:
        role: role of the process.
        rank: rank within the role.
        pid: process id.
        host: host name.
        offset: seconds to add to `start` for the coordinator's clock.
        uncertainty: maximum error of `offset`: half of the round trip that measured it.
        dropped: number of spans beyond `MAX_SPANS`.
        names: distinct names of spans.
        tracks: names of the tracks, mostly names of threads. Spans of a track nest.
        name: index into `names`.
        track: index into `tracks`.
        start: seconds on the monotonic clock of the process.
        seconds: durations.
        step: global step, or `NO_STEP`.
        batch: batch id; 0 if the span belongs to none.
    """

    role: str
    rank: int
    pid: int
    host: str
    offset: float
    uncertainty: float
    dropped: int
    names: list[str]
    tracks: list[str]
    name: NDArray[np.int32]
    track: NDArray[np.int32]
    start: NDArray[np.float64]
    seconds: NDArray[np.float64]
    step: NDArray[np.int64]
    batch: NDArray[np.uint64]


class Tracer:
    """Records the spans of one process between `start` and `stop`. Thread-safe.

    While it does not record, a span costs a call and a branch, a fraction of a microsecond. Recording ends by itself
    after a time, so that a caller that died leaves nothing behind.
    """

    def __init__(self) -> None:
        self.active = False
        """Whether spans are recorded."""
        self._lock = threading.Lock()
        self._until = 0.0
        self._spans: list[tuple[str, int, float, float, int, int]] = []
        self._tracks: dict[tuple[int, str], int] = {}
        self._dropped = 0

    def start(self, seconds: float) -> None:
        """Starts to record, for `seconds` at most. Discards earlier spans."""
        with self._lock:
            self._spans, self._tracks, self._dropped = [], {}, 0
            self._until = time.monotonic() + seconds
            self.active = True

    def stop(self) -> None:
        """Stops recording. The spans remain available to `trace`."""
        self.active = False

    def span(self, name: str, step: int = NO_STEP, batch: int = 0) -> AbstractContextManager[None]:
        """Returns a context manager that records a piece of work of the calling thread.

        Args:
            name: name of the work.
            step: global step.
            batch: batch id; `trace_events` finds the step that it belongs to.
        """
        return _Span(self, name, step, batch) if self.active else OFF

    def add(self, name: str, began: float, step: int = NO_STEP, batch: int = 0, track: str = "") -> None:
        """Records a span that began at `began` on the monotonic clock and ends now; no-op while not recording.

        Args:
            name: name of the work.
            began: its start on the monotonic clock.
            step: global step.
            batch: batch id.
            track: name of the track; empty for the calling thread.
        """
        now = time.monotonic()
        thread = threading.current_thread()
        key = (0, track) if track else (thread.ident or 0, thread.name)
        with self._lock:
            if not self.active:
                return
            if now > self._until:
                self.active = False
            elif len(self._spans) >= MAX_SPANS:
                self._dropped += 1
            else:
                number = self._tracks.setdefault(key, len(self._tracks))
                self._spans.append((name, number, began, now - began, step, batch))

    def trace(self, role: str, rank: int, pid: int, host: str, offset: float, uncertainty: float) -> ProcessTrace:
        """Returns the spans so far; see `ProcessTrace` for the arguments."""
        with self._lock:
            spans, tracks, dropped = list(self._spans), [name for _, name in self._tracks], self._dropped
        names = {name: number for number, name in enumerate(dict.fromkeys(span[0] for span in spans))}
        columns = list(zip(*spans, strict=True)) or [()] * 6
        return ProcessTrace(
            role, rank, pid, host, offset, uncertainty, dropped, list(names), tracks,
            np.array([names[name] for name in columns[0]], np.int32),
            np.array(columns[1], np.int32),
            np.array(columns[2], np.float64),
            np.array(columns[3], np.float64),
            np.array(columns[4], np.int64),
            np.array(columns[5], np.uint64),
        )  # fmt: skip


class _Span:
    """A span in progress."""

    def __init__(self, tracer: Tracer, name: str, step: int, batch: int) -> None:
        self._tracer, self._name, self._step, self._batch = tracer, name, step, batch

    def __enter__(self) -> None:
        self._began = time.monotonic()

    def __exit__(self, *error: object) -> None:
        self._tracer.add(self._name, self._began, self._step, self._batch)


def clock_offset(reference: Callable[[], float]) -> tuple[float, float]:
    """Measures the offset of this process's monotonic clock to another one, as NTP does. Blocks for some round trips.

    Args:
        reference: reads the other clock.

    Returns:
        Seconds to add to a time of this process for the other clock, and the maximum error: half of the round trip.
    """
    best = (float("inf"), 0.0)
    for _ in range(PROBES):
        before = time.monotonic()
        there = reference()
        after = time.monotonic()
        best = min(best, ((after - before) / 2, there - (before + after) / 2))
    return best[1], best[0]
