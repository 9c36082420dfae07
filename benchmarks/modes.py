"""What the modes learn, in virtual time: switching without tuning, the price of asynchrony, the GBA paper's analysis.

    python -m benchmarks 'modes.*' [--preset smoke|laptop|full] [--json FILE]

No figure here depends on the speed of the machine: what happens when is simulated (persia.replay), gradients are
real (persia.replay.virtual). Runs are spread over the cores. Hyper-parameters are the best of a small grid for Sync,
found on data of their own, and kept for every mode.

modes.bound.*        rate of each mode that the simulation allows, with stragglers.
modes.auc_sync_to_gba, modes.auc_gba_to_sync, modes.auc_switch_others.*
                     Sync, then another mode from day 8 of 16; and from Gba to Sync. Drifting data, 2 of 8 slow.
modes.auc_*          Hybrid, Async and the others against Sync; time to a given AUC.
modes.sparse.*       Hybrid and Async against Sync, by how often the same rows are met.
modes.globo.*        all modes on a stream in time order that punishes every delay; needs the data.
modes.gradients.*    distribution of gradient norms by aggregated batch (Figure 3 of the paper).
modes.occurrences.*  in how many batches an id occurs (Figure 4).
modes.scaling.*      AUC by number of NN workers at constant global batch (Figure 7).
modes.scaling_why.*  what it loses, and to what.
modes.local_batch.*  AUC by local batch at a constant number of NN workers (Figure 8).
"""

from __future__ import annotations

import functools
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks import runner
from benchmarks.modes_runs import (
    GLOBAL,
    LOCAL,
    TUNING_SEED,
    WORKERS,
    Day,
    Plan,
    Rates,
    Scored,
    Stream,
    best_rates,
    changes_under_way,
    everywhere,
    norms,
    scored,
    synthetic,
    train,
    tuned_for,
)
from persia import Batch, data
from persia.modes import Async, Bsp, Gba, HopBs, HopBw, Hybrid, Mode, Sync
from persia.replay import Setting, Summary, phases, simulate, steady

SEEDS = {"smoke": (0,), "laptop": (0, 1, 2), "full": (0, 1, 2)}
DAYS = {"smoke": 4, "laptop": 16, "full": 16}
ROWS_PER_DAY = {"smoke": 2_048, "laptop": 32_768, "full": 262_144}
GLOBO_ROWS = {"smoke": 20_480, "laptop": 524_288, "full": 5_000_000}  # Of them a quarter is for tuning.
UNTUNED = Rates(3e-3, 0.2)
DRIFT = 0.1
SYNC, HYBRID = Sync(), Hybrid(4)
SPARSE = ((500, 1.05), (10_000, 0.0), (100_000, 0.7), (100_000, 1.05))
"""Ids of each feature, and the exponent of how often they occur."""
SPARSE_RATES = Rates(3e-3, 0.8)
"""What `tuned` found; for all of these data."""
LOWER = 1 / 8
SCALING = 3_200
"""Rows of a global batch that 8, 40, 200 and 800 NN workers can share."""
SCALING_RATES = Rates(9e-3, 3.2)
"""What `modes.scaling` finds for Sync."""
PHASE = 10.0
"""Batches."""
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
BOUND = (2, 10, 50)
"""Length of phases, in batches."""
AGGREGATED = (1, 2, 4, 8, 16, 32)
NN_WORKERS = (8, 40, 200, 800)
LOCAL_BATCHES = (32, 64, 128, 256, 512)
GLOBO: dict[str, Mode] = {
    "sync": Sync(), "hybrid_auto": Hybrid("auto"), "hybrid_4": Hybrid(4), "gba": Gba(4 * 256), "async": Async(),
    "bsp": Bsp(4), "hop_bs": HopBs(2), "hop_bw": HopBw(1),
}  # fmt: skip
SHARES = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


@functools.cache
def tuned(preset: str, mode: Mode = SYNC) -> Rates:
    """Rates of a mode for 8 NN workers, on drifting data; a smoke run does without tuning."""
    if preset == "smoke":
        return UNTUNED
    return tuned_for(Plan((mode,) * DAYS[preset], UNTUNED, TUNING_SEED, ROWS_PER_DAY[preset], DRIFT))


