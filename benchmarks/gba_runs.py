"""Runs in virtual time for benchmarks/modes_figures.py: clicks in time order, stalls, and a base that is inherited."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from msgspec import structs

from benchmarks.modes_runs import MAX_ROUNDS, Day, Rates, area, joined
from persia import Batch, Schema, data
from persia.metrics import Metrics
from persia.modes import Gba, Mode, RowLimit, Sync
from persia.modes.base import Reduction
from persia.nn.models import FFNN, DeepFM
from persia.optim import Adagrad, Adam
from persia.replay import ScheduleEvent, Setting, Summary, Timeline, phases, simulate, stalls, steady
from persia.replay.virtual import VirtualTraining

__all__ = [
    "SCALED_GLOBAL", "STREAM_LOCAL", "STREAM_WORKERS", "GlobalTags", "Inherited", "Scored", "Stalled", "StalledDay",
    "Stream", "best_rate", "inherited", "scaled", "scored", "scored_after", "scored_along", "stalled", "stream_setting",
]  # fmt: skip

DENSE_RATE = 3e-3
"""Of Adam, on dense parameters of synthetic data."""
STREAM_WORKERS, STREAM_LOCAL = 4, 256
PHASE = 10.0
"""Batches for which an NN worker stays slow or fast."""
SCALED_GLOBAL = 3_200
"""Rows of a global batch that 8, 20, 100 and 200 NN workers can share."""
BASE_WORKERS = 8


def best_rate(score: Callable[[list[float]], Sequence[float]], start: float) -> float:
    """Returns the best learning rate of start * 2**n, of which both neighbours have been tried.

    Args:
        score: returns the score of each rate; more is better.
        start: the first rate.

    Raises:
        RuntimeError: after `MAX_ROUNDS` calls the best is still the first or the last rate.
    """
    scores: dict[int, float] = {}
    best = 0
    for _ in range(MAX_ROUNDS):
        new = sorted({best - 1, best, best + 1} - scores.keys())
        if not new:
            return start * 2.0**best
        scores |= zip(new, score([start * 2.0**n for n in new]), strict=True)
        best = max(scores, key=scores.__getitem__)
    raise RuntimeError(f"The best of {len(scores)} rates, {start * 2.0**best:g}, is the first or the last one.")


# --- clicks in time order ---------------------------------------------------------------------------------------------


class Stream(NamedTuple):
    """One run on globo_ctr.

    Args:
        mode: any mode.
        rates: learning rates.
        seed: seed of the model, the rows and the stragglers.
        first: number of rows before the first that is scored.
        rows: number of rows.
        stragglers: NN workers are slow in turns; else all are equally fast.
        fresh: "lookup" for gradients by the rows of the moment at which they arrive, "pull" for such dense parameters:
            what is fresh is never stale.
        at_step: scores rows by step as well.
    """

    mode: Mode
    rates: Rates
    seed: int
    first: int
    rows: int
    stragglers: bool = True
    fresh: tuple[str, ...] = ()
    at_step: bool = False


class Scored(NamedTuple):
    """Mean over days of the progressive AUC.

    Attributes:
        auc: of the training forward pass, by the parameters that an NN worker has read for its batch.
        summary: of the timeline.
        at_step: the AUC if the global batch s + 1, in the order of the data, is scored by the parameters after s steps:
            the same rows after the same number of updates in every mode. No mode has trained them. None if not asked.
    """

    auc: float
    summary: Summary
    at_step: float | None = None


def scored(plan: Stream) -> Scored:
    """Trains with 4 NN workers that are slow in turns, local batch 256, and scores the rows after `first`."""
    return scored_along(plan, _timeline(plan))


def scored_after(plan: Stream) -> Scored:
    """Trains and scores on the same number of rows, which follow `scored`'s: to tune rates in a run of equal length."""
    return scored_along(plan, _timeline(plan), plan.rows // STREAM_LOCAL)


def stream_setting(seed: int, stragglers: bool = True, latency: float = 0.0) -> Setting:
    """Returns the cluster of a run on globo_ctr."""
    trace = steady([1.0] * STREAM_WORKERS)
    if stragglers:
        trace = phases(STREAM_WORKERS, length=PHASE, count=64, seed=seed)
    return Setting(trace, local_batch=STREAM_LOCAL, lookup=latency, push=latency)


def _timeline(plan: Stream) -> Timeline:
    schedule = simulate(plan.mode, stream_setting(plan.seed, plan.stragglers), plan.rows // STREAM_LOCAL)
    return without_delay(schedule, plan.fresh) if plan.fresh else schedule


def scored_along(plan: Stream, schedule: Timeline, skipped: int = 0) -> Scored:
    """Trains and scores along a timeline, which begins at batch `skipped` of the data."""
    torch.set_num_threads(1)
    reader = data.globo(batch_size=STREAM_LOCAL)
    batches = list(itertools.islice(reader.batches(0), skipped, skipped + plan.rows // STREAM_LOCAL))
    torch.manual_seed(plan.seed)
    run = VirtualTraining(
        FFNN(reader.schema, hidden=(256, 128), products=[("article_id", "history")]),
        reader.schema,
        batches.__getitem__,
        lambda parameters: torch.optim.Adam(parameters, plan.rates.dense, fused=True),
        Adagrad(lr=plan.rates.rows),
        seed=plan.seed,
    )
    by_step: dict[int, np.ndarray] = {}

    def score(step: int) -> None:
        first = step * STREAM_WORKERS
        rows = batches[first : first + STREAM_WORKERS]
        if rows:
            logits = np.split(run.evaluate([Batch.concat(rows)]), len(rows))
            by_step.update(enumerate(logits, first))
            run.model.train()

    def watch(event: ScheduleEvent, _: Any) -> None:
        if event.kind == "apply" and event.server == "dense-0":
            score(event.version + 2)

    if plan.at_step:
        score(0)
        score(1)
    run.run(schedule, watch if plan.at_step else None)

    def progressive(logits: dict[int, np.ndarray]) -> float:
        metrics = Metrics(["click"])
        for number, outputs in sorted(logits.items()):
            if number >= plan.first // STREAM_LOCAL:
                metrics.update(outputs, batches[number].labels, batches[number].day)
        return statistics.fmean(metrics.result().auc_per_day.values())

    return Scored(progressive(run.logits), schedule.summary(), progressive(by_step) if plan.at_step else None)


def without_delay(schedule: Timeline, kinds: Sequence[str]) -> Timeline:
    """Returns the timeline with these reads of a batch right before its first push: steps stay the same batches."""
    reads: dict[int, list[ScheduleEvent]] = {}
    events: list[ScheduleEvent] = []
    for event in schedule.events:
        if event.kind in kinds:
            reads.setdefault(event.batch, []).append(event)
            continue
        if event.kind == "push":
            pending = reads.pop(event.batch, ())
            events += [structs.replace(read, time=event.time, version=event.version) for read in pending]
        events.append(event)
    return structs.replace(schedule, events=events)


# --- stalls -----------------------------------------------------------------------------------------------------------


class GlobalTags(Gba, frozen=True, tag="gba_global_tags"):
    """Gba whose rows decay by the global step, as dense parameters do, and not by their own last change."""

    def row_limit(self, step: int, token: int) -> RowLimit:
        """Admits all rows or none."""
        return RowLimit(None if self.decay(step, token) else -2, step)


class Stalled(NamedTuple):
    """One run on synthetic data that drift, by NN workers of which one stalls now and then."""

    mode: Mode
    optimizer: Adagrad | Adam
    seed: int
    rows: int
    days: int
    workers: int
    local: int
    chance: float
    """Of a stall, for each batch; 0 for none."""


class StalledDay(NamedTuple):
    """AUC of the day after, totals of the timeline, and the share of gradients of ids that were refused."""

    auc: float
    summary: Summary
    refused: float


def stalled(plan: Stalled) -> list[StalledDay]:
    """Trains a day, tests on the next."""
    torch.set_num_threads(1)
    reader = _synthetic(plan.rows, plan.days + 1, plan.local, plan.seed, ids=500, drift=0.1)
    batches = list(reader)
    run = _training(reader.schema, batches.__getitem__, plan.optimizer, plan.seed)
    trace = steady([1.0] * plan.workers)
    if plan.chance:
        trace = stalls(plan.workers, length=1.0, chance=plan.chance, seed=plan.seed)
    setting, per_day = Setting(trace, local_batch=plan.local), plan.rows // plan.local
    rows = _Refused(plan.mode, batches)
    days, step, time = [], 0, 0.0
    for day in range(plan.days):
        schedule = simulate(plan.mode, setting, range(day * per_day, (day + 1) * per_day), step=step, start=time)
        run.run(schedule, rows.watch)
        step, time = schedule.end_step, schedule.end
        test = joined(batches[(day + 1) * per_day : (day + 2) * per_day])
        days.append(StalledDay(area(test, run.evaluate(test)), schedule.summary(), rows.share()))
        run.logits.clear()
    return days


class _Refused:
    """Counts the gradients of ids that `Mode.row_limit` refuses."""

    def __init__(self, mode: Mode, batches: Sequence[Batch]) -> None:
        self._mode, self._batches = mode, batches
        self._last = [np.zeros(500, np.int64) for _ in batches[0].id_features]
        self._changed: list[list[np.ndarray]] = [[] for _ in self._last]
        self._all = self._refused = 0

    def watch(self, event: ScheduleEvent, _: Any) -> None:
        if event.server != "ps-0" or event.kind not in ("push", "apply"):
            return
        if event.kind == "push":
            limit = self._mode.row_limit(event.version, event.token)
            columns = self._batches[event.batch].id_features.values()
            for last, changed, column in zip(self._last, self._changed, columns, strict=True):
                ids = np.unique(column.values).astype(np.int64)
                admitted = ids[limit.admits(last[ids])]
                changed.append(admitted)
                self._all, self._refused = self._all + len(ids), self._refused + len(ids) - len(admitted)
            return
        for last, changed in zip(self._last, self._changed, strict=True):
            last[np.concatenate(changed)] = event.version
            changed.clear()

    def share(self) -> float:
        """Returns the share since the last call."""
        share = self._refused / max(1, self._all)
        self._all = self._refused = 0
        return share


# --- a base that is inherited -----------------------------------------------------------------------------------------


class Inherited(NamedTuple):
    """Days of Sync with 8 NN workers, and then days of Gba with each number of them, from a copy of that base."""

    optimizer: Adagrad | Adam
    reduction: Reduction
    seed: int
    rows: int
    base_days: int
    days: int
    workers: tuple[int, ...]


def inherited(plan: Inherited) -> dict[str, list[Day]]:
    """Returns the days of the base ("base"), and the days of Gba by number of NN workers.

    Each NN worker is slow a quarter of the time, in phases of 10 batches. A batch takes as long as it has rows. Each
    global batch has the same rows with any number of NN workers.
    """
    torch.set_num_threads(1)
    reader = _synthetic(plan.rows, plan.base_days + plan.days + 1, SCALED_GLOBAL, plan.seed, ids=100_000)
    blocks = list(reader)
    per_day = plan.rows // SCALED_GLOBAL

    def train(run: VirtualTraining, mode: Mode, count: int, days: range) -> list[Day]:
        trained = []
        step, time = days.start * per_day, 0.0
        setting = scaled(count, plan.seed)
        for day in days:
            numbers = range(day * per_day * count, (day + 1) * per_day * count)
            schedule = simulate(mode, setting, numbers, step=step, start=time)
            run.run(schedule)
            step, time = schedule.end_step, schedule.end
            test = blocks[(day + 1) * per_day : (day + 2) * per_day]
            trained.append(Day(area(test, run.evaluate(test)), schedule.summary(), time))
            run.logits.clear()
        return trained

    def training(count: int) -> VirtualTraining:
        local = SCALED_GLOBAL // count

        def batch(number: int) -> Batch:
            at = number % count * local
            return blocks[number // count].slice(at, at + local)

        return _training(reader.schema, batch, plan.optimizer, plan.seed)

    run = training(BASE_WORKERS)
    days = {"base": train(run, Sync(plan.reduction), BASE_WORKERS, range(plan.base_days))}
    base = run.state_dict()
    for count in plan.workers:
        run = training(count)
        run.load_state_dict(base)
        mode = Gba(SCALED_GLOBAL, reduction=plan.reduction)
        days[str(count)] = train(run, mode, count, range(plan.base_days, plan.base_days + plan.days))
    return days


def scaled(count: int, seed: int) -> Setting:
    """Returns the speeds of `count` NN workers at a constant global batch."""
    local = SCALED_GLOBAL // count
    compute = local * BASE_WORKERS / SCALED_GLOBAL
    return Setting(phases(count, length=PHASE * compute, count=64, seed=seed), compute=compute, local_batch=local)


def _synthetic(rows: int, days: int, batch_size: int, seed: int, *, ids: int, drift: float = 0.0) -> data.Synthetic:
    return data.synthetic(
        rows * days,
        id_features=8, ids_per_feature=ids, zipf=1.05, pairs=8, latent_dim=2, dim=8,
        days=days, drift=drift, seed=seed, batch_size=batch_size,
    )  # fmt: skip


def _training(schema: Schema, batches: Callable[[int], Batch], optimizer: Adagrad | Adam, seed: int) -> VirtualTraining:
    torch.manual_seed(seed)
    return VirtualTraining(
        DeepFM(schema, hidden=(64, 32)),
        schema,
        batches,
        lambda parameters: torch.optim.Adam(parameters, DENSE_RATE, fused=True),
        optimizer,
        seed=seed,
    )
