"""What the modes learn, in virtual time: delays, asynchrony, switching without tuning.

    python -m benchmarks 'modes.*' [--preset smoke|laptop|full] [--json FILE]

No figure here depends on the speed of the machine: what happens when is simulated (persia.replay), gradients are
real (persia.replay.virtual). Runs are spread over the cores. Hyper-parameters are the best of a grid for Sync, found on
data of their own, and kept for every mode. AUCs are compared in pairs that have the seed in common.

modes.split.*        a step does not depend on how many NN workers share it, in float64.
modes.bound.*        rate of each mode that the simulation allows, with stragglers or with latency.
modes.auc_hybrid.*   Hybrid and Async against Sync, with latency, on four sets of ids.
modes.auc_others.*   asynchronous modes against Sync, 2 of 8 NN workers slow; time to a given AUC.
modes.auc_sync_to_gba.*, modes.auc_gba_to_sync.*, modes.auc_switch_others.*
                     Sync, then another mode from day 8 of 16, and back. Drifting data, 2 of 8 NN workers slow.
modes.auc_switch_8x400_32x100.*
                     the paper's switch: 8 NN workers with an all-reduce, then 32 with dense PSs, and back.

benchmarks/modes_figures.py has the GBA paper's figures.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import get_args

import numpy as np

from benchmarks import runner
from benchmarks.modes_runs import (
    GLOBAL,
    LOCAL,
    TUNING_SEED,
    TWO_SLOW,
    WORKERS,
    Curve,
    Day,
    NNWorkers,
    Plan,
    Rates,
    auc_beside,
    everywhere,
    train,
    train_through,
    tuned_for,
)
from persia.modes import Async, Bsp, Gba, HopBs, HopBw, Hybrid, Mode, Sync
from persia.replay import Setting, Summary, phases, simulate, steady
from persia.replay.plain import PlainOptimizer
from persia.testing.logistic import Problem, delayed_sync, lock_step

SEEDS = {"smoke": (0,), "laptop": (0, 1, 2, 3, 4), "full": (0, 1, 2, 3, 4)}
DAYS = {"smoke": 4, "laptop": 16, "full": 16}
ROWS_PER_DAY = {"smoke": 1_024, "laptop": 32_768, "full": 262_144}
UNTUNED = Rates(3e-3, 0.1)
DRIFT = 0.1
SYNC = Sync()
DATA = {"100000_1.05": (100_000, 1.05), "100000_0.7": (100_000, 0.7), "10000_0": (10_000, 0.0), "500_1.05": (500, 1.05)}
"""Ids of each feature, and the exponent of how often they occur. The last one is not sparse: its ids are in nearly
every step."""
SPARSE = tuple(DATA)[:3]
EQUAL = (1.0,) * WORKERS
LATENCY = 0.25
"""Seconds of a lookup, and of a push; a batch takes a second to compute."""
DELAYED = ("hybrid_4", "hybrid_4_warm", "auto", "async")
ASYNCHRONOUS: dict[str, Mode] = {
    "gba": Gba(GLOBAL), "bsp": Bsp(WORKERS), "hop_bw": HopBw(2), "hop_bs": HopBs(2), "async": Async()
}  # fmt: skip
OTHERS: dict[str, Mode] = {"hybrid": Hybrid(4, warmup=0), **ASYNCHRONOUS}
STRAGGLING = ("100000_1.05", "500_1.05")
DRIFTING = {"": 500, ".sparse": 100_000}
"""Ids of each feature, by the suffix of a name. Of 500 nearly all are in every step, so a delay costs most."""
GBA = {"sync_to_gba": False, "gba_to_sync": True}
"""Whether Gba is the first of the two modes."""
AFTER = ("first_day", "mean")
"""Days after a switch that are compared: the first one, and the mean of all."""
PAPER_GLOBAL = 3_200
PAPER_ROWS = {"smoke": 2 * PAPER_GLOBAL, "laptop": 20 * PAPER_GLOBAL, "full": 80 * PAPER_GLOBAL}
ALL_REDUCE = NNWorkers(TWO_SLOW, 400, 1.0)
DENSE_PS = NNWorkers((1.0,) * 24 + (4.0,) * 8, 100, 0.25)
SPLIT_ROWS, SPLIT_STEPS = 32, {"smoke": 10, "laptop": 200, "full": 200}
PHASES = (2, 10, 50)
"""Length of phases, in batches."""
BOUND = ("hybrid", "hybrid_warm", "auto", *ASYNCHRONOUS)


@functools.cache
def tuned(preset: str, ids: int = 500) -> Rates:
    """Rates of Sync for 8 NN workers on drifting data; a smoke run does without tuning."""
    if preset == "smoke":
        return UNTUNED
    return tuned_for(Plan((SYNC,) * DAYS[preset], UNTUNED, TUNING_SEED, ROWS_PER_DAY[preset], DRIFT, ids=ids))


def mean_of(summaries: Sequence[Summary]) -> dict[str, float]:
    """Returns drops, staleness and rate of several runs."""
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


@runner.measures("modes.split", *(f"modes.split.{optimizer}" for optimizer in get_args(PlainOptimizer)))
def split(preset: str) -> Iterator[runner.Measure]:
    """Largest difference, over the largest parameter, from one NN worker that has the whole global batch."""
    steps, measures = SPLIT_STEPS[preset], []
    for optimizer in get_args(PlainOptimizer):
        whole = delayed_sync(Problem(optimizer=optimizer, rows=SPLIT_ROWS), range(steps), 1)
        largest = min(np.abs(whole.weights).max(), np.abs(whole.table.rows).max())
        apart = {}
        for parts in (1, 2, 4, 8, 32):
            for mode in (SYNC, Gba(SPLIT_ROWS), Sync("per_id")):
                one = Problem(optimizer=optimizer, rows=SPLIT_ROWS, parts=parts)
                one.run(lock_step(mode, parts, steps * parts, local=SPLIT_ROWS // parts))
                apart[f"{type(mode).__name__}, {mode.reduction}, {parts}"] = float(one.apart(whole) / largest)
        value = max(of for name, of in apart.items() if "per_id" not in name)
        measures.append(
            runner.Measure(f"modes.split.{optimizer}", value, "ratio", at_most=1e-9, details={"steps": steps, **apart})
        )
    yield from measures
    yield runner.worst("modes.split", measures)


@runner.measures(
    *(
        f"modes.bound.{trace}.{kind}"
        for trace in ("static", "latency", *map("phases_{}".format, PHASES))
        for kind in BOUND
    )
)
def bound(preset: str) -> Iterator[runner.Measure]:
    """Rows per virtual second over Sync's, when nothing but compute takes time.

    With `latency` lookups and pushes take time too, and all NN workers are equally fast; rows are refreshed, but for
    "auto", whose rule is for rows that are not. `hybrid_warm` warms up over half of the steps.
    """
    count = 8 if preset == "smoke" else 64
    traces = {"static": steady(TWO_SLOW), "latency": steady(EQUAL)}
    traces |= {f"phases_{n}": phases(WORKERS, length=float(n), count=count) for n in PHASES}
    for name, trace in traces.items():
        steps = 32 if preset == "smoke" else 250
        batches = round(6.5 * trace.period) if name.startswith("phases") else steps * WORKERS
        latency = LATENCY if name == "latency" else 0.0
        setting = Setting(trace, local_batch=LOCAL, lookup=latency, push=latency)
        sync = simulate(SYNC, setting, batches).summary().rate
        warm = Hybrid(4, warmup=batches // WORKERS // 2)
        modes = {"hybrid": Hybrid(4, warmup=0), "hybrid_warm": warm, "auto": Hybrid("auto", warmup=0), **ASYNCHRONOUS}
        for kind, mode in modes.items():
            refresh = bool(latency) and kind != "auto"
            summary = simulate(mode, setting, batches, refresh=refresh).summary()
            yield runner.Measure(
                f"modes.bound.{name}.{kind}",
                summary.rate / sync,
                "ratio",
                details={"of": "rate of Sync", **mean_of([summary])},
            )


# --- delays, on data that do not change -------------------------------------------------------------------------------


@functools.cache
def stationary(preset: str, name: str, mode: Mode = SYNC) -> Plan:
    """Returns the plan of a set of ids, with the rates of a mode for it."""
    ids, zipf = DATA[name]
    plan = Plan((mode,) * (DAYS[preset] // 2), UNTUNED, TUNING_SEED, ROWS_PER_DAY[preset], ids=ids, zipf=zipf)
    return plan if preset == "smoke" else plan._replace(rates=tuned_for(plan))


def curves(plans: Mapping[str, Plan], seeds: Sequence[int]) -> dict[str, list[Curve]]:
    """Returns a run of each plan for each seed."""
    every = [plan._replace(seed=seed) for plan in plans.values() for seed in seeds]
    runs = iter(everywhere(train_through, every, Curve))
    return {kind: [next(runs) for _ in seeds] for kind in plans}


def sync_measure(name: str, runs: Sequence[Curve], plan: Plan, preset: str) -> runner.Measure:
    """AUC of Sync, and how wide the optimum of its rates is."""
    details = {} if preset == "smoke" else auc_beside(plan)
    return runner.Measure(
        name, statistics.fmean(run.areas[-1] for run in runs), "AUC", details={**details, **described(runs, plan)}
    )


def gap(name: str, runs: Sequence[Curve], sync: Sequence[Curve], plan: Plan, **bounds: float) -> runner.Measure:
    """AUC on unseen rows after the last day, minus Sync's."""
    areas, theirs = ([run.areas[-1] for run in of] for of in (runs, sync))
    return runner.paired(name, areas, theirs, "AUC", **bounds, details=described(runs, plan))


