"""The GBA paper (arXiv 2205.11048) as printed, in virtual time: sums by id, staleness by token, a day of a cluster.

    python -m benchmarks 'paper.gba_*' [--preset smoke|laptop|full] [--json FILE]

No figure here depends on the speed of the machine (benchmarks/modes.py). Each run is kept in the file of PERSIA_RUNS,
so that a line can be continued. Learning rates are those that other benchmarks found to be best.

paper.gba_per_id.KIND.WAY.*
    Figure 6 with the divisor of Algorithm 2, line 23: AUC after a switch less that of Sync throughout, as
    `modes.auc_sync_to_gba` (to_gba) and `modes.auc_gba_to_sync` (to_sync); 100,000 ids of each feature.
    KIND      gba: Sync divides the sum of an id by all rows of the global batch; both: as Gba does.
paper.gba_staleness.STATE.*
    Table 5.3: mean staleness of applied gradients of the dense parameters, in global steps. `gba`, `bsp` and `hop_bs`
    count as section 4.1 defines it, from the step at which an NN worker begins a batch to the step at which its
    gradient is applied; a step of `hop_bs` is N gradients. `gba_token` counts from the token, and is negative if a
    gradient is early; `gba_token_late` counts early ones as 0, and `gba_token_all` also those that are too old to be
    applied.
paper.gba_auc.STATE, paper.gba_auc.STATE.sparse
    The AUC of Table 5.3: Gba less Sync, mean of the days after a switch. 8 NN workers with 400 rows each, then 32 with
    100; 500 ids of each feature, or 100,000.
paper.gba_figure1.*
    Rate of a mode in the slowest hour of a day, over its rate in the fastest one; `by_hour` has all. `async_over_sync`
    is the largest ratio of an hour.
paper.gba_figure2.DATA.WAY.*
    A mode that is switched after half of the data: AUC less that of a run which stays in its mode, after the next
    twentieth of the data (first) and at the end (last).
    WAY       to_async, to_sync: with the learning rates of the mode before; to_async_tuned, to_sync_tuned: with those
              that are best for the mode after.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from benchmarks import runner
from benchmarks.modes import AFTER, DATA, DAYS, DRIFT, DRIFTING, GBA, ROWS_PER_DAY, SEEDS, switches
from benchmarks.modes_runs import GLOBAL, Day, Plan, Rates, everywhere
from benchmarks.paper import LOCAL_BATCH, NN_WORKERS, PAPER_STALENESS, STATES, STEPS, cluster, compared
from benchmarks.paper_gba_runs import GLOBAL as STRAINED_GLOBAL
from benchmarks.paper_gba_runs import Continued, Strained, Way, continued, strained
from persia.modes import Async, Gba, Hybrid, Mode, Sync
from persia.replay import Setting, Slowdown, Timeline, Trace, simulate

AT_LEAST = -0.0005
"""Target of all switches between Sync and Gba."""

# --- Figure 6, Algorithm 2 as printed ---------------------------------------------------------------------------------

PER_ID: dict[str, Mode] = {"gba": Sync(), "both": Sync("per_id")}
"""The mode that Gba is switched with."""
SWITCH_RATES = Rates(0.003, 0.1)
"""The best ones of Sync for 100,000 ids, as `modes.auc_sync_to_gba.sparse` found them."""


def per_id(preset: str, *, kind: str, way: str) -> Iterator[runner.Measure]:
    """AUC after a switch less that of Sync throughout."""
    days = DAYS[preset]
    sync = PER_ID[kind]
    plan = Plan((sync,) * days, SWITCH_RATES, 0, ROWS_PER_DAY[preset], DRIFT, ids=DRIFTING[".sparse"])
    gba = Gba(GLOBAL, reduction="per_id")
    modes = (gba,) * (days // 2) + (sync,) * (days // 2)
    switched = plan._replace(modes=modes if GBA[way] else modes[::-1])
    yield from switches(preset, plan, {f"paper.gba_per_id.{kind}.{way}": switched}, at_least=AT_LEAST)


for _kind in PER_ID:
    for _way in GBA:
        _names = (f"paper.gba_per_id.{_kind}.{_way}.{_part}" for _part in AFTER)
        runner.measures(*_names)(functools.partial(per_id, kind=_kind, way=_way))


# --- Table 5.3 --------------------------------------------------------------------------------------------------------


STALENESS = ("gba", "gba_token", "gba_token_late", "gba_token_all", "bsp", "hop_bs")


def ages_by_token(timeline: Timeline, excluded: bool = False) -> list[int]:
    """Returns the step in which each gradient of the dense parameters arrives, less its token.

    Args:
        timeline: the run.
        excluded: also of gradients whose decay is 0.
    """
    return [
        event.version - event.token
        for event in timeline.events
        if event.server == "dense-0"
        and event.kind == "push"
        and (excluded or timeline.mode.decay(event.version, event.token) > 0)
    ]


def staleness(preset: str, *, state: str) -> Iterator[runner.Measure]:
    """Mean and maximum staleness, counted in two ways."""
    workers = NN_WORKERS[preset]
    deviation, stalls = STATES[state]
    setting = Setting(cluster(workers, deviation, stalls, 2 * STEPS[preset]), local_batch=LOCAL_BATCH)
    for kind in ("gba", "bsp", "hop_bs"):
        timeline = simulate(compared(workers)[kind], setting, workers * STEPS[preset])
        summary = timeline.summary()
        step = workers if kind == "hop_bs" else 1
        found = {kind: (summary.staleness_mean / step, summary.staleness_max / step)}
        if kind == "gba":
            applied, every = ages_by_token(timeline), ages_by_token(timeline, excluded=True)
            late = {"gba_token_late": applied, "gba_token_all": every}
            found["gba_token"] = (statistics.fmean(applied), max(applied))
            found |= {name: (statistics.fmean(max(0, age) for age in ages), max(ages)) for name, ages in late.items()}
        for name, (mean, most) in found.items():
            details = {"max": most, "paper": PAPER_STALENESS[state][kind], "decayed": summary.decayed}
            yield runner.Measure(f"paper.gba_staleness.{state}.{name}", mean, "steps", details=details)


for _state in STATES:
    _names = (f"paper.gba_staleness.{_state}.{_kind}" for _kind in STALENESS)
    runner.measures(*_names)(functools.partial(staleness, state=_state))

STRAINED_RATES = {"": Rates(0.009, 0.2), ".sparse": Rates(0.003, 0.2)}
"""The best ones of Sync, as `modes.auc_switch_8x400_32x100` found them, by the suffix of a name."""
STRAINED_DAYS = {"smoke": (1, 1), "laptop": (2, 3), "full": (8, 8)}
"""Before the switch, and after it."""
STRAINED_ROWS = {"smoke": 2 * STRAINED_GLOBAL, "laptop": 30 * STRAINED_GLOBAL, "full": 80 * STRAINED_GLOBAL}
PAPER_AUC = {"strained": 0.0, "busy": 0.0002, "quiet": 0.0001}
"""Of GBA less Sync's in Table 5.3."""


