"""How fast each NN worker is, over time: what makes stragglers, in experiments and in emulated clusters.

A trace is a table of slow-downs, so that a simulation and an emulation by waiting agree on when work is done. The file
of a "cluster day" is this record as JSON:

    {"period": 60.0, "workers": [[[0.0, 1.0], [30.0, 4.0]], [[0.0, 1.0]]]}

reads: two NN workers; the first is 4x slower in the second half of every minute.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from persia.errors import ConfigError

__all__ = ["Slowdown", "Trace", "alternating", "load_trace", "phases", "steady"]


class Slowdown(NamedTuple):
    """From `start` seconds on, work takes `factor` times as long."""

    start: float
    factor: float


class Trace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Slow-downs of every NN worker, repeated every `period` seconds.

    Args:
        workers: by NN worker, in the order of time; the first starts at 0.
        period: seconds.
    """

    workers: list[list[Slowdown]]
    period: float

    def __post_init__(self) -> None:
        if not (self.period > 0 and self.workers):
            raise ConfigError("A trace needs a period > 0 and at least one NN worker.", field="trace.period")
        for worker, parts in enumerate(self.workers):
            starts = [part.start for part in parts]
            if not starts or starts[0] != 0 or sorted(set(starts)) != starts or starts[-1] >= self.period:
                raise ConfigError(
                    f"trace.workers[{worker}] must have rising starts, the first 0 and the last below the period of "
                    f"{self.period} s; it has {starts[:5]} ...",
                    field=f"trace.workers[{worker}]",
                )
            if not all(0 < part.factor < float("inf") for part in parts):
                raise ConfigError(
                    f"trace.workers[{worker}] has a factor that is not a number > 0.", field=f"trace.workers[{worker}]"
                )

    def factor(self, worker: int, time: float) -> float:
        """How many times slower `worker` is at a moment."""
        parts = self.workers[worker]
        return parts[bisect_right(parts, time % self.period, key=lambda part: part.start) - 1].factor

    def finish(self, worker: int, start: float, work: float) -> float:
        """When work that takes `work` seconds at full speed is done, if `worker` begins it at `start`."""
        parts = self.workers[worker]
        if len(parts) == 1:
            return start + work * parts[0].factor
        lap, at = divmod(start, self.period)
        number = bisect_right(parts, at, key=lambda part: part.start) - 1
        while True:
            end = parts[number + 1].start if number + 1 < len(parts) else self.period
            needed = work * parts[number].factor
            if at + needed <= end:
                return lap * self.period + at + needed
            work -= (end - at) / parts[number].factor
            at, number = end, number + 1
            if number == len(parts):
                lap, at, number = lap + 1, 0.0, 0


def load_trace(path: str | Path) -> Trace:
    """Reads the file of a cluster day.

    Raises:
        ConfigError: it cannot be read, or is no trace; the message has the path.
    """
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=Trace)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"The trace {path} cannot be read: {error}.", path=str(path)) from error


def steady(factors: Sequence[float]) -> Trace:
    """NN workers that are always as slow as `factors` say: `steady([1] * 6 + [4] * 2)`."""
    return Trace([[Slowdown(0.0, factor)] for factor in factors], 1.0)


def phases(
    workers: int, *, length: float, factor: float = 4.0, share: float = 0.25, count: int = 256, seed: int = 0
) -> Trace:
    """Every NN worker is slow for a share of the time, in phases at random, independently of the others.

    Args:
        workers: how many.
        length: seconds of a phase.
        factor: how slow.
        share: of the phases that are slow, exactly, for each NN worker.
        count: phases until it repeats.
        seed: of the draw.
    """
    rng = np.random.default_rng(seed)
    slow = np.arange(count) < round(share * count)
    drawn = [np.where(rng.permutation(slow), factor, 1.0).tolist() for _ in range(workers)]
    return Trace(
        [_joined([Slowdown(i * length, f) for i, f in enumerate(factors)]) for factors in drawn], count * length
    )


def alternating(factors: Sequence[float], *, quiet: float, strained: float) -> Trace:
    """Seconds of quiet, in which all are at full speed, then of strain, in which they are as slow as `factors` say."""
    return Trace([_joined([Slowdown(0.0, 1.0), Slowdown(quiet, float(f))]) for f in factors], quiet + strained)


def _joined(parts: list[Slowdown]) -> list[Slowdown]:
    """Without the parts that go on as before."""
    return [part for i, part in enumerate(parts) if i == 0 or part.factor != parts[i - 1].factor]
