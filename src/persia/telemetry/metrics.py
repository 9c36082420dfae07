"""Figures that a process tells of itself: counters, gauges, and histograms of how long things took."""

from __future__ import annotations

import bisect
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

__all__ = ["BOUNDS", "Health", "Histogram", "Latency", "Metric", "Readings", "figures"]

BOUNDS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Upper bounds of the buckets of a histogram, in seconds."""


class Metric(NamedTuple):
    """One number at this moment.

    Attributes:
        name: one of `persia.telemetry.catalogue.CATALOGUE`, which says what it is.
        value: a count since the process began, or what is so now.
        labels: what it is about: `{"table": "ads"}`.
    """

    name: str
    value: float
    labels: dict[str, str]


class Latency(NamedTuple):
    """How long something took, as a histogram.

    Attributes:
        name: as that of a figure.
        labels: likewise.
        counts: how many times within each of `BOUNDS` and not within the one before; the last is beyond all of them.
        seconds: of all together.
    """

    name: str
    labels: dict[str, str]
    counts: list[int]
    seconds: float

    def quantile(self, share: float) -> float:
        """The bound below which this share of the times lies; NaN if there are none, inf beyond the last bound."""
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
    """What is observed of a role at one moment."""

    figures: list[Metric]
    latencies: list[Latency]


class Health(NamedTuple):
    """What a process answers when it is asked how it is.

    Attributes:
        role: "embedding_ps", "nn_worker", ...
        rank: within the role.
        incarnation: number of this process among those of its role and rank.
        pid: of the process.
        host: its name.
        uptime: seconds since the role was made.
        metrics: URL of its Prometheus endpoint; empty if it has none.
        figures: all of them.
        latencies: all of them.
    """

    role: str
    rank: int
    incarnation: int
    pid: int
    host: str
    uptime: float
    metrics: str
    figures: list[Metric]
    latencies: list[Latency]

    def total(self, name: str) -> float:
        """The sum of a figure over its labels; 0 if there is none."""
        return sum(figure.value for figure in self.figures if figure.name == name)


class Histogram:
    """Counts times. Thread-safe; adding one takes about a microsecond."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = [0] * (len(BOUNDS) + 1)
        self._seconds = 0.0

    def add(self, seconds: float) -> None:
        """Counts one."""
        bucket = bisect.bisect_left(BOUNDS, seconds)
        with self._lock:
            self._counts[bucket] += 1
            self._seconds += seconds

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Counts how long the block takes, also if it raises."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add(time.perf_counter() - began)

    def latency(self, name: str, labels: Mapping[str, str] | None = None) -> Latency:
        """All so far."""
        with self._lock:
            return Latency(name, dict(labels or {}), list(self._counts), self._seconds)


def figures(prefix: str, counts: Mapping[str, float], **labels: str) -> list[Metric]:
    """Figures of counters that have names already: each is `prefix_name`, with these labels."""
    return [Metric(f"{prefix}_{name}", float(value), labels) for name, value in counts.items()]