@functools.cache
def globo_tuned(preset: str) -> Rates:
    """Rates of Sync on the first quarter of the stream, which is not scored later."""
    first = GLOBO_ROWS[preset] // 4

    def score(grid: list[Rates]) -> list[float]:
        plans = [Stream(Sync(), rates, TUNING_SEED, 0, first) for rates in grid]
        return [run.auc for run in everywhere(scored, plans, Scored)]

    return UNTUNED if preset == "smoke" else best_rates(score)


def others() -> dict[str, Mode]:
    return {
        "hybrid": HYBRID,
        "async": Async(),
        "gba": Gba(GLOBAL),
        "bsp": Bsp(WORKERS),
        "hop_bw": HopBw(2),
        "hop_bs": HopBs(2),
    }


@runner.measures(
    "modes.auc_sync_to_gba", "modes.auc_gba_to_sync",
    *(f"modes.auc_switch_others.to_{kind}" for kind in ("async", "bsp", "hop_bw")),
)  # fmt: skip
def switch(preset: str) -> Iterator[runner.Measure]:
    """AUC after the switch, minus Sync throughout, paired by seed: on the first day and on average."""
    days, rows = DAYS[preset], ROWS_PER_DAY[preset]
    half = days // 2
    rates = tuned(preset)
    kinds: dict[str, tuple[Mode, ...]] = {"sync": (Sync(),) * days}
    changed = {name: mode for name, mode in others().items() if name in ("gba", "async", "bsp", "hop_bw")}
    kinds |= {f"to_{name}": (Sync(),) * half + (mode,) * (days - half) for name, mode in changed.items()}
    kinds["from_gba"] = (Gba(GLOBAL),) * half + (Sync(),) * (days - half)
    plans = {
        (kind, seed): Plan(modes, rates, seed, rows, DRIFT) for seed in SEEDS[preset] for kind, modes in kinds.items()
    }
    found: dict[Any, list[Day]] = dict(zip(plans, everywhere(train, list(plans.values()), list[Day]), strict=True))

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
            target, worst = 0.001, max(statistics.fmean(first), statistics.fmean(mean), key=abs)
        summaries = [day.summary for seed in SEEDS[preset] for day in found[kind, seed][half:]]
        yield runner.Measure(
            name,
            worst,
            "AUC",
            **(runner.within(target) if target else {}),
            details={
                "first_day": statistics.fmean(first),
                "first_day_per_seed": [round(gap, 5) for gap in first],
                "mean": statistics.fmean(mean),
                "mean_per_seed": [round(gap, 5) for gap in mean],
                "per_day": [round(statistics.fmean(gaps(kind, d)), 5) for d in range(days)],
                "sync_per_day": per_day(found, "sync", preset, lambda day: day.auc),
                "rate_per_day": per_day(found, kind, preset, lambda day: day.summary.rate),
                "virtual_s_per_day": per_day(found, kind, preset, lambda day: day.end),
                "rates": list(rates),
                **mean_of(summaries),
            },
        )


def per_day(found: Mapping[Any, list[Day]], kind: str, preset: str, of: Callable[[Day], float]) -> list[float]:
    """Mean over seeds, for each day."""
    runs = [found[kind, seed] for seed in SEEDS[preset]]
    return [round(statistics.fmean(map(of, days)), 5) for days in zip(*runs, strict=True)]


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