def auc(preset: str, *, suffix: str) -> Iterator[runner.Measure]:
    """Mean AUC of the days after a switch to Gba, less Sync's."""
    base, days = STRAINED_DAYS[preset]
    rates = STRAINED_RATES[suffix]
    plans = [
        Strained(DRIFTING[suffix], rates, seed, STRAINED_ROWS[preset], base, days, STATES) for seed in SEEDS[preset]
    ]
    results = everywhere(strained, plans, dict[str, list[Day]])
    areas = {kind: [statistics.fmean(day.auc for day in run[kind]) for run in results] for kind in (*STATES, "sync")}
    for state in STATES:
        ran = [day.summary for run in results for day in run[state]]
        details = {
            "rates": list(rates),
            "decayed": sum(summary.decayed for summary in ran) / sum(summary.batches for summary in ran),
            "staleness_mean": statistics.fmean(summary.staleness_mean for summary in ran),
            "staleness_max": max(summary.staleness_max for summary in ran),
            "steps_per_day": STRAINED_ROWS[preset] // STRAINED_GLOBAL,
            "paper": PAPER_AUC[state],
        }
        name = f"paper.gba_auc.{state}{suffix}"
        yield runner.paired(name, areas[state], areas["sync"], "AUC", at_least=AT_LEAST, details=details)


for _suffix in DRIFTING:
    runner.measures(*(f"paper.gba_auc.{_state}{_suffix}" for _state in STATES))(functools.partial(auc, suffix=_suffix))


# --- Figure 1 ---------------------------------------------------------------------------------------------------------

HOURS = 24
QUIET_HOUR, LEAST_LOAD, MOST_LOAD = 5, 0.2, 0.9
"""The load of the cluster is a cosine between these values, lowest at this hour."""
SLOTS = 4
"""Jobs that a host runs at full speed."""
SHARED_WORKERS = {"smoke": 4, "laptop": 32, "full": 100}
SHARED_BATCHES = {"smoke": 4, "laptop": 100, "full": 400}
"""Of an NN worker, in an hour."""
OTHER_JOBS = 10
"""Batches for which the number of other jobs on a host stays as it is."""


def load(hour: int) -> float:
    """Returns the share of the cluster's slots that other jobs want in an hour of the day."""
    middle, swing = (LEAST_LOAD + MOST_LOAD) / 2, (MOST_LOAD - LEAST_LOAD) / 2
    return middle - swing * math.cos(2 * math.pi * (hour - QUIET_HOUR) / HOURS)