def described(runs: Sequence[Curve], plan: Plan) -> dict[str, object]:
    """Returns rates, and means over the runs."""
    return {
        "rates": list(plan.rates),
        "per_day": [round(statistics.fmean(day), 5) for day in zip(*(run.areas for run in runs), strict=True)],
        "virtual_s_per_day": [round(statistics.fmean(day), 2) for day in zip(*(run.ends for run in runs), strict=True)],
        **mean_of([run.summary for run in runs]),
    }


@runner.measures(
    "modes.auc_hybrid",
    *(f"modes.auc_hybrid.{name}.{kind}" for name in DATA for kind in ("sync", *DELAYED)),
    *(f"modes.auc_hybrid.rate.{kind}" for kind in DELAYED),
)
def hybrid(preset: str) -> Iterator[runner.Measure]:
    """8 equally fast NN workers. The warm-up is half of the run; "auto" adapts its depth.

    "auto" and the warm-up on sparse ids have targets; `modes.auc_hybrid` is the worst of them.
    """
    with_target = []
    for name in list(DATA)[: 1 if preset == "smoke" else None]:
        plan = stationary(preset, name)
        plan = plan._replace(factors=EQUAL, latency=LATENCY)
        days = len(plan.modes)
        warmup = days * plan.rows // GLOBAL // 2
        modes = {"sync": SYNC, "hybrid_4": Hybrid(4, warmup=0), "hybrid_4_warm": Hybrid(4, warmup=warmup)}
        modes |= {"auto": Hybrid("auto", warmup=0), "async": Async()}
        runs = curves({kind: plan._replace(modes=(mode,) * days) for kind, mode in modes.items()}, SEEDS[preset])
        yield sync_measure(f"modes.auc_hybrid.{name}.sync", runs["sync"], plan, preset)
        for kind in DELAYED:
            has_target = name in SPARSE and kind in ("hybrid_4_warm", "auto")
            bounds = {"at_least": -0.001} if has_target else {}
            measure = gap(f"modes.auc_hybrid.{name}.{kind}", runs[kind], runs["sync"], plan, **bounds)
            with_target += [measure] if has_target else []
            yield measure
    yield runner.worst("modes.auc_hybrid", with_target)
    sync = runs["sync"][0].summary.rate  # Rates are the same on all data.
    for kind in DELAYED:
        summary = runs[kind][0].summary
        yield runner.Measure(
            f"modes.auc_hybrid.rate.{kind}",
            summary.rate / sync,
            "ratio",
            at_least=1.3 if kind == "auto" else None,
            details={"of": "rate of Sync", "latency": LATENCY, **mean_of([summary])},
        )