@runner.measures(*(f"modes.auc_{kind}" for kind in ("sync", *others(), "hybrid_own", "async_own")))
def stationary(preset: str) -> Iterator[runner.Measure]:
    """AUC on unseen rows after the last day, minus Sync's; and virtual time to Sync's AUC at three quarters.

    Every mode with Sync's rates; those without a global batch also with the best of their own (`_own`): their steps are
    of one local batch.
    """
    days, rows = DAYS[preset], ROWS_PER_DAY[preset]
    kinds = {"sync": SYNC, **others()}
    rates = dict.fromkeys(kinds, tuned(preset))
    for kind in ("hybrid", "async"):
        kinds[f"{kind}_own"], rates[f"{kind}_own"] = kinds[kind], tuned(preset, kinds[kind])
    plans = {(k, s): Plan((m,) * days, rates[k], s, rows) for k, m in kinds.items() for s in SEEDS[preset]}
    found: dict[Any, list[Day]] = dict(zip(plans, everywhere(train, list(plans.values()), list[Day]), strict=True))
    goal = statistics.fmean(found["sync", seed][days * 3 // 4 - 1].auc for seed in SEEDS[preset])
    for kind, mode in kinds.items():
        gaps = [found[kind, seed][-1].auc - found["sync", seed][-1].auc for seed in SEEDS[preset]]
        curve = per_day(found, kind, preset, lambda day: day.auc)
        ends = per_day(found, kind, preset, lambda day: day.end)
        reached = next((end for end, auc in zip(ends, curve, strict=True) if auc >= goal), None)
        value = statistics.fmean(gaps)
        yield runner.Measure(
            f"modes.auc_{kind}",
            value,
            "AUC",
            **(runner.within(0.001) if mode == HYBRID else {}),
            details={
                "data": "500 ids per feature, nearly all in every step; modes.sparse has rarer ones",
                "per_seed": [round(gap, 5) for gap in gaps],
                "per_day": curve,
                "virtual_s_per_day": ends,
                "virtual_s_to_auc": [round(goal, 5), reached],
                "rates": list(rates[kind]),
                **mean_of([day.summary for seed in SEEDS[preset] for day in found[kind, seed]]),
            },
        )


@runner.measures(
    *(f"modes.sparse.{ids}_{zipf:g}.{kind}" for ids, zipf in SPARSE for kind in ("sync", "hybrid_4", "async")),
    *(f"modes.sparse.{ids}_{zipf:g}.{kind}_low" for ids, zipf in SPARSE if zipf > 1 for kind in ("sync", "hybrid_4")),
)
def sparse(preset: str) -> Iterator[runner.Measure]:
    """AUC minus Sync's on unseen rows after the last day, by how often a row changes while a gradient is under way.

    All have the same rates. Where few ids are in most batches, `_low` have an eighth of that of rows: on a row that
    every step meets, Hybrid makes 8 updates where Sync makes one of their mean.
    """
    days, rows = max(2, DAYS[preset] // 2), ROWS_PER_DAY[preset]
    low = SPARSE_RATES._replace(rows=SPARSE_RATES.rows * LOWER)
    for ids, zipf in SPARSE[: 2 if preset == "smoke" else None]:
        first = Plan((), SPARSE_RATES, 0, rows, ids=ids, zipf=zipf)
        kinds: dict[str, tuple[Mode, Rates]] = {
            "sync": (SYNC, SPARSE_RATES), "hybrid_4": (HYBRID, SPARSE_RATES), "async": (Async(), SPARSE_RATES)
        }  # fmt: skip
        if zipf > 1:
            kinds |= {"sync_low": (SYNC, low), "hybrid_4_low": (HYBRID, low)}
        plans = {
            (kind, seed): first._replace(modes=(mode,) * days, rates=of, seed=seed)
            for kind, (mode, of) in kinds.items()
            for seed in SEEDS[preset]
        }
        found = dict(zip(plans, everywhere(train, list(plans.values()), list[Day]), strict=True))
        for kind in kinds:
            areas = [found[kind, seed][-1].auc for seed in SEEDS[preset]]
            gaps = [found[kind, seed][-1].auc - found["sync", seed][-1].auc for seed in SEEDS[preset]]
            one = plans[kind, SEEDS[preset][0]]
            yield runner.Measure(
                f"modes.sparse.{ids}_{zipf:g}.{kind}",
                statistics.fmean(gaps),
                "AUC",
                details={
                    "auc": statistics.fmean(areas),
                    "within_0.001": abs(statistics.fmean(gaps)) <= 0.001,
                    "per_seed": [round(gap, 5) for gap in gaps],
                    "changes_under_way": changes_under_way(one),
                    "rates": list(one.rates),
                    **mean_of([day.summary for seed in SEEDS[preset] for day in found[kind, seed]]),
                },
            )


@runner.measures(*(f"modes.globo.{kind}" for kind in GLOBO))
def globo(preset: str) -> Iterator[runner.Measure]:
    """All modes side by side. Batches whose gradient HopBw drops have no logits: they are not scored."""
    if data.find("globo_ctr") is None:
        print("globo_ctr is not here; set PERSIA_DATA to the directory that holds it.", file=sys.stderr)
        return
    rows, rates = GLOBO_ROWS[preset], globo_tuned(preset)
    plans = {(k, s): Stream(m, rates, s, rows // 4, rows) for s in SEEDS[preset] for k, m in GLOBO.items()}
    found = dict(zip(plans, everywhere(scored, list(plans.values()), Scored), strict=True))
    for kind in GLOBO:
        areas = [found[kind, seed].auc for seed in SEEDS[preset]]
        gaps = [found[kind, seed].auc - found["sync", seed].auc for seed in SEEDS[preset]]
        details = {
            "per_seed": [round(area, 5) for area in areas],
            "minus_sync": statistics.fmean(gaps),
            "minus_sync_per_seed": [round(gap, 5) for gap in gaps],
            "rows": rows,
            "rates": list(rates),
            **mean_of([found[kind, s].summary for s in SEEDS[preset]]),
        }
        yield runner.Measure(f"modes.globo.{kind}", statistics.fmean(areas), "AUC", details=details)


@runner.measures(
    *(f"modes.bound.{trace}.{kind}" for trace in ("static", *map("phases_{}".format, BOUND)) for kind in others())
)
def bound(preset: str) -> Iterator[runner.Measure]:
    """Rows per virtual second over Sync's, when nothing but compute takes time."""
    count = 8 if preset == "smoke" else 64
    traces = {"static": steady([1.0] * 6 + [4.0] * 2)}
    traces |= {f"phases_{n}": phases(WORKERS, length=float(n), count=count) for n in BOUND}
    for name, trace in traces.items():
        batches = 2000 if name == "static" else round(6.5 * trace.period)
        setting = Setting(trace, local_batch=LOCAL)
        sync = simulate(Sync(), setting, batches).summary().rate
        for kind, mode in others().items():
            found = simulate(mode, setting, batches).summary()
            yield runner.Measure(
                f"modes.bound.{name}.{kind}",
                found.rate / sync,
                "ratio",
                details={"of": "rate of Sync", **mean_of([found])},
            )


@runner.measures(*(f"modes.gradients.{kind}" for kind in (*(f"bsp_{n}" for n in AGGREGATED), "sync", "gba")))
def gradients(preset: str) -> Iterator[runner.Measure]:
    """Figure 3: the norm follows the aggregated batch, whoever aggregates."""
    rows = 4 * ROWS_PER_DAY[preset]
    kinds: dict[str, Mode] = {f"bsp_{n}": Bsp(n) for n in AGGREGATED} | {"sync": Sync()}
    kinds["gba"] = Gba(GLOBAL)
    plans = [Plan((mode,), tuned(preset), 0, rows) for mode in kinds.values()]
    for kind, found in zip(kinds, everywhere(norms, plans, list[float]), strict=True):
        parts = np.quantile(found, QUANTILES).tolist()
        yield runner.Measure(
            f"modes.gradients.{kind}",
            statistics.median(found),
            "norm",
            details={
                "quantiles": dict(zip(map(str, QUANTILES), parts, strict=True)),
                "mean": statistics.fmean(found),
                "std": statistics.pstdev(found),
            },
        )


@runner.measures("modes.occurrences.synthetic", "modes.occurrences.globo")
def occurrences(preset: str) -> Iterator[runner.Measure]:
    """Figure 4: ids by the share of batches that they occur in."""
    sources: dict[str, Sequence[Batch]] = {"synthetic": synthetic(Plan((), UNTUNED, 0, ROWS_PER_DAY[preset]), 1)[1]}
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
        yield runner.Measure(
            f"modes.occurrences.{name}",
            float(np.median(shares)),
            "fraction",
            details={
                "ids": len(shares),
                "batches": len(batches),
                "ids_within": {str(limit): float((shares <= limit).mean()) for limit in SHARES},
            },
        )


@runner.measures("modes.scaling.sync_8", *(f"modes.scaling.gba_{count}" for count in NN_WORKERS))
def scaling(preset: str) -> Iterator[runner.Measure]:
    """Figure 7: NN workers at a constant global batch, each slow a quarter of the time, in phases of 10 batches.

    The time of a batch is taken as proportional to its rows. Rates are those of Sync with this global batch.
    """
    counts = NN_WORKERS[: 2 if preset == "smoke" else None]
    rows = SCALING * (2 if preset == "smoke" else 20)
    days, seeds = DAYS[preset] // 2, SEEDS[preset][:1]
    rates = UNTUNED
    if preset != "smoke":
        rates = tuned_for(Plan((Sync(),) * days, UNTUNED, TUNING_SEED, rows, local=SCALING // WORKERS))
    first = Plan((), rates, 0, rows)
    plans = {(f"gba_{n}", s): scaled(first._replace(seed=s), Gba(SCALING), n, days) for n in counts for s in seeds}
    plans |= {("sync_8", s): scaled(first._replace(seed=s), Sync(), 8, days) for s in seeds}
    found = dict(zip(plans, everywhere(train, list(plans.values()), list[Day]), strict=True))
    for kind in dict.fromkeys(kind for kind, _ in plans):
        areas = [found[kind, seed][-1].auc for seed in seeds]
        one = plans[kind, 0]
        sync = simulate(Sync(), one.setting(), range(100 * len(one.factors))).summary()
        yield runner.Measure(
            f"modes.scaling.{kind}",
            statistics.fmean(areas),
            "AUC",
            details={
                "per_seed": [round(area, 5) for area in areas],
                "local_batch": one.local,
                "sync_rows_per_virtual_s": sync.rate,
                "rates": list(rates),
                **mean_of([day.summary for seed in seeds for day in found[kind, seed]]),
            },
        )


def scaled(plan: Plan, mode: Mode, count: int, days: int) -> Plan:
    """So many NN workers at the global batch of Figure 7, each slow a quarter of the time."""
    local = SCALING // count
    compute = local * WORKERS / SCALING  # A batch takes as long as it has rows.
    return plan._replace(modes=(mode,) * days, factors=(1.0,) * count, local=local, compute=compute, moving=PHASE)


@runner.measures(
    *(f"modes.scaling_why.{by}_{n}{low}" for by in ("per_id", "global") for n in (8, 40, 200) for low in ("", "_low")),
    "modes.scaling_why.sync_8", "modes.scaling_why.sync_8_low",
)  # fmt: skip
def scaling_why(preset: str) -> Iterator[runner.Measure]:
    """What Figure 7 loses: to the divisor of an id's sum (`per_id`, or `global`), and to the learning rate of rows."""
    rows, days = SCALING * (2 if preset == "smoke" else 20), DAYS[preset] // 2
    kinds = {
        f"{name}_{count}": (mode, count)
        for count in (8, 40 if preset == "smoke" else 200)
        for name, mode in (("per_id", Gba(SCALING, reduction="per_id")), ("global", Gba(SCALING)))
    } | {"sync_8": (Sync(), 8)}
    shares = {"": 1.0, "_low": LOWER}
    plans = {
        kind + suffix: scaled(Plan((), SCALING_RATES._replace(rows=SCALING_RATES.rows * share), 0, rows), *run, days)
        for suffix, share in shares.items()
        for kind, run in kinds.items()
    }
    found = dict(zip(plans, everywhere(train, list(plans.values()), list[Day]), strict=True))
    for kind, plan in plans.items():
        details = {"rates": list(plan.rates), "per_day": [round(day.auc, 5) for day in found[kind]]}
        yield runner.Measure(f"modes.scaling_why.{kind}", found[kind][-1].auc, "AUC", details=details)


@runner.measures(*(f"modes.local_batch.{size}" for size in LOCAL_BATCHES))
def local_batch(preset: str) -> Iterator[runner.Measure]:
    """Figure 8: what happens when the global batch is not kept: M = 8, hyper-parameters as for a local batch of 128."""
    rates, days = tuned(preset), DAYS[preset] // 2
    sizes = LOCAL_BATCHES[1:3] if preset == "smoke" else LOCAL_BATCHES
    plans = {
        (size, seed): Plan((Gba(size * WORKERS),) * days, rates, seed, ROWS_PER_DAY[preset], local=size)
        for size in sizes
        for seed in SEEDS[preset]
    }
    found = dict(zip(plans, everywhere(train, list(plans.values()), list[Day]), strict=True))
    for size in sizes:
        areas = [found[size, seed][-1].auc for seed in SEEDS[preset]]
        yield runner.Measure(
            f"modes.local_batch.{size}",
            statistics.fmean(areas),
            "AUC",
            details={"per_seed": [round(area, 5) for area in areas], "rates": list(rates)},
        )
