"""Registers benchmarks under the names that they print, compares in alternation, and runs the selected ones.

A module in `MODULES` registers its functions with all names that they may print:

    @runner.measures("store.insert")
    def insert(preset: str) -> runner.Measure: ...  # one Measure, several, or None if it cannot run here

A function with a parameter `selected` gets the names that are to be printed, so that it can leave out what they do not
need; one with a parameter `beside` gets the number of processes that compute beside it, so that it can do less: plain
PyTorch, whose threads spin, takes ten times as long then.

Two candidates are compared in alternation within one run, and their ratio is reported, so that a slow, a busy or a
warming machine affects both alike. Values have base units (`UNITS`) and keep their sign: a loss of AUC is negative.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import inspect
import math
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from persia.errors import MissingExtraError

__all__ = [
    "MIN_ROUNDS", "MODULES", "PRESETS", "RESOURCES", "UNITS", "Benchmark", "Measure", "benchmarks", "measures", "names",
    "paired", "paired_ratio", "quantity", "ratio", "rounds_of", "run", "within", "worst",
]  # fmt: skip

PRESETS = ("smoke", "laptop", "full")
MODULES = (
    "store", "store_pauses", "hit_rates", "peers", "batch", "reading", "features", "checkpoint", "checkpoint_parallel",
    "rpc", "step", "step_dispatches", "compiled_step", "sync", "gpu", "gpu_rows", "gpu_serve", "gpu_threads",
    "reuse", "profile_step", "globo", "quality",
    "row_dtypes", "defaults", "modes", "modes_figures", "fresh", "fresh_rows", "paper_arrival", "paper_fresh",
    "paper_gba", "paper", "paper_figures", "convergence", "modes_runtime", "traffic", "buckets", "clients",
    "several_hosts", "hosts", "chaos", "roles", "cluster", "driver", "recovery", "ssd", "ssd_rates", "plan",
    "plan_seconds", "capacity", "capacity_measured", "capacity_simulated", "threads", "apmsqueeze", "apms_learning",
    "wheel", "zoo", "seq", "seq_cold", "seq_long", "seq_rank", "seq_globo", "seq_movielens", "interop", "ui", "init",
    "publish", "publish_ray", "kafka", "serve_rows", "serve_predict", "serve_updates", "serve_http", "online",
    "exactly_once", "targets", "scheduler", "protocol_model", "scaling", "gba_theory", "apms_theory", "gba_comparisons",
)  # fmt: skip
UNITS = (
    "ratio", "fraction", "s", "rows/s", "calls/s", "tokens/s", "rows", "steps", "bytes", "MB", "bytes/s", "AUC", "loss",
    "norm", "bool", "states", "violations", "operations", "calls",
)  # fmt: skip
MIN_ROUNDS = 5


def rounds_of(preset: str) -> int:
    """How often to measure: once in a smoke run, whose figures mean nothing."""
    return 1 if preset == "smoke" else MIN_ROUNDS


@dataclass(frozen=True)
class Measure:
    """One result.

    Args:
        name: one of those that the function is registered under.
        value: the median of the rounds, or what was counted.
        unit: one of `UNITS`; `details["of"]` says what a ratio compares.
        at_least: lower bound of the target, or None.
        at_most: upper bound of the target, or None.
        spread: half the interquartile range over the median; None for what is counted or simulated.
        interval: both ends of the 95 % interval of `value`, a mean; the target is asked of the nearer end.
        details: further facts, such as both sides of a ratio.
    """

    name: str
    value: float
    unit: str
    at_least: float | None = None
    at_most: float | None = None
    spread: float | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    interval: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if self.unit not in UNITS:
            raise ValueError(f"Invalid unit {self.unit!r} of {self.name}; expected one of: {', '.join(UNITS)}")

    @property
    def holds(self) -> bool | None:
        """Whether the target is met; None without one."""
        if self.at_least is None and self.at_most is None:
            return None
        return self._margin() >= 0

    def _margin(self) -> float:
        """Distance to the nearer bound, as a fraction of it; negative beyond it, and if the value is NaN."""
        if math.isnan(self.value):
            return -math.inf
        low, high = self.interval or (self.value, self.value)
        margins = []
        if self.at_least is not None:
            margins.append((low - self.at_least) / (abs(self.at_least) or 1.0))
        if self.at_most is not None:
            margins.append((self.at_most - high) / (abs(self.at_most) or 1.0))
        return min(margins)


Function = Callable[..., Measure | Iterable[Measure] | None]
"""Called with the preset; where it has a parameter `selected`, with the set of selected names; and with `beside`."""


class Benchmark(NamedTuple):
    """A function and the names that it may print."""

    names: tuple[str, ...]
    function: Function


_REGISTERED: list[Benchmark] = []
RESOURCES = contextlib.ExitStack()
"""Resources that several functions of a run share, such as process groups; closed at its end."""


def measures(*names: str) -> Callable[[Function], Function]:
    """Returns a decorator that registers a function under every name that it may print."""

    def register(function: Function) -> Function:
        taken = {name for benchmark in _REGISTERED for name in benchmark.names}
        if twice := taken.intersection(names):
            raise ValueError(f"{', '.join(sorted(twice))}: registered twice")
        _REGISTERED.append(Benchmark(names, function))
        return function

    return register


@functools.cache
def benchmarks() -> tuple[Benchmark, ...]:
    """All benchmarks, in the order of `MODULES`, but those that need an extra which is not installed."""
    for module in MODULES:
        try:
            importlib.import_module(f"benchmarks.{module}")
        except (MissingExtraError, ModuleNotFoundError) as error:
            if isinstance(error, ModuleNotFoundError) and str(error.name).partition(".")[0] in ("benchmarks", "persia"):
                raise  # A mistake of ours.
            print(f"benchmarks/{module}.py is skipped: {error}", file=sys.stderr)
    return tuple(_REGISTERED)


def names() -> list[str]:
    """Every name that can be selected."""
    return [name for benchmark in benchmarks() for name in benchmark.names]


def run(
    patterns: Sequence[str],
    preset: str,
    beside: int = 0,
    *,
    seconds: float = math.inf,
    failed: list[str] | None = None,
) -> Iterator[Measure]:
    """Runs each function with a selected name once, in the order of the patterns, and yields the selected measures.

    Args:
        patterns: select names.
        preset: one of `PRESETS`.
        beside: how many processes the caller lets compute beside it.
        seconds: no function begins later. Those that are left out are named on stderr.
        failed: gets the first name of each function that fails, whose error is printed, and each pattern that selects
            nothing, and the others run; None for the error itself.

    Raises:
        KeyError: a pattern selects nothing.
        RuntimeError: a function printed a name that it is not registered under.
    """
    import torch

    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names()):
            hint = f"; did you mean '{pattern}.*'?" if any(name.startswith(f"{pattern}.") for name in names()) else ""
            problem = f"No benchmark is named {pattern!r}{hint} `python -m benchmarks --list` prints all names."
            if failed is None:
                raise KeyError(problem)
            print(problem, file=sys.stderr)
            failed.append(pattern)
    threads, started = torch.get_num_threads(), time.monotonic()
    with RESOURCES:
        for benchmark, selected in _ordered(patterns):
            if time.monotonic() - started > seconds:
                print(f"{', '.join(sorted(selected))}: left out after {seconds:.0f} s", file=sys.stderr)
                continue
            torch.set_num_threads(threads)
            if preset == "smoke":  # Many run in one process: whichever hangs or crashes is the one that was named last.
                print(f"--- {benchmark.names[0]}", file=sys.stderr, flush=True)
            began, used = time.monotonic(), _processor_seconds()
            try:
                for measure in _printed(benchmark, preset, {"selected": selected, "beside": beside}):
                    if measure.name in selected:
                        yield measure
            except Exception:
                if failed is None:
                    raise
                traceback.print_exc()
                failed.append(benchmark.names[0])
            gc.collect()
            if preset == "smoke":
                took = f"{time.monotonic() - began:.1f} s, {_processor_seconds() - used:.1f} s of processors"
                print(f"    {benchmark.names[0]}: {took}", file=sys.stderr, flush=True)


def _ordered(patterns: Sequence[str]) -> list[tuple[Benchmark, set[str]]]:
    """Returns benchmarks with their selected names, by the first pattern that selects one of them."""
    found: list[tuple[int, Benchmark, set[str]]] = []
    for benchmark in benchmarks():
        selecting = {
            name: at for at, pattern in reversed([*enumerate(patterns)]) for name in benchmark.names
            if fnmatchcase(name, pattern)
        }  # fmt: skip
        if selecting:
            found.append((min(selecting.values()), benchmark, set(selecting)))
    return [(benchmark, selected) for _, benchmark, selected in sorted(found, key=lambda each: each[0])]


def _processor_seconds() -> float:
    """Of this process and its children that have ended; processes of Ray are not among them."""
    return sum(os.times()[:4])


def _printed(benchmark: Benchmark, preset: str, offered: Mapping[str, Any]) -> Iterator[Measure]:
    asked = inspect.signature(benchmark.function).parameters
    try:
        result = benchmark.function(preset, **{name: value for name, value in offered.items() if name in asked})
        for measure in [result] if isinstance(result, Measure) else result or []:
            if measure.name not in benchmark.names:
                raise RuntimeError(f"{measure.name} is printed but not registered; add it to `@runner.measures`.")
            yield measure
    except Exception as error:
        error.add_note(f"The benchmark that failed: python -m benchmarks {benchmark.names[0]} --preset {preset}")
        raise


def ratio(
    name: str,
    *,
    ours: Callable[[], float],
    theirs: Callable[[], float],
    of: str,
    rounds: int = MIN_ROUNDS,
    at_least: float | None = None,
    at_most: float | None = None,
    details: Mapping[str, Any] | None = None,
) -> Measure:
    """Returns the median over rounds of ours / theirs, both rates or both times, measured in alternating order."""
    pairs = []
    for number in range(rounds):
        if number % 2:
            b, a = theirs(), ours()
        else:
            a, b = ours(), theirs()
        pairs.append((a, b))
    record = {
        "of": of,
        "ours": statistics.median(a for a, _ in pairs),
        "theirs": statistics.median(b for _, b in pairs),
        **(details or {}),
    }
    return quantity(name, [a / b for a, b in pairs], "ratio", at_least=at_least, at_most=at_most, details=record)


def quantity(
    name: str,
    values: Sequence[float],
    unit: str,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    details: Mapping[str, Any] | None = None,
) -> Measure:
    """Returns the median and the spread of `MIN_ROUNDS` measurements or more; one in a smoke run, without a spread."""
    if 1 != len(values) < MIN_ROUNDS:
        raise ValueError(f"{name} was measured {len(values)} times; a spread needs at least {MIN_ROUNDS}")
    return Measure(name, statistics.median(values), unit, at_least, at_most, _spread(values), details or {})


T_975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093),
)
"""97.5 % quantiles of Student's t with 1 to 19 degrees of freedom."""