def hour_of(hour: int, workers: int, batches: int) -> Trace:
    """Returns the speeds of NN workers, each on a host with a Poisson number of other jobs."""
    rng = np.random.default_rng(hour)
    jobs = 1 + rng.poisson(load(hour) * SLOTS, (workers, math.ceil(batches / OTHER_JOBS)))
    factors = np.maximum(1.0, jobs / SLOTS)
    return Trace(
        [[Slowdown(float(at * OTHER_JOBS), float(f)) for at, f in enumerate(of)] for of in factors],
        float(factors.shape[1] * OTHER_JOBS),
    )


@runner.measures(*(f"paper.gba_figure1.{kind}" for kind in ("sync", "hybrid", "gba", "async", "async_over_sync")))
def figure1(preset: str) -> Iterator[runner.Measure]:
    """Rates by hour, where only computation takes time."""
    workers, batches = SHARED_WORKERS[preset], SHARED_BATCHES[preset]
    modes: dict[str, Mode] = {
        "sync": Sync(), "hybrid": Hybrid(4, warmup=0), "gba": Gba(workers * LOCAL_BATCH), "async": Async()
    }  # fmt: skip
    settings = [Setting(hour_of(hour, workers, batches), local_batch=LOCAL_BATCH) for hour in range(HOURS)]
    rates = {
        kind: [simulate(mode, setting, workers * batches).summary().rate for setting in settings]
        for kind, mode in modes.items()
    }
    best = max(rate for of in rates.values() for rate in of)
    loads = [load(hour) for hour in range(HOURS)]
    for kind, of in rates.items():
        details = {
            "of": "rate of the slowest hour over that of the fastest",
            "load": loads,
            "by_hour": [rate / best for rate in of],
            "nn_workers": workers,
        }
        yield runner.Measure(f"paper.gba_figure1.{kind}", min(of) / max(of), "ratio", details=details)
    ratios = [a / b for a, b in zip(rates["async"], rates["sync"], strict=True)]
    details = {"of": "rate of Async over that of Sync, the largest of an hour", "by_hour": ratios, "least": min(ratios)}
    yield runner.Measure("paper.gba_figure1.async_over_sync", max(ratios), "ratio", details=details)


# --- Figure 2 ---------------------------------------------------------------------------------------------------------


class Sets(NamedTuple):
    """Learning rates: those that are best for Sync, and those that are best for Async."""

    sync: Rates
    own: Rates


FOUND = {
    "100000_1.05": Sets(Rates(0.009, 0.1), Rates(0.001, 0.05)),
    "500_1.05": Sets(Rates(0.009, 0.2), Rates(0.003, 0.1)),
}
"""As `modes.auc_others` found them."""
PIECES = {"smoke": 4, "laptop": 20, "full": 20}
PIECE_ROWS = {"smoke": 1_024, "laptop": 10_240, "full": 131_072}
WAYS = ("to_async", "to_async_tuned", "to_sync", "to_sync_tuned")
PARTS = {"first": 0, "last": -1}
"""Pieces after the switch that are compared."""


def figure2(preset: str, *, data: str, direction: str) -> Iterator[runner.Measure]:
    """AUC after a switch less that of a run which stays in its mode."""
    if preset == "smoke" and data not in list(FOUND)[:1]:
        return
    sets = FOUND[data]
    sync, own = Way(Sync(), sets.sync), Way(Async(), sets.own)
    before, after = (sync, own) if direction == "to_async" else (own, sync)
    ways = {"stay": before, direction: Way(after.mode, before.rates), f"{direction}_tuned": after}
    ids, zipf = DATA[data]
    plans = [Continued(ids, zipf, seed, PIECE_ROWS[preset], PIECES[preset], before, ways) for seed in SEEDS[preset]]
    results = everywhere(continued, plans, dict[str, list[float]])
    curves = {
        kind: [round(statistics.fmean(areas), 5) for areas in zip(*(run[kind] for run in results), strict=True)]
        for kind in ("base", *ways)
    }
    for way in (direction, f"{direction}_tuned"):
        for part, at in PARTS.items():
            yield runner.paired(
                f"paper.gba_figure2.{data}.{way}.{part}",
                [run[way][at] for run in results],
                [run["stay"][at] for run in results],
                "AUC",
                details={"rates": list(ways[way].rates), "rates_before": list(before.rates), "areas": curves},
            )


for _data in FOUND:
    for _direction in ("to_async", "to_sync"):
        _names = (
            f"paper.gba_figure2.{_data}.{_direction}{_tuned}.{_part}" for _tuned in ("", "_tuned") for _part in PARTS
        )
        runner.measures(*_names)(functools.partial(figure2, data=_data, direction=_direction))
