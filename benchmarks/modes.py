"""What the modes learn, in virtual time: switching without tuning, the price of asynchrony, the GBA paper's analysis.

    python benchmarks/modes.py [--only NAME] [--preset smoke|laptop|full] [--json FILE]

No figure here depends on the speed of the machine: what happens when is simulated (persia.modes.replay), gradients are
real (persia.virtual). Runs are spread over the cores. Hyper-parameters are the best of a small grid for Sync, found on
data of their own, and kept for every mode.

modes.bound          rate of each mode that the simulation allows, with stragglers.
modes.switch         Sync, then another mode from day 8 of 16; and from Gba to Sync. Drifting data, 2 of 8 slow.
modes.stationary     Hybrid and Async against Sync; time to a given AUC.
modes.globo          all modes on a stream in time order that punishes every delay; needs the data.
modes.gradients      distribution of gradient norms by aggregated batch (Figure 3 of the paper).
modes.occurrences    in how many batches an id occurs (Figure 4).
modes.scaling        AUC by number of NN workers at constant global batch (Figure 7).
modes.local_batch    AUC by local batch at a constant number of NN workers (Figure 8).
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from benchmarks import harness

from persia import Batch, Schema, data
from persia.metrics import Metrics
from persia.modes import AnyMode, Async, Bsp, Gba, HopBs, HopBw, Hybrid, Sync
from persia.modes.replay import Event, Setting, Summary, Trace, phases, simulate, steady
from persia.nn.models import FFNN, DeepFM
from persia.optim import Adagrad
from persia.virtual import VirtualTraining

SEEDS = {"smoke": (0,), "laptop": (0, 1, 2), "full": (0, 1, 2)}
DAYS = {"smoke": 4, "laptop": 16, "full": 16}
ROWS_PER_DAY = {"smoke": 2_048, "laptop": 40_960, "full": 163_840}
GLOBO_ROWS = {"smoke": 20_000, "laptop": 500_000, "full": 3_000_000}
WORKERS, LOCAL = 8, 128
GLOBAL = WORKERS * LOCAL
GRID = [(lr, rows_lr) for lr in (3e-3, 1e-2) for rows_lr in (0.15, 0.3, 0.6)]
TUNING_SEED = 99


class Plan(NamedTuple):
    """One run: a mode for each day, hyper-parameters, who trains."""

    modes: tuple[AnyMode, ...]
    rates: tuple[float, float]
    seed: int
    rows: int
    drift: float = 0.0
    factors: tuple[float, ...] = (1.0,) * 6 + (4.0,) * 2
    local: int = LOCAL
    moving: float | None = None  # Length of phases, instead of steady factors.

    def trace(self) -> Trace:
        if self.moving is not None:
            return phases(len(self.factors), length=self.moving, count=64, seed=self.seed)
        return steady(self.factors)


class Day(NamedTuple):
    """What a day of training came to; the AUC is that of the next day."""

    auc: float
    summary: Summary
    end: float


def area(batches: Sequence[Batch], logits: np.ndarray) -> float:
    metrics = Metrics(["click"])
    metrics.update(logits, np.concatenate([b.labels for b in batches]), None)
    return metrics.result().auc


def synthetic(plan: Plan, days: int) -> tuple[Schema, list[Batch]]:
    reader = data.synthetic(
        plan.rows * days,
        id_features=8, ids_per_feature=5000, pairs=8, latent_dim=2, dim=8,
        days=days, drift=plan.drift, seed=plan.seed, batch_size=plan.local,
    )  # fmt: skip
    return reader.schema, list(reader)


def training(plan: Plan, schema: Schema, batches: Sequence[Batch]) -> VirtualTraining:
    torch.manual_seed(plan.seed)
    return VirtualTraining(
        DeepFM(schema, hidden=(64, 32)),
        schema,
        batches.__getitem__,
        lambda parameters: torch.optim.Adam(parameters, plan.rates[0], fused=True),
        Adagrad(lr=plan.rates[1]),
        seed=plan.seed,
    )


def train(plan: Plan) -> list[Day]:
    """Trains a day, tests on the next, as the paper does; the day after the last is the test of the last."""
    torch.set_num_threads(1)
    schema, batches = synthetic(plan, len(plan.modes) + 1)
    run = training(plan, schema, batches)
    setting = Setting(plan.trace(), local_batch=plan.local)
    per_day = plan.rows // plan.local
    found, step, time = [], 0, 0.0
    for day, mode in enumerate(plan.modes):
        schedule = simulate(mode, setting, range(day * per_day, (day + 1) * per_day), step=step, start=time)
        run.run(schedule)
        step, time = schedule.end_step, schedule.end
        test = batches[(day + 1) * per_day : (day + 2) * per_day]
        found.append(Day(area(test, run.evaluate(test)), schedule.summary(), time))
        run.logits.clear()
    return found


def everywhere(function: Callable[[Any], Any], plans: Sequence[Any]) -> list[Any]:
    """Results in the order of the plans; a process for each core."""
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(function, plans))


@functools.cache
def tuned(preset: str, drift: float) -> tuple[float, float]:
    """The rates of the grid with which Sync has the best AUC, mean over days 4 to 7."""
    days, rows = min(DAYS[preset], 8), ROWS_PER_DAY[preset]
    grid = GRID[:1] if preset == "smoke" else GRID
    plans = [Plan((Sync(),) * days, rates, TUNING_SEED, rows, drift) for rates in grid]
    areas = [statistics.fmean(day.auc for day in found[days // 2 :]) for found in everywhere(train, plans)]
    return grid[areas.index(max(areas))]


def others() -> dict[str, AnyMode]:
    return {
        "gba": Gba(GLOBAL),
        "async": Async(),
        "bsp": Bsp(WORKERS),
        "hop_bs": HopBs(2),
        "hop_bw": HopBw(2),
        "hybrid": Hybrid(4),
    }


def switch(preset: str) -> Iterator[harness.Measure]:
    """AUC after the switch, minus Sync throughout, paired by seed: on the first day and on average."""
    days, rows, drift = DAYS[preset], ROWS_PER_DAY[preset], 0.1
    half = days // 2
    rates = tuned(preset, drift)
    kinds: dict[str, tuple[AnyMode, ...]] = {"sync": (Sync(),) * days}
    changed = {name: mode for name, mode in others().items() if name in ("gba", "async", "bsp", "hop_bw")}
    kinds |= {f"to_{name}": (Sync(),) * half + (mode,) * (days - half) for name, mode in changed.items()}
    kinds["from_gba"] = (Gba(GLOBAL),) * half + (Sync(),) * (days - half)
    plans = {
        (kind, seed): Plan(modes, rates, seed, rows, drift) for kind, modes in kinds.items() for seed in SEEDS[preset]
    }
    found: dict[Any, list[Day]] = dict(zip(plans, everywhere(train, list(plans.values())), strict=True))

    def gaps(kind: str, day: int) -> list[float]:
        return [found[kind, seed][day].auc - found["sync", seed][day].auc for seed in SEEDS[preset]]

    for kind in kinds:
        if kind == "sync":
            continue
        first = gaps(kind, half)
        mean = [statistics.fmean(column) for column in zip(*(gaps(kind, d) for d in range(half, days)), strict=True)]
        name, target, worst = f"modes.auc_switch_others.{kind}", None, statistics.fmean(mean)
        if kind in ("to_gba", "from_gba"):
            name = "modes.auc_sync_to_gba" if kind == "to_gba" else "modes.auc_gba_to_sync"
            target, worst = 0.001, max(abs(statistics.fmean(first)), abs(statistics.fmean(mean)))
        summaries = [day.summary for seed in SEEDS[preset] for day in found[kind, seed][half:]]
        yield harness.Measure(
            name,
            worst,
            "AUC apart from Sync" if target else "AUC - Sync",
            target,
            at_least=False,
            details={
                "first_day": statistics.fmean(first),
                "first_day_per_seed": [round(gap, 5) for gap in first],
                "mean": statistics.fmean(mean),
                "mean_per_seed": [round(gap, 5) for gap in mean],
                "per_day": [round(statistics.fmean(gaps(kind, d)), 5) for d in range(days)],
                "sync_per_day": [
                    round(statistics.fmean(found["sync", s][d].auc for s in SEEDS[preset]), 5) for d in range(days)
                ],
                "rates": list(rates),
                **mean_of(summaries),
            },
        )


def mean_of(summaries: Sequence[Summary]) -> dict[str, float]:
    batches = sum(s.batches for s in summaries)
    return {
        "dropped": sum(s.dropped for s in summaries) / batches,
        "decayed": sum(s.decayed for s in summaries) / batches,
        "staleness_mean": statistics.fmean(s.staleness_mean for s in summaries),
        "staleness_max": max(s.staleness_max for s in summaries),
        "row_staleness_mean": statistics.fmean(s.row_staleness_mean for s in summaries),
        "row_staleness_max": max(s.row_staleness_max for s in summaries),
        "rows_per_virtual_s": statistics.fmean(s.rate for s in summaries),
    }


def stationary(preset: str) -> Iterator[harness.Measure]:
    """AUC on unseen rows after the last day, minus Sync's; and virtual time to Sync's AUC at three quarters."""
    days, rows = DAYS[preset], ROWS_PER_DAY[preset]
    rates = tuned(preset, 0.0)
    kinds = {"sync": Sync(), **others()}
    plans = {(k, s): Plan((m,) * days, rates, s, rows) for k, m in kinds.items() for s in SEEDS[preset]}
    found: dict[Any, list[Day]] = dict(zip(plans, everywhere(train, list(plans.values())), strict=True))
    goal = statistics.fmean(found["sync", seed][days * 3 // 4 - 1].auc for seed in SEEDS[preset])
    for kind in kinds:
        gaps = [found[kind, seed][-1].auc - found["sync", seed][-1].auc for seed in SEEDS[preset]]
        curve = [statistics.fmean(found[kind, s][d].auc for s in SEEDS[preset]) for d in range(days)]
        ends = [statistics.fmean(found[kind, s][d].end for s in SEEDS[preset]) for d in range(days)]
        reached = next((end for end, auc in zip(ends, curve, strict=True) if auc >= goal), None)
        value = statistics.fmean(gaps)
        yield harness.Measure(
            f"modes.auc_{kind}",
            abs(value) if kind == "hybrid" else value,
            "AUC apart from Sync" if kind == "hybrid" else "AUC - Sync",
            0.001 if kind == "hybrid" else None,
            at_least=False,
            details={
                "per_seed": [round(gap, 5) for gap in gaps],
                "per_day": [round(auc, 5) for auc in curve],
                "virtual_s_per_day": [round(end, 1) for end in ends],
                "virtual_s_to_auc": [round(goal, 4), reached],
                "rates": list(rates),
                **mean_of([day.summary for seed in SEEDS[preset] for day in found[kind, seed]]),
            },
        )


class Stream(NamedTuple):
    mode: AnyMode
    seed: int
    rows: int


def globo_run(plan: Stream) -> tuple[float, Summary]:
    """Mean over days of the progressive AUC; 4 NN workers that are slow in turns, local batch 256."""
    torch.set_num_threads(1)
    reader = data.globo(batch_size=256)
    batches = [batch for batch, _ in zip(reader.batches(0), range(plan.rows // 256), strict=False)]
    torch.manual_seed(plan.seed)
    run = VirtualTraining(
        FFNN(reader.schema, hidden=(256, 128), products=[("article_id", "history")]),
        reader.schema,
        batches.__getitem__,
        lambda parameters: torch.optim.Adam(parameters, 1e-3, fused=True),
        Adagrad(lr=0.2, initial_accumulator=0.01),
        seed=plan.seed,
    )
    setting = Setting(phases(4, length=10.0, count=64, seed=plan.seed), local_batch=256)
    schedule = simulate(plan.mode, setting, len(batches))
    run.run(schedule)
    metrics = Metrics(["click"])
    for number, logits in sorted(run.logits.items()):
        metrics.update(logits, batches[number].labels, batches[number].day)
    return statistics.fmean(metrics.result().auc_per_day.values()), schedule.summary()


def globo(preset: str) -> Iterator[harness.Measure]:
    """All modes side by side. Batches whose gradient HopBw drops have no logits: they are not scored."""
    if data.find("globo_ctr") is None:
        print("globo_ctr is not here; set PERSIA_DATA to the directory that holds it.", file=sys.stderr)
        return
    kinds: dict[str, AnyMode] = {
        "sync": Sync(), "hybrid_1": Hybrid(1), "hybrid_4": Hybrid(4), "gba": Gba(4 * 256), "async": Async(),
        "bsp": Bsp(4), "hop_bs": HopBs(2), "hop_bw": HopBw(1),
    }  # fmt: skip
    plans = {(k, s): Stream(m, s, GLOBO_ROWS[preset]) for k, m in kinds.items() for s in SEEDS[preset]}
    found = dict(zip(plans, everywhere(globo_run, list(plans.values())), strict=True))
    for kind in kinds:
        areas = [found[kind, seed][0] for seed in SEEDS[preset]]
        details = {
            "per_seed": [round(a, 5) for a in areas],
            "rows": GLOBO_ROWS[preset],
            **mean_of([found[kind, s][1] for s in SEEDS[preset]]),
        }
        yield harness.Measure(f"modes.globo.{kind}", statistics.fmean(areas), "progressive AUC", details=details)


def bound(preset: str) -> Iterator[harness.Measure]:
    """Rows per virtual second over Sync's, when nothing but compute takes time."""
    count = 8 if preset == "smoke" else 64
    traces = {"static": steady([1.0] * 6 + [4.0] * 2)}
    traces |= {f"phases_{n}": phases(WORKERS, length=float(n), count=count) for n in (2, 10, 50)}
    for name, trace in traces.items():
        batches = 2000 if name == "static" else round(6.5 * trace.period)
        setting = Setting(trace, local_batch=LOCAL)
        sync = simulate(Sync(), setting, batches).summary().rate
        for kind, mode in others().items():
            found = simulate(mode, setting, batches).summary()
            yield harness.Measure(
                f"modes.bound.{name}.{kind}", found.rate / sync, "x rate of Sync", details=mean_of([found])
            )


