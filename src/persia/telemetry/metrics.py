"""Metrics of a process: counters, gauges, and histograms of durations."""

from __future__ import annotations

import bisect
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

__all__ = ["BOUNDS", "Health", "Histogram", "Latency", "Metric", "Readings", "WaitClock", "metrics_of"]

BOUNDS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Upper bounds of the buckets of a histogram, in seconds."""


class Metric(NamedTuple):
    """A counter or gauge with its current value.

    Attributes:
        name: a key of `persia.telemetry.catalogue.CATALOGUE`, which describes the metric.
        value: count since the start of the process, or current value.
        labels: labels such as `{"table": "ads"}`.
    """

    name: str
    value: float
    labels: dict[str, str]


class Latency(NamedTuple):
    """Histogram of durations.

    Attributes:
        name: name as in `Metric`.
        labels: labels as in `Metric`.
        counts: number of durations in each bucket of `BOUNDS`; the last counts durations above all bounds.
        seconds: sum of all durations.
    """

    name: str
    labels: dict[str, str]
    counts: list[int]
    seconds: float

    def quantile(self, share: float) -> float:
        """Returns the bucket bound that covers this share of durations; NaN without any, inf above the last bound."""
        total = sum(self.counts)
        if not total:
            return float("nan")
        seen = 0
        for bound, count in zip((*BOUNDS, float("inf")), self.counts, strict=True):
            seen += count
            if seen >= share * total:
                return bound
        raise AssertionError("shares are at most 1")


class Readings(NamedTuple):
    """Metrics and latencies of a role at a point in time.

    Attributes:
        metrics: counters and gauges.
        latencies: histograms of durations.
        notes: lines for people, such as decisions with their evidence, the newest one last.
    """

    metrics: list[Metric]
    latencies: list[Latency]
    notes: tuple[str, ...] = ()


class Health(NamedTuple):
    """State of a process, as reported by its health check.

    Attributes:
        role: "embedding_ps", "nn_worker", ...
        rank: rank within the role.
        incarnation: number of restarts of this role and rank, counted from 1.
        pid: process id.
        host: host name.
        uptime: seconds since the role was created.
        metrics_url: URL of the Prometheus endpoint; empty if there is none.
        metrics: counters and gauges.
        latencies: histograms of durations.
        notes: lines for people, such as decisions with their evidence, the newest one last.
    """

    role: str
    rank: int
    incarnation: int
    pid: int
    host: str
    uptime: float
    metrics_url: str
    metrics: list[Metric]
    latencies: list[Latency]
    notes: tuple[str, ...] = ()

    def total(self, name: str) -> float:
        """Returns the sum of a metric over its labels; 0 if there is none."""
        return sum(metric.value for metric in self.metrics if metric.name == name)


class Histogram:
    """A histogram of durations. Thread-safe; adding one takes about a microsecond."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = [0] * (len(BOUNDS) + 1)
        self._seconds = 0.0

    def add(self, seconds: float) -> None:
        """Adds a duration."""
        bucket = bisect.bisect_left(BOUNDS, seconds)
        with self._lock:
            self._counts[bucket] += 1
            self._seconds += seconds

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Adds the duration of the block, even if it raises."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(time.perf_counter() - start)

    def latency(self, name: str, labels: Mapping[str, str] | None = None) -> Latency:
        """Returns the histogram so far."""
        with self._lock:
            return Latency(name, dict(labels or {}), list(self._counts), self._seconds)


class WaitClock:
    """Total duration of the waits of one thread, for any thread to read. A wait that goes on counts until now."""

    def __init__(self) -> None:
        self._state: tuple[float, float | None] = (0.0, None)
        """Seconds of the waits that have ended, and the time at which the current one began: one object, no lock."""

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the duration of the block, even if it raises."""
        seconds, start = self._state[0], time.monotonic()
        self._state = seconds, start
        try:
            yield
        finally:
            self._state = seconds + time.monotonic() - start, None

    @property
    def seconds(self) -> float:
        """Seconds that the thread has waited."""
        seconds, start = self._state
        return seconds if start is None else seconds + max(0.0, time.monotonic() - start)


def metrics_of(prefix: str, counts: Mapping[str, float], **labels: str) -> list[Metric]:
    """Makes metrics named `prefix_name` from named counters."""
    return [Metric(f"{prefix}_{name}", float(value), labels) for name, value in counts.items()]
