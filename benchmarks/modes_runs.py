"""Runs in virtual time for benchmarks/modes.py and modes_figures.py: training, spread over processes, kept in a file.

Environment:

PERSIA_PROCESSES  how many processes run at once; as many as there are cores by default.
PERSIA_RUNS       a file to which each run is appended as a line of JSON once it is done. A run that the file has is not
                  repeated, so a benchmark that was cut goes on where it was. Remove it when code that matters changes.
"""

from __future__ import annotations

import functools
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import torch

from benchmarks.elsewhere import methods
from persia import Batch, Schema, data
from persia.metrics import Metrics
from persia.modes import Mode
from persia.nn.models import DeepFM
from persia.optim import Adagrad
from persia.replay import ScheduleEvent, Setting, Summary, Timeline, phases, simulate, steady
from persia.replay.virtual import VirtualTraining

__all__ = [
    "FIRST",
    "GLOBAL",
    "LOCAL",
    "TUNING_SEED",
    "TWO_SLOW",
    "WORKERS",
    "Curve",
    "Day",
    "NNWorkers",
    "Plan",
    "Rates",
    "area",
    "auc_beside",
    "best_rates",
    "everywhere",
    "joined",
    "norms",
    "seconds_to",
    "synthetic",
    "train",
    "train_through",
    "train_through_along",
    "training",
    "tuned_for",
]

WORKERS, LOCAL = 8, 128
GLOBAL = WORKERS * LOCAL
TWO_SLOW = (1.0,) * 6 + (4.0,) * 2
"""Factors on the compute time of NN workers, two of which are slow."""
TUNING_SEED = 99
DENSE_FACTOR, ROWS_FACTOR = 3.0, 2.0
MAX_ROUNDS = 20
"""Of a search for rates. The best rate is inside long before: at one 2**20 times too large or small nothing learns."""
TEST_BATCHES = 16
"""Batches that are evaluated together."""

Result = TypeVar("Result")


class Rates(NamedTuple):
    """Learning rates of Adam for dense parameters, and of Adagrad for rows, which begins with its default sums."""

    dense: float
    rows: float


FIRST = Rates(3e-3, 0.1)
"""Start of a search for rates."""


class NNWorkers(NamedTuple):
    """NN workers with constant factors on their compute time."""

    factors: tuple[float, ...]
    local: int
    compute: float


class Plan(NamedTuple):
    """One run on synthetic data: a mode for each day, hyper-parameters, NN workers."""

    modes: tuple[Mode, ...]
    rates: Rates
    seed: int
    rows: int
    drift: float = 0.0
    factors: tuple[float, ...] = TWO_SLOW
    local: int = LOCAL
    compute: float = 1.0
    moving: float | None = None  # Batches in a phase, instead of steady factors.
    ids: int = 500  # Of each feature,
    zipf: float = 1.05  # and how unevenly they occur.
    latency: float = 0.0  # Seconds of a lookup, and of a push.
    by_day: tuple[NNWorkers, ...] = ()  # Instead of the same ones on all days; local batches are multiples of `local`.

    def setting(self, day: int = 0) -> Setting:
        """Returns the NN workers of a day and their speeds."""
        workers = self.by_day[day] if self.by_day else NNWorkers(self.factors, self.local, self.compute)
        trace = steady(workers.factors)
        if self.moving is not None:
            trace = phases(len(workers.factors), length=self.moving * workers.compute, count=64, seed=self.seed)
        return Setting(trace, workers.compute, workers.local, lookup=self.latency, push=self.latency)


class Day(NamedTuple):
    """Result of a day of training, with the AUC on the next day."""

    auc: float
    summary: Summary
    end: float


class Curve(NamedTuple):
    """AUC on unseen rows after each day's rows, the time of each, and totals of the run."""

    areas: tuple[float, ...]
    ends: tuple[float, ...]
    summary: Summary


# --- runs, each in a process of its own -------------------------------------------------------------------------------


def synthetic(plan: Plan, days: int) -> tuple[Schema, list[Batch]]:
    """All batches of `days` days."""
    reader = data.synthetic(
        plan.rows * days,
        id_features=8, ids_per_feature=plan.ids, zipf=plan.zipf, pairs=8, latent_dim=2, dim=8,
        days=days, drift=plan.drift, seed=plan.seed, batch_size=plan.local,
    )  # fmt: skip
    return reader.schema, list(reader)