@runner.measures(
    *(f"modes.auc_others.{name}.{kind}" for name in STRAGGLING for kind in ("sync", *ASYNCHRONOUS, "async_own"))
)
def others(preset: str) -> Iterator[runner.Measure]:
    """2 of 8 NN workers are 4 times slower, and there is no latency.

    All have Sync's rates. Async, whose steps are of one local batch, also has the best of its own (`async_own`).
    """
    for name in STRAGGLING[: 1 if preset == "smoke" else None]:
        plan = stationary(preset, name)
        days = len(plan.modes)
        plans = {"sync": plan} | {kind: plan._replace(modes=(mode,) * days) for kind, mode in ASYNCHRONOUS.items()}
        plans["async_own"] = stationary(preset, name, Async())
        runs = curves(plans, SEEDS[preset])
        yield sync_measure(f"modes.auc_others.{name}.sync", runs["sync"], plan, preset)
        for kind, of in plans.items():
            if kind != "sync":
                yield gap(f"modes.auc_others.{name}.{kind}", runs[kind], runs["sync"], of)


# --- switches, on data that drift -------------------------------------------------------------------------------------


def switches(
    preset: str, throughout: Plan, switched: Mapping[str, Plan], at_least: float | None = None
) -> Iterator[runner.Measure]:
    """AUC on the first day after the switch and on average, minus Sync's throughout."""
    every = {"sync": throughout, **switched}
    plans = {(name, seed): plan._replace(seed=seed) for name, plan in every.items() for seed in SEEDS[preset]}
    results = dict(zip(plans, everywhere(train, list(plans.values()), list[Day]), strict=True))
    half = len(throughout.modes) // 2
    for name in switched:
        ours, sync = ([results[of, seed] for seed in SEEDS[preset]] for of in (name, "sync"))
        by_day = list(zip(*ours, strict=True))
        gaps = [
            [day.auc - other.auc for day, other in zip(*runs, strict=True)] for runs in zip(ours, sync, strict=True)
        ]
        details = {
            "rates": list(throughout.rates),
            "per_day": [round(statistics.fmean(day), 5) for day in zip(*gaps, strict=True)],
            "rate_per_day": [round(statistics.fmean(run.summary.rate for run in day), 5) for day in by_day],
            **mean_of([day.summary for run in ours for day in run[half:]]),
        }
        for part, days in zip(AFTER, (slice(half, half + 1), slice(half, None)), strict=True):
            areas, theirs = ([statistics.fmean(day.auc for day in run[days]) for run in of] for of in (ours, sync))
            yield runner.paired(f"{name}.{part}", areas, theirs, "AUC", at_least=at_least, details=details)


