"""The arguments of `persia.data.kafka`, and the counters of a stream."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from time import monotonic
from typing import Literal, NamedTuple, TypeAlias

from persia.data.streams.broker import BrokerOptions
from persia.data.streams.message_decoding import ValuesFormat
from persia.telemetry.metrics import Metric
from persia.types import Partition

__all__ = ["Begin", "EventTime", "KafkaOptions", "StreamCounts", "Until"]

Begin: TypeAlias = Literal["earliest", "latest"] | datetime
RATE_SECONDS = 10.0
"""Time over which rows per second are counted."""

Until: TypeAlias = Literal["now"] | datetime | None


class EventTime(NamedTuple):
    """The time of events.

    Attributes:
        column: name of the column.
        milliseconds: milliseconds per unit of its numbers.
        allowed: milliseconds by which an event may be older than the newest event before it; None for no limit.
        drop: whether late rows are dropped.
    """

    column: str
    milliseconds: int
    allowed: int | None
    drop: bool


@dataclass(frozen=True)
class KafkaOptions:
    """Arguments of `kafka`."""

    broker: BrokerOptions
    values: ValuesFormat
    start: Begin
    until: Until
    linger: float
    poison: Literal["error", "skip"]
    dead_letters: str | None
    event_time: EventTime | None = None


class StreamCounts:
    """Counts of the stream's messages and rows, and the lag of each partition. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._lags: dict[Partition, int] = {}
        self._time = 0
        """Time of the last delivered message, in milliseconds since 1970."""
        self._read: deque[tuple[float, int]] = deque()
        """Times and rows of the batches of the last `RATE_SECONDS`."""

    def add(self, name: str, count: int) -> None:
        """Adds to a counter."""
        with self._lock:
            self._counts[name] += count

    def batch(self, rows: int, time: int) -> None:
        """Counts a batch; `time` is the time of its last message."""
        with self._lock:
            self._counts["rows"] += rows
            self._counts["batches"] += 1
            self._time = time
            self._read.append((monotonic(), rows))
            self._drop_old()

    def set_lags(self, measured: Mapping[Partition, int | None]) -> None:
        """Sets the lags of the partitions that are read here; None for the last one that was known.

        Others are left out: another data loader may read them now.
        """
        with self._lock:
            lags = {each: self._lags.get(each) if lag is None else lag for each, lag in measured.items()}
            self._lags = {each: lag for each, lag in lags.items() if lag is not None}

    def observe(self) -> list[Metric]:
        """Returns all counts as metrics."""
        with self._lock:
            names = ("rows", "batches", "poison", "too_large", "late")
            metrics = [Metric(f"stream_{name}", self._counts[name], {}) for name in names]
            metrics.append(Metric("stream_rows_per_second", self._rate(), {}))
            if self._time:
                metrics.append(Metric("stream_delay_seconds", max(0.0, time.time() - self._time / 1000), {}))
            for (topic, number), lag in self._lags.items():
                metrics.append(Metric("stream_lag", lag, {"topic": topic, "partition": str(number)}))
            return metrics

    def _rate(self) -> float:
        """Returns the rows per second over the last `RATE_SECONDS`."""
        self._drop_old()
        return sum(rows for _, rows in self._read) / RATE_SECONDS

    def _drop_old(self) -> None:
        while self._read and self._read[0][0] < monotonic() - RATE_SECONDS:
            self._read.popleft()