def paired(
    name: str,
    ours: Sequence[float],
    theirs: Sequence[float],
    unit: str,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    target_on_mean: bool = False,
    details: Mapping[str, Any] | None = None,
) -> Measure:
    """Returns the mean of ours - theirs and its 95 % t-interval, where each pair has the same seed, data and rates.

    A target is asked of an end of the interval: `at_least` of the lower, `at_most` of the upper one; of the mean with
    `target_on_mean`. One pair (preset smoke) has no interval; more than twenty are refused. There is no interval either
    where a run has diverged (infinite or NaN): the mean is infinite then, or NaN, as it is without any pair. NaN misses
    every target.
    """
    gaps = [a - b for a, b in zip(ours, theirs, strict=True)]
    if len(gaps) > len(T_975) + 1:
        raise ValueError(f"{name} has {len(gaps)} pairs; there are quantiles for at most {len(T_975) + 1}")
    mean, interval = _mean(gaps), None
    if len(gaps) > 1 and math.isfinite(mean):
        half = T_975[len(gaps) - 2] * statistics.stdev(gaps) / math.sqrt(len(gaps))
        interval = (mean - half, mean + half)
    said = {"pairs": len(gaps), "ours": _mean(ours), "theirs": _mean(theirs), "per_seed": gaps}
    if target_on_mean and interval:
        said["mean_interval"] = interval
    return Measure(
        name, mean, unit, at_least, at_most, None, {**said, **(details or {})}, None if target_on_mean else interval
    )