def drifting(preset: str, ids: int = 500) -> Plan:
    """Returns Sync on all days."""
    return Plan((SYNC,) * DAYS[preset], tuned(preset, ids), 0, ROWS_PER_DAY[preset], DRIFT, ids=ids)


def drifts(preset: str) -> list[tuple[str, int]]:
    """Returns the data of a preset: suffix and ids of each feature."""
    return list(DRIFTING.items())[: 1 if preset == "smoke" else None]


def with_half(plan: Plan, mode: Mode, *, first: bool) -> Plan:
    """Returns a plan with another mode in the first or the second half of its days."""
    half = len(plan.modes) // 2
    return plan._replace(modes=(mode,) * half + (SYNC,) * half if first else (SYNC,) * half + (mode,) * half)


@runner.measures(
    *(f"modes.auc_{way}" for way in GBA),
    *(f"modes.auc_{way}{data}.{part}" for data in DRIFTING for way in GBA for part in AFTER),
)
def switch_gba(preset: str) -> Iterator[runner.Measure]:
    """Sync to Gba of the same global batch, and back."""
    measures = []
    for data, ids in drifts(preset):
        plan = drifting(preset, ids)
        ways = {f"modes.auc_{way}{data}": with_half(plan, Gba(GLOBAL), first=first) for way, first in GBA.items()}
        measures += switches(preset, plan, ways, at_least=-0.0005)
    yield from measures
    for way in GBA:
        yield runner.worst(f"modes.auc_{way}", [each for each in measures if each.name.startswith(f"modes.auc_{way}.")])


@runner.measures(
    *(
        f"modes.auc_switch_others.{way}_{kind}.{part}"
        for kind in OTHERS
        if kind != "gba"
        for way in ("to", "from")
        for part in AFTER
    )
)
def switch_others(preset: str) -> Iterator[runner.Measure]:
    """Sync to every other mode, and every other mode to Sync."""
    plan = drifting(preset)
    ways = {
        f"modes.auc_switch_others.{way}_{kind}": with_half(plan, mode, first=way == "from")
        for kind, mode in OTHERS.items()
        if kind != "gba" and (preset != "smoke" or kind == "bsp")
        for way in ("to", "from")
    }
    yield from switches(preset, plan, ways)


@runner.measures(
    "modes.auc_switch_8x400_32x100",
    *(
        f"modes.auc_switch_8x400_32x100{data}.{way}.{part}"
        for data in DRIFTING
        for way in ("to_gba", "to_sync")
        for part in AFTER
    ),
)
def switch_cluster(preset: str) -> Iterator[runner.Measure]:
    """8 NN workers with 400 rows each and an all-reduce, to 32 with 100 rows and dense PSs; and back.

    All days have the same global batches. A quarter of the NN workers is 4 times slower. Rates are Sync's.
    """
    half, measures = DAYS[preset] // 2, []
    for data, ids in drifts(preset):
        plan = Plan((SYNC,) * 2 * half, UNTUNED, TUNING_SEED, PAPER_ROWS[preset], DRIFT, local=DENSE_PS.local, ids=ids)
        plan = plan._replace(by_day=(ALL_REDUCE,) * 2 * half)
        plan = plan if preset == "smoke" else plan._replace(rates=tuned_for(plan))
        ways = {
            f"modes.auc_switch_8x400_32x100{data}.{way}": with_half(plan, Gba(PAPER_GLOBAL), first=first)._replace(
                by_day=(DENSE_PS if first else ALL_REDUCE,) * half + (ALL_REDUCE if first else DENSE_PS,) * half
            )
            for way, first in (("to_gba", False), ("to_sync", True))
        }
        measures += switches(preset, plan, ways, at_least=-0.0005)
    yield from measures
    yield runner.worst("modes.auc_switch_8x400_32x100", measures)
