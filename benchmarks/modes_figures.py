"""The GBA paper's figures, and all modes on a stream of clicks, in virtual time.

    python -m benchmarks 'modes.*' [--preset smoke|laptop|full] [--json FILE]

How it is measured: benchmarks/modes.py.

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
from collections.abc import Iterator, Sequence

import numpy as np

from benchmarks import runner
from benchmarks.modes import DAYS, LOWER, ROWS_PER_DAY, SEEDS, UNTUNED, mean_of, tuned
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
    everywhere,
    norms,
    scored,
    synthetic,
    train,
    tuned_for,
)
from persia import Batch, data
from persia.modes import Async, Bsp, Gba, HopBs, HopBw, Hybrid, Mode, Sync
from persia.replay import simulate

GLOBO_ROWS = {"smoke": 20_480, "laptop": 524_288, "full": 5_000_000}  # Of them a quarter is for tuning.
SCALING = 3_200
"""Rows of a global batch that 8, 40, 200 and 800 NN workers can share."""
SCALING_RATES = Rates(9e-3, 3.2)
"""What `modes.scaling` finds for Sync."""
PHASE = 10.0
"""Batches."""
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
AGGREGATED = (1, 2, 4, 8, 16, 32)
NN_WORKERS = (8, 40, 200, 800)
LOCAL_BATCHES = (32, 64, 128, 256, 512)
GLOBO: dict[str, Mode] = {
    "sync": Sync(), "hybrid_auto": Hybrid("auto"), "hybrid_4": Hybrid(4), "gba": Gba(4 * 256), "async": Async(),
    "bsp": Bsp(4), "hop_bs": HopBs(2), "hop_bw": HopBw(1),
}  # fmt: skip
SHARES = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


@functools.cache
def globo_tuned(preset: str) -> Rates:
    """Rates of Sync on the first quarter of the stream, which is not scored later."""
    first = GLOBO_ROWS[preset] // 4

    def score(grid: list[Rates]) -> list[float]:
        plans = [Stream(Sync(), rates, TUNING_SEED, 0, first) for rates in grid]
        return [run.auc for run in everywhere(scored, plans, Scored)]

    return UNTUNED if preset == "smoke" else best_rates(score)


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