def norms(plan: Plan) -> list[float]:
    """L2 norms of what is applied to the dense parameters, in the second half of a day."""
    torch.set_num_threads(1)
    schema, batches = synthetic(plan, len(plan.modes))
    run = training(plan, schema, batches)
    found: list[float] = []
    held: list[np.ndarray] = []

    def watch(event: Event, gradient: Any) -> None:
        if event.server == "dense-0" and event.kind == "push":
            held.append(gradient)
        elif event.server == "dense-0" and event.kind == "apply":
            found.append(float(np.linalg.norm(np.mean(held, axis=0))))
            held.clear()

    run.run(simulate(plan.modes[0], Setting(plan.trace(), local_batch=plan.local), len(batches)), watch)
    return found[len(found) // 2 :]


def gradients(preset: str) -> Iterator[harness.Measure]:
    """Figure 3: the norm follows the aggregated batch, whoever aggregates."""
    rows = 4 * ROWS_PER_DAY[preset]
    kinds: dict[str, AnyMode] = {f"bsp_{n}": Bsp(n) for n in (1, 2, 4, 8, 16, 32)} | {"sync": Sync()}
    kinds["gba"] = Gba(GLOBAL)
    plans = [Plan((mode,), (1e-3, 0.05), 0, rows, 0.0, (1.0,) * WORKERS) for mode in kinds.values()]
    for kind, found in zip(kinds, everywhere(norms, plans), strict=True):
        low, median, high = np.quantile(found, (0.1, 0.5, 0.9))
        yield harness.Measure(
            f"modes.gradients.{kind}",
            float(median),
            "L2 norm, median",
            details={
                "p10": float(low), "p90": float(high), "mean": statistics.fmean(found), "std": statistics.pstdev(found),
            },
        )  # fmt: skip


def occurrences(preset: str) -> Iterator[harness.Measure]:
    """Figure 4: ids by the share of batches that they occur in."""
    sources: dict[str, Sequence[Batch]] = {"synthetic": synthetic(Plan((), (0, 0), 0, ROWS_PER_DAY[preset]), 1)[1]}
    if data.find("globo_ctr") is not None:
        reader = data.globo(batch_size=LOCAL).batches(0)
        sources["globo"] = [b for b, _ in zip(reader, range(ROWS_PER_DAY[preset] // LOCAL), strict=False)]
    for name, batches in sources.items():
        count: dict[tuple[str, int], int] = {}
        for batch in batches:
            for feature, column in batch.id_features.items():
                for id_ in np.unique(column.values).tolist():
                    count[feature, id_] = count.get((feature, id_), 0) + 1
        shares = np.array(list(count.values())) / len(batches)
        details = {f"below_{limit:g}": float((shares < limit).mean()) for limit in (0.005, 0.01, 0.05, 0.1, 0.5)}
        yield harness.Measure(
            f"modes.occurrences.{name}",
            float(np.median(shares)),
            "of the batches, median id",
            details={"ids": len(shares), "batches": len(batches), **details},
        )


def scaling(preset: str) -> Iterator[harness.Measure]:
    """Figure 7: NN workers at a constant global batch of 3,200 rows, each slow a quarter of the time."""
    counts = (8, 40) if preset == "smoke" else (8, 40, 200, 800)
    plans = [
        Plan(
            (Gba(3200),) * 4, (3e-3, 0.15), 0, 2 * ROWS_PER_DAY[preset] // 3200 * 3200, 0.0, (1.0,) * n, 3200 // n, 10.0
        )
        for n in counts
    ]
    for count, plan, days in zip(counts, plans, everywhere(train, plans), strict=True):
        yield harness.Measure(
            f"modes.scaling.{count}",
            days[-1].auc,
            "AUC",
            details={"local_batch": plan.local, **mean_of([day.summary for day in days])},
        )


def local_batch(preset: str) -> Iterator[harness.Measure]:
    """Figure 8: what happens when the global batch is not kept: M = 8, hyper-parameters as for a local batch of 128."""
    rates = tuned(preset, 0.0)
    sizes = (64, 128) if preset == "smoke" else (32, 64, 128, 256, 512)
    plans = {
        (size, seed): Plan((Gba(size * WORKERS),) * 4, rates, seed, 2 * ROWS_PER_DAY[preset], local=size)
        for size in sizes
        for seed in SEEDS[preset]
    }
    found = dict(zip(plans, everywhere(train, list(plans.values())), strict=True))
    for size in sizes:
        areas = [found[size, seed][-1].auc for seed in SEEDS[preset]]
        yield harness.Measure(
            f"modes.local_batch.{size}", statistics.fmean(areas), "AUC", details={"per_seed": areas, "rates": rates}
        )


MEASURES = {
    "modes.bound": bound,
    "modes.switch": switch,
    "modes.stationary": stationary,
    "modes.globo": globo,
    "modes.gradients": gradients,
    "modes.occurrences": occurrences,
    "modes.scaling": scaling,
    "modes.local_batch": local_batch,
}

if __name__ == "__main__":
    harness.main(MEASURES)
