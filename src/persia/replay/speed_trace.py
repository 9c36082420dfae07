"""Traces: the speed of each NN worker over time, for stragglers in simulations and emulated clusters.

A trace is a table of slowdowns, so a simulation and an emulation that waits agree on the times at which work ends. Its
file is this record as JSON, such as

    {"period": 60.0, "workers": [[[0.0, 1.0], [30.0, 4.0]], [[0.0, 1.0]]]}

for two NN workers. The first is 4x slower in the second half of every minute.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from persia.errors import ConfigError

__all__ = ["Slowdown", "Trace", "alternating", "load_trace", "phases", "stalls", "steady"]


class Slowdown(NamedTuple):
    """A change of speed: from `start` seconds on, work takes `factor` times as long."""

    start: float
    factor: float


class Trace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Slowdowns of all NN workers, repeated every `period` seconds.

    Args:
        workers: slowdowns by NN worker, in order of time; the first starts at 0.
        period: length in seconds.
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
                    f"trace.workers[{worker}] must have ascending starts, the first 0 and the last below the period of "
                    f"{self.period} s; it has {starts[:5]} ...",
                    field=f"trace.workers[{worker}]",
                )
            if not all(0 < part.factor < float("inf") for part in parts):
                raise ConfigError(
                    f"trace.workers[{worker}] has a factor that is not a number > 0.", field=f"trace.workers[{worker}]"
                )

    def factor(self, worker: int, time: float) -> float:
        """Returns the factor by which a worker is slower at a time."""
        parts = self.workers[worker]
        return parts[bisect_right(parts, time % self.period, key=lambda part: part.start) - 1].factor

    def finish(self, worker: int, start: float, work: float) -> float:
        """Returns the end time of work that starts at `start` and takes `work` seconds at full speed."""
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
    """Reads the file of a trace.

    Raises:
        ConfigError: the file cannot be read, or is not a trace; the error has the path.
    """
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=Trace)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"The trace {path} cannot be read: {error}.", path=str(path)) from error


def steady(factors: Sequence[float]) -> Trace:
    """Returns a trace of NN workers with constant factors, such as `steady([1] * 6 + [4] * 2)`."""
    return Trace([[Slowdown(0.0, factor)] for factor in factors], 1.0)


def phases(
    workers: int, *, length: float, factor: float = 4.0, share: float = 0.25, count: int = 256, seed: int = 0
) -> Trace:
    """Returns a trace in which each NN worker is slow in random phases, independently of the others.

    Args:
        workers: number of NN workers.
        length: length of a phase in seconds.
        factor: factor of slow phases.
        share: exact share of slow phases, for each NN worker.
        count: number of phases until the trace repeats.
        seed: seed of the random choice.
    """
    rng = np.random.default_rng(seed)
    slow = np.arange(count) < round(share * count)
    drawn = [np.where(rng.permutation(slow), factor, 1.0).tolist() for _ in range(workers)]
    return Trace(
        [_joined([Slowdown(i * length, f) for i, f in enumerate(factors)]) for factors in drawn], count * length
    )


def stalls(
    workers: int,
    *,
    length: float,
    chance: float = 0.01,
    low: float = 8.0,
    high: float = 50.0,
    count: int = 4096,
    seed: int = 0,
) -> Trace:
    """Returns a trace in which random batches of each NN worker take many times as long.

    Args:
        workers: number of NN workers.
        length: compute time of a batch at full speed, in seconds.
        chance: probability of a stall, for each batch.
        low: minimum factor of a stall. A stall lasts as long as a batch that starts with it.
        high: maximum factor; the factors in between are log-uniform.
        count: number of batches at full speed until the trace repeats.
        seed: seed of the random choice.
    """
    rng = np.random.default_rng(seed)
    period = count * length
    drawn = []
    for _ in range(workers):
        parts, time = [Slowdown(0.0, 1.0)], rng.geometric(chance) * length
        while time < period:
            factor = float(np.exp(rng.uniform(np.log(low), np.log(high))))
            parts.append(Slowdown(float(time), factor))
            time += factor * length
            if time < period:
                parts.append(Slowdown(float(time), 1.0))
            time += rng.geometric(chance) * length
        drawn.append(_joined(parts))
    return Trace(drawn, period)


def alternating(factors: Sequence[float], *, quiet: float, strained: float) -> Trace:
    """Returns a trace that alternates between full speed for `quiet` seconds and `factors` for `strained` seconds."""
    return Trace([_joined([Slowdown(0.0, 1.0), Slowdown(quiet, float(f))]) for f in factors], quiet + strained)


def _joined(parts: list[Slowdown]) -> list[Slowdown]:
    """Removes parts with the same factor as the previous part."""
    return [part for i, part in enumerate(parts) if i == 0 or part.factor != parts[i - 1].factor]
