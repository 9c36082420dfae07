"""What the modes learn, in virtual time: switching without tuning, the price of asynchrony.

    python -m benchmarks 'modes.*' [--preset smoke|laptop|full] [--json FILE]

No figure here depends on the speed of the machine: what happens when is simulated (persia.replay), gradients are
real (persia.replay.virtual). Runs are spread over the cores. Hyper-parameters are the best of a small grid for Sync,
found on data of their own, and kept for every mode. modes_figures.py has the GBA paper's figures.

modes.bound.*        rate of each mode that the simulation allows, with stragglers.
modes.auc_sync_to_gba, modes.auc_gba_to_sync, modes.auc_switch_others.*
                     Sync, then another mode from day 8 of 16; and from Gba to Sync. Drifting data, 2 of 8 slow.
modes.auc_*          Hybrid, Async and the others against Sync; time to a given AUC.
modes.sparse.*       Hybrid and Async against Sync, by how often the same rows are met.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks import runner
from benchmarks.modes_runs import (
    GLOBAL,
    LOCAL,
    TUNING_SEED,
    WORKERS,
    Day,
    Plan,
    Rates,
    changes_under_way,
    everywhere,
    train,
    tuned_for,
)
from persia.modes import Async, Bsp, Gba, HopBs, HopBw, Hybrid, Mode, Sync
from persia.replay import Setting, Summary, phases, simulate, steady

SEEDS = {"smoke": (0,), "laptop": (0, 1, 2), "full": (0, 1, 2)}
DAYS = {"smoke": 4, "laptop": 16, "full": 16}
ROWS_PER_DAY = {"smoke": 2_048, "laptop": 32_768, "full": 262_144}
UNTUNED = Rates(3e-3, 0.2)
DRIFT = 0.1
SYNC, HYBRID = Sync(), Hybrid(4)
SPARSE = ((500, 1.05), (10_000, 0.0), (100_000, 0.7), (100_000, 1.05))
"""Ids of each feature, and the exponent of how often they occur."""
SPARSE_RATES = Rates(3e-3, 0.8)
"""What `tuned` found; for all of these data."""
LOWER = 1 / 8
BOUND = (2, 10, 50)
"""Length of phases, in batches."""


@functools.cache
def tuned(preset: str, mode: Mode = SYNC) -> Rates:
    """Rates of a mode for 8 NN workers, on drifting data; a smoke run does without tuning."""
    if preset == "smoke":
        return UNTUNED
    return tuned_for(Plan((mode,) * DAYS[preset], UNTUNED, TUNING_SEED, ROWS_PER_DAY[preset], DRIFT))


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
