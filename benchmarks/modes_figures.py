"""The GBA paper's figures, and all modes on a stream of clicks, in virtual time.

    python -m benchmarks 'modes.*' [--preset smoke|laptop|full] [--json FILE]

How it is measured: benchmarks/modes.py.

modes.globo.*        all modes on a stream in time order that punishes every delay; needs globo_ctr.
modes.globo_gba.*    Gba on that stream, and what its loss is made of.
modes.gradients.*    distribution of gradient norms by aggregated batch (Figure 3 of the paper).
modes.occurrences.*  in how many batches an id occurs (Figure 4).
modes.scaling.*      AUC by number of NN workers at constant global batch (Figure 7).
modes.tolerance.*    AUC by tolerance (equation 1) with long-tailed stalls.
modes.local_batch.*  AUC by local batch at a constant number of NN workers (Figure 8).
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks import runner
from benchmarks.gba_runs import (
    SCALED_GLOBAL,
    STREAM_LOCAL,
    STREAM_WORKERS,
    GlobalTags,
    Inherited,
    Scored,
    Stalled,
    StalledDay,
    Stream,
    best_rate,
    inherited,
    scaled,
    scored,
    scored_after,
    stalled,
)
from benchmarks.modes import DAYS, ROWS_PER_DAY, SEEDS, UNTUNED, mean_of, tuned
from benchmarks.modes_runs import (
    GLOBAL,
    LOCAL,
    TUNING_SEED,
    WORKERS,
    Day,
    Plan,
    Rates,
    best_rates,
    everywhere,
    norms,
    synthetic,
    train,
)
from benchmarks.public_data import is_here
from persia import Batch, data
from persia.modes import Async, Bsp, Gba, HopBs, HopBw, Hybrid, Mode, Sync
from persia.modes.base import Reduction
from persia.optim import Adagrad, Adam
from persia.replay import simulate

GLOBO_ROWS = {"smoke": 10_240, "laptop": 524_288, "full": 2_500_000}
"""Rows of a run, whose first quarter is not scored. As many, which follow, are for tuning; there are 5.8 million."""
SCALING = {
    "smoke": (2 * SCALED_GLOBAL, 1, 1),
    "laptop": (300 * SCALED_GLOBAL, 2, 2),
    "full": (600 * SCALED_GLOBAL, 4, 8),
}
"""Rows of a day, days of the base, days of Gba."""
OPTIMIZERS: dict[str, type[Adagrad | Adam]] = {"adagrad": Adagrad, "adam": Adam}
RATE = {"adagrad": 0.1, "adam": 0.01}
"""At which the search for the best rate of rows starts."""
REDUCTIONS: tuple[Reduction, ...] = ("global", "per_id")
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
AGGREGATED = (1, 2, 4, 8, 16, 32)
NN_WORKERS = (8, 20, 100, 200)
LOCAL_BATCHES = (32, 64, 128, 256, 512)
GLOBO: dict[str, Mode] = {
    "sync": Sync(), "hybrid_auto": Hybrid("auto", warmup=0), "hybrid_4": Hybrid(4, warmup=0),
    "gba": Gba(4 * 256), "async": Async(),
    "bsp": Bsp(4), "hop_bs": HopBs(2), "hop_bw": HopBw(1),
}  # fmt: skip
SYNC = Sync()
PARTS = ("scored_late", "order", "stale_rows", "stale_dense", "even", "own_rates")
SCALING_SEEDS = {"smoke": (0,), "laptop": (0, 1, 2), "full": (0, 1, 2)}
STALLED_DAYS = {"smoke": 1, "laptop": 6, "full": 8}
CHANCE = 0.03
"""Of a stall, for each batch."""
TOLERANCE = {"adagrad_8": ("adagrad", 8, 1.0)} | {f"adam_32_{n}x": ("adam", 32, float(n)) for n in (1, 2, 4)}
"""Optimizer of rows, number of NN workers, factor on the best rate."""
TOLERATED: dict[str, Mode] = {f"tolerance_{n}": Gba(GLOBAL, n) for n in (0, 1, 3, 4, 8)}
TOLERATED |= {f"k_{n}": GlobalTags(GLOBAL, n) for n in (0, 3)} | {"unlimited": Gba(GLOBAL, 1_000_000)}
BETWEEN = tuple(f"tolerance_{n}" for n in (1, 3, 4, 8))
SHARES = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


@functools.cache
def globo_tuned(preset: str, mode: Mode = SYNC) -> Rates:
    """Rates of a mode on the rows after the rows of the runs, and as many: the best of a short run are too high."""
    rows = GLOBO_ROWS[preset]

    def score(grid: list[Rates]) -> list[float]:
        plans = [Stream(mode, rates, TUNING_SEED, rows // 4, rows) for rates in grid]
        return [run.auc for run in everywhere(scored_after, plans, Scored)]

    return UNTUNED if preset == "smoke" else best_rates(score)


@runner.measures(*(f"modes.globo.{kind}" for kind in GLOBO))
def globo(preset: str) -> Iterator[runner.Measure]:
    """Progressive AUC of all modes minus Sync's, at Sync's rates.

    Batches that HopBw drops have no logits: they are not scored.
    """
    if not is_here("globo_ctr"):
        return
    rows, rates = GLOBO_ROWS[preset], globo_tuned(preset)
    plans = {(k, s): Stream(m, rates, s, rows // 4, rows) for s in SEEDS[preset] for k, m in GLOBO.items()}
    results = dict(zip(plans, everywhere(scored, list(plans.values()), Scored), strict=True))
    areas = {kind: [results[kind, seed].auc for seed in SEEDS[preset]] for kind in GLOBO}
    for kind in GLOBO:
        details = {"rows": rows, "rates": list(rates), **mean_of([results[kind, s].summary for s in SEEDS[preset]])}
        yield runner.paired(f"modes.globo.{kind}", areas[kind], areas["sync"], "AUC", details=details)


@runner.measures("modes.globo_gba", *(f"modes.globo_gba.{part}" for part in PARTS))
def globo_gba(preset: str) -> Iterator[runner.Measure]:
    """Gba - Sync in time order, at rates tuned for Sync, and what it is made of. The first four parts add up to it.

    scored_late  rows are scored by the parameters that an NN worker has read, which are older than Sync's
    order        a slow NN worker's rows are learned from in a later step than Sync's
    stale_rows   gradients are of older rows than those that they change
    stale_dense  and of older dense parameters
    even         the whole with NN workers that are equally fast
    own_rates    the whole with the best rates of Gba
    """
    if not is_here("globo_ctr"):
        return
    rows, rates = GLOBO_ROWS[preset], globo_tuned(preset)
    gba = Gba(STREAM_WORKERS * STREAM_LOCAL)
    sync = Stream(Sync(), rates, 0, rows // 4, rows, at_step=True)
    stale = sync._replace(mode=gba)
    kinds = {
        "sync": sync,
        "gba": stale,
        "fresh": stale._replace(fresh=("lookup", "pull")),
        "fresh_dense": stale._replace(fresh=("pull",)),
        "even": stale._replace(stragglers=False),
        "own_rates": stale._replace(rates=globo_tuned(preset, gba)),
    }
    seeds = SEEDS[preset]
    plans = {(kind, seed): plan._replace(seed=seed) for kind, plan in kinds.items() for seed in seeds}
    results = dict(zip(plans, everywhere(scored, list(plans.values()), Scored), strict=True))
    read = {kind: [results[kind, seed].auc for seed in seeds] for kind in kinds}
    at_step = {kind: [results[kind, seed].at_step or 0.0 for seed in seeds] for kind in kinds}
    lag = {kind: [a - b for a, b in zip(read[kind], at_step[kind], strict=True)] for kind in kinds}
    totals = mean_of([results["gba", seed].summary for seed in seeds])
    pairs = {
        "": (read["gba"], read["sync"]),
        ".scored_late": (lag["gba"], lag["sync"]),
        ".order": (at_step["fresh"], at_step["sync"]),
        ".stale_rows": (at_step["fresh_dense"], at_step["fresh"]),
        ".stale_dense": (at_step["gba"], at_step["fresh_dense"]),
        ".even": (read["even"], read["sync"]),
        ".own_rates": (read["own_rates"], read["sync"]),
    }
    for part, (ours, theirs) in pairs.items():
        yield runner.paired(
            f"modes.globo_gba{part}",
            ours,
            theirs,
            "AUC",
            at_least=None if part else -0.003,
            details={"rows": rows, "rates": list(kinds.get(part[1:], sync).rates), **totals},
        )


@functools.cache
def stalled_rate(preset: str, kind: str) -> float:
    """The best rate of rows for Sync without stalls, on separate data."""
    rows = ROWS_PER_DAY[preset]

    def score(rates: list[float]) -> list[float]:
        plans = [
            Stalled(Sync(), OPTIMIZERS[kind](lr=rate), TUNING_SEED, rows, STALLED_DAYS[preset], WORKERS, LOCAL, 0.0)
            for rate in rates
        ]
        return [later(run) for run in everywhere(stalled, plans, list[StalledDay])]

    return RATE[kind] if preset == "smoke" else best_rate(score, RATE[kind])


def later(days: Sequence[StalledDay]) -> float:
    """Mean AUC of the second half of the days."""
    return statistics.fmean(day.auc for day in days[len(days) // 2 :])


@runner.measures(
    *(f"modes.tolerance.{setting}.{kind}" for setting in TOLERANCE for kind in (*TOLERATED, "sync", "between"))
)
def tolerance(preset: str) -> Iterator[runner.Measure]:
    """Equation 1 with long-tailed stalls of 8 to 50 batches: AUC by tolerance, minus that without a limit.

    `k_N` decays rows by the global step instead of their own. `between` is the best of the tolerances 1, 3, 4 and 8
    less the better of 0 and unlimited: chosen by the first two seeds, compared on the others. Rates of rows are Sync's
    best without stalls, or a multiple of it. M = 8.
    """
    seeds, settings = SEEDS[preset], list(TOLERANCE)[: 1 if preset == "smoke" else None]
    modes: dict[str, Mode] = {**TOLERATED, "sync": Sync()}
    plans: dict[Any, Stalled] = {}
    for setting in settings:
        kind, workers, factor = TOLERANCE[setting]
        optimizer = OPTIMIZERS[kind](lr=factor * stalled_rate(preset, kind))
        for name, mode in modes.items():
            count = WORKERS if name == "sync" else workers  # The same global batch.
            for seed in seeds:
                plans[setting, name, seed] = Stalled(
                    mode, optimizer, seed, ROWS_PER_DAY[preset], STALLED_DAYS[preset], count, LOCAL, CHANCE
                )
    results = dict(zip(plans, everywhere(stalled, list(plans.values()), list[StalledDay]), strict=True))
    for setting in settings:
        areas = {name: [later(results[setting, name, seed]) for seed in seeds] for name in modes}
        for name in modes:
            days = [day for seed in seeds for day in results[setting, name, seed]]
            totals = mean_of([day.summary for day in days])
            loss = statistics.fmean(areas[name]) - statistics.fmean(areas["unlimited"])
            yield runner.paired(
                f"modes.tolerance.{setting}.{name}",
                areas[name],
                areas["unlimited"],
                "AUC",
                details={
                    "rate_of_rows": plans[setting, name, seeds[0]].optimizer.lr,
                    "rows_refused": statistics.fmean(day.refused for day in days),
                    "per_share_decayed": loss / totals["decayed"] if totals["decayed"] else None,
                    **totals,
                },
            )
        chosen, rest = (seeds, seeds) if preset == "smoke" else (seeds[:2], seeds[2:])
        means = {
            name: statistics.fmean(area for seed, area in zip(seeds, each, strict=True) if seed in chosen)
            for name, each in areas.items()
        }
        between = max(BETWEEN, key=means.__getitem__)
        end = max(("tolerance_0", "unlimited"), key=means.__getitem__)
        yield runner.paired(
            f"modes.tolerance.{setting}.between",
            [later(results[setting, between, seed]) for seed in rest],
            [later(results[setting, end, seed]) for seed in rest],
            "AUC",
            at_least=0.0,
            details={"between": between, "end": end, "chosen_by_seeds": list(chosen), "seeds": list(rest)},
        )


@runner.measures(*(f"modes.gradients.{kind}" for kind in (*(f"bsp_{n}" for n in AGGREGATED), "sync", "gba")))
def gradients(preset: str) -> Iterator[runner.Measure]:
    """Figure 3: the norm follows the aggregated batch, whoever aggregates."""
    rows = 4 * ROWS_PER_DAY[preset]
    kinds: dict[str, Mode] = {f"bsp_{n}": Bsp(n) for n in AGGREGATED} | {"sync": Sync()}
    kinds["gba"] = Gba(GLOBAL)
    plans = [Plan((mode,), tuned(preset), 0, rows) for mode in kinds.values()]
    for kind, lengths in zip(kinds, everywhere(norms, plans, list[float]), strict=True):
        parts = np.quantile(lengths, QUANTILES).tolist()
        yield runner.Measure(
            f"modes.gradients.{kind}",
            statistics.median(lengths),
            "norm",
            details={
                "quantiles": dict(zip(map(str, QUANTILES), parts, strict=True)),
                "mean": statistics.fmean(lengths),
                "std": statistics.pstdev(lengths),
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


@functools.cache
def scaling_rate(preset: str, kind: str, reduction: Reduction) -> float:
    """The best rate of rows for Sync with 8 NN workers on the days of the base, on separate data."""
    rows, days, _ = SCALING[preset]

    def score(rates: list[float]) -> list[float]:
        optimizers = [OPTIMIZERS[kind](lr=rate) for rate in rates]
        plans = [Inherited(each, reduction, TUNING_SEED, rows, days, 0, ()) for each in optimizers]
        return [run["base"][-1].auc for run in everywhere(inherited, plans, dict[str, list[Day]])]

    return RATE[kind] if preset == "smoke" else best_rate(score, RATE[kind])


@runner.measures(
    *(
        f"modes.scaling.{kind}.{reduction}.{name}"
        for kind in OPTIMIZERS
        for reduction in REDUCTIONS
        for name in map("gba_{}".format, NN_WORKERS)
    )
)
def scaling(preset: str) -> Iterator[runner.Measure]:
    """Figure 7: mean AUC of Gba's days at a constant global batch of 3,200 rows, minus that with 8 NN workers.

    As in the paper, Gba inherits a base that Sync has trained, and a day has at least 300 steps. The rate of rows is
    Sync's best for each optimizer and reduction. The target is that of the distance from 8 NN workers, so numbers of
    them may lie twice as far apart. Preset laptop (2 days of Sync and 2 of Gba, 300 steps each) takes 50 minutes on
    2 cores, full (4 and 8 days of 600 steps) about 6 hours, an estimate.
    """
    rows, base_days, days = SCALING[preset]
    counts = NN_WORKERS[: 2 if preset == "smoke" else None]
    kinds = [(kind, reduction) for kind in OPTIMIZERS for reduction in REDUCTIONS]
    optimizers = {each: OPTIMIZERS[each[0]](lr=scaling_rate(preset, *each)) for each in kinds}
    plans = {
        (*each, seed): Inherited(optimizers[each], each[1], seed, rows, base_days, days, counts)
        for seed in SCALING_SEEDS[preset]
        for each in kinds
    }
    results = dict(zip(plans, everywhere(inherited, list(plans.values()), dict[str, list[Day]]), strict=True))
    for kind, reduction in kinds:
        runs = [results[kind, reduction, seed] for seed in SCALING_SEEDS[preset]]
        areas = {n: [statistics.fmean(day.auc for day in run[str(n)]) for run in runs] for n in counts}
        for count in counts:
            sync = simulate(Sync(), scaled(count, SCALING_SEEDS[preset][0]), range(100 * count)).summary()
            yield runner.paired(
                f"modes.scaling.{kind}.{reduction}.gba_{count}",
                areas[count],
                areas[NN_WORKERS[0]],
                "AUC",
                **(runner.within(0.001) if reduction == "global" and count != NN_WORKERS[0] else {}),
                details={
                    "base_auc": statistics.fmean(run["base"][-1].auc for run in runs),
                    "steps_per_day": rows // SCALED_GLOBAL,
                    "local_batch": SCALED_GLOBAL // count,
                    "sync_rows_per_virtual_s": sync.rate,
                    "rate_of_rows": optimizers[kind, reduction].lr,
                    **mean_of([day.summary for run in runs for day in run[str(count)]]),
                },
            )


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
    results = dict(zip(plans, everywhere(train, list(plans.values()), list[Day]), strict=True))
    for size in sizes:
        areas = [results[size, seed][-1].auc for seed in SEEDS[preset]]
        yield runner.Measure(
            f"modes.local_batch.{size}",
            statistics.fmean(areas),
            "AUC",
            details={"per_seed": [round(area, 5) for area in areas], "rates": list(rates)},
        )