def train(plan: Plan) -> list[Day]:
    """Trains a day, tests on the next, as the paper does; the day after the last is the test of the last.

    Training drains at the end of each day. NN workers of `by_day` train the same rows in the same global batches.
    """
    torch.set_num_threads(1)
    schema, batches = synthetic(plan, len(plan.modes) + 1)
    per_day = plan.rows // plan.local
    today: dict[int, Batch] = {}
    run = training(plan, schema, today.__getitem__)
    days, step, time = [], 0, 0.0
    for day, mode in enumerate(plan.modes):
        setting, first = plan.setting(day), day * per_day
        parts = joined(batches[first : first + per_day], setting.local_batch // plan.local)
        numbers = range(first, first + len(parts))  # No number comes twice.
        today.clear()
        today.update(zip(numbers, parts, strict=True))
        schedule = simulate(mode, setting, numbers, step=step, start=time)
        run.run(schedule)
        step, time = schedule.end_step, schedule.end
        test = joined(batches[first + per_day : first + 2 * per_day])
        days.append(Day(area(test, run.evaluate(test)), schedule.summary(), time))
        run.logits.clear()
    return days


def train_through(plan: Plan) -> Curve:
    """Trains all days in one mode without draining in between, so that a depth which adapts is kept.

    It is tested on the day after the last: in passing, once the gradients of a day have arrived, and at the end.
    """
    return train_through_along(
        plan, simulate(plan.modes[0], plan.setting(), len(plan.modes) * (plan.rows // plan.local))
    )


def train_through_along(plan: Plan, schedule: Timeline) -> Curve:
    """Trains and tests as `train_through`, along a timeline."""
    torch.set_num_threads(1)
    days, per_day = len(plan.modes), plan.rows // plan.local
    schema, batches = synthetic(plan, days + 1)
    run = training(plan, schema, batches.__getitem__)
    test = joined(batches[days * per_day :])
    areas, ends = [], []
    arrived = dict.fromkeys(schedule.servers, 0)

    def watch(event: ScheduleEvent, _gradient: Any) -> None:
        arrived[event.server] += event.kind in ("push", "drop")
        trained = min(arrived.values()) >= (len(areas) + 1) * per_day
        if event.kind in ("apply", "drop") and trained and len(areas) < days - 1:
            areas.append(area(test, run.evaluate(test)))
            ends.append(event.time)
            run.model.train()

    run.run(schedule, watch)
    return Curve((*areas, area(test, run.evaluate(test))), (*ends, schedule.end), schedule.summary())


def norms(plan: Plan) -> list[float]:
    """L2 norms of the gradients that are applied to the dense parameters, in the second half of the days."""
    torch.set_num_threads(1)
    schema, batches = synthetic(plan, len(plan.modes))
    run = training(plan, schema, batches.__getitem__)
    lengths: list[float] = []
    held: list[np.ndarray] = []

    def watch(event: ScheduleEvent, gradient: Any) -> None:
        if event.server == "dense-0" and event.kind == "push":
            held.append(gradient)
        elif event.server == "dense-0" and event.kind == "apply":
            lengths.append(float(np.linalg.norm(np.mean(held, axis=0))))
            held.clear()

    run.run(simulate(plan.modes[0], plan.setting(), len(batches)), watch)
    return lengths[len(lengths) // 2 :]


def training(plan: Plan, schema: Schema, batches: Callable[[int], Batch]) -> VirtualTraining:
    """Returns a DeepFM with the rates of a plan, before its first step."""
    torch.manual_seed(plan.seed)
    return VirtualTraining(
        DeepFM(schema, hidden=(64, 32)),
        schema,
        batches,
        lambda parameters: torch.optim.Adam(parameters, plan.rates.dense, fused=True),
        Adagrad(lr=plan.rates.rows),
        seed=plan.seed,
    )


def joined(batches: Sequence[Batch], count: int = TEST_BATCHES) -> list[Batch]:
    """Joins batches, `count` at a time."""
    return [Batch.concat(batches[at : at + count]) for at in range(0, len(batches), count)]


def area(batches: Sequence[Batch], logits: np.ndarray) -> float:
    """Returns the AUC of logits."""
    metrics = Metrics(["click"])
    metrics.update(logits, np.concatenate([b.labels for b in batches]), None)
    return metrics.result().auc


def seconds_to(curve: Iterable[tuple[float, float]], goal: float) -> float | None:
    """Returns the seconds after which a curve reaches an AUC, between points on a straight line; None if never.

    Args:
        curve: seconds and AUC of each point.
        goal: the AUC.
    """
    before = (0.0, 0.5)
    for seconds, reached in curve:
        if reached >= goal:
            return before[0] + (seconds - before[0]) * (goal - before[1]) / (reached - before[1])
        before = (seconds, reached)
    return None


# --- many runs --------------------------------------------------------------------------------------------------------


def everywhere(
    function: Callable[[Any], Result], plans: Sequence[Any], result: type[Result], processes: int | None = None
) -> list[Result]:
    """Results in the order of the plans: from the file, or else from as many processes as there may be.

    `processes=1` runs them here, one by one: for runs that start processes of their own, or are timed.
    """
    kept = os.environ.get("PERSIA_RUNS")
    keys = [msgspec.json.encode([function.__name__, plan]) for plan in plans]
    results = _kept(Path(kept), result, set(keys)) if kept else {}
    for plan, done in _runs(function, [p for key, p in zip(keys, plans, strict=True) if key not in results], processes):
        key = msgspec.json.encode([function.__name__, plan])
        results[key] = done
        if kept:
            with Path(kept).open("ab") as file:
                file.write(msgspec.json.encode({"run": msgspec.Raw(key), "result": done}) + b"\n")
    return [results[key] for key in keys]


def _runs(
    function: Callable[[Any], Result], plans: Sequence[Any], processes: int | None
) -> Iterator[tuple[Any, Result]]:
    """Each plan and its result, as they are done."""
    processes = processes or int(os.environ.get("PERSIA_PROCESSES", os.cpu_count() or 1))
    if processes == 1:
        yield from ((plan, function(plan)) for plan in plans)
        return
    running = {_pool(processes).submit(function, plan): plan for plan in plans}
    yield from ((running[future], future.result()) for future in as_completed(running))


@functools.cache
def _pool(processes: int) -> ProcessPoolExecutor:
    """One for all measures: a process takes seconds to start."""
    return ProcessPoolExecutor(processes, methods())


def _kept(file: Path, result: type[Result], keys: set[bytes]) -> dict[bytes, Result]:
    class Line(msgspec.Struct):
        run: msgspec.Raw
        result: msgspec.Raw

    lines: Iterable[bytes] = file.read_bytes().splitlines() if file.exists() else []
    decoded = (msgspec.json.decode(line, type=Line) for line in lines)
    return {bytes(d.run): msgspec.json.decode(d.result, type=result) for d in decoded if bytes(d.run) in keys}


def best_rates(
    score: Callable[[list[Rates]], Sequence[float]], rounds: int = MAX_ROUNDS, start: Rates = FIRST
) -> Rates:
    """The best of a grid, which grows until its best lies inside and not at its edge.

    Args:
        score: returns the score of each point of the grid; more is better.
        rounds: maximum number of calls.
        start: the middle of the first grid.

    Raises:
        RuntimeError: after the last call the best still lies at the edge.
    """

    def at(point: tuple[int, int]) -> Rates:
        return Rates(start.dense * DENSE_FACTOR ** point[0], start.rows * ROWS_FACTOR ** point[1])

    scores: dict[tuple[int, int], float] = {}
    best = (0, 0)
    for _ in range(rounds):
        around = {(best[0] + i, best[1] + j) for i in (-1, 0, 1) for j in (-1, 0, 1)} | {(0, 0)}
        new = sorted(around - scores.keys())
        if not new:
            return at(best)
        scores |= zip(new, score([at(point) for point in new]), strict=True)
        best = max(scores, key=scores.__getitem__)
    raise RuntimeError(f"The best of {len(scores)} pairs of rates, {at(best)}, lies at the edge of the grid.")


def tuned_for(plan: Plan) -> Rates:
    """Those with which a plan has the best AUC, mean over the second half of its days; all NN workers equally fast."""
    return best_rates(lambda grid: _scores(plan, grid))


def auc_beside(plan: Plan) -> dict[str, float]:
    """AUC at the rates of a plan, and with half and twice the rate of rows: how narrow the optimum is. As tuned."""
    dense, rows = plan.rates
    names = ("half_rate", "rate", "double_rate")
    scores = _scores(plan, [Rates(dense, rows / ROWS_FACTOR), plan.rates, Rates(dense, rows * ROWS_FACTOR)])
    return {f"tuning_auc_at_{name}": round(score, 5) for name, score in zip(names, scores, strict=True)}


def _scores(plan: Plan, grid: Sequence[Rates]) -> list[float]:
    plan = plan._replace(seed=TUNING_SEED, factors=(1.0,) * len(plan.factors), latency=0.0)
    runs = everywhere(train, [plan._replace(rates=rates) for rates in grid], list[Day])
    return [statistics.fmean(day.auc for day in run[len(run) // 2 :]) for run in runs]