def paired_ratio(
    name: str,
    ours: Sequence[float],
    theirs: Sequence[float],
    *,
    at_least: float | None = None,
    details: Mapping[str, Any] | None = None,
) -> Measure:
    """Returns the geometric mean of ours / theirs and its 95 % t-interval: as `paired`, of logarithms."""
    logs = paired(name, [math.log(a) for a in ours], [math.log(b) for b in theirs], "ratio")
    interval = None if logs.interval is None else (math.exp(logs.interval[0]), math.exp(logs.interval[1]))
    said = {"pairs": len(ours), "ours": _mean(ours), "theirs": _mean(theirs), **(details or {})}
    said["per_seed"] = [math.exp(gap) for gap in logs.details["per_seed"]]
    return Measure(name, math.exp(logs.value), "ratio", at_least, details=said, interval=interval)


def _mean(values: Sequence[float]) -> float:
    """Arithmetic mean; NaN of none, and of opposite infinities."""
    return sum(values) / len(values) if values else math.nan


def _spread(values: Sequence[float]) -> float | None:
    if len(values) == 1:
        return None
    low, middle, high = statistics.quantiles(values, n=4)
    return (high - low) / 2 / abs(middle) if middle else 0.0


def within(bound: float) -> dict[str, float]:
    """Both bounds of a signed difference."""
    return {"at_least": -bound, "at_most": bound}


def worst(name: str, measures: Sequence[Measure]) -> Measure:
    """Returns the one farthest beyond its target, or the lowest if there is none, under a name that stands for all."""
    least = min(measures, key=lambda each: each.value if each.holds is None else each._margin())
    return replace(
        least, name=name, details={"worst": least.name, "each": {each.name: each.value for each in measures}}
    )
