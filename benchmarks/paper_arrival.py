"""Algorithm 1 of the Persia paper (arXiv 2111.05897) as printed, in virtual time: rows are updated on arrival.

    python -m benchmarks 'paper.arrival.*' [--preset smoke|laptop|full] [--json FILE]

`Hybrid(..., combine=False)`: N NN workers update rows N times per step. Rows stay as their lookup has found them. How
runs are made: benchmarks/paper.py; each is kept in the file of PERSIA_RUNS, so that a line can be continued.

paper.arrival.table2.DATA.NETWORK.cold, paper.arrival.table2.DATA.NETWORK.warm
    `Hybrid(4, combine=False)` as in `paper.table2.DATA.NETWORK.*`, at the rates that it has found for Sync: without a
    warm-up, and with one over half of the run. With the preset laptop a run has as many rows as in `fresh.replay.DATA`,
    whose `quarter.hybrid_4` is the same without a warm-up, but with the gradients of a step combined.
paper.arrival.figure6.on_arrival, paper.arrival.figure6.combined, paper.arrival.figure6.async
    As `paper.figure6`, simulated: time to the test AUC that Sync has after three quarters of the data, the time of Sync
    over that of the kind, geometric mean over seeds; 0 if the kind does not reach it with every seed. A lookup and a
    push take half of a batch's time each. `curves` has AUC by time.
paper.arrival.figure6.KIND_auc
    AUC of the kind less Sync's at the end, after the same rows.

With the preset laptop, a line of table 2 takes 2 minutes of one core, and figure 6 takes 4.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterator
from typing import NamedTuple

from benchmarks import runner
from benchmarks.modes_runs import FIRST, Curve, Plan, Rates, everywhere, seconds_to, train_through_along
from benchmarks.paper import PAPER, SEEDS, TARGETS, cluster
from benchmarks.paper_runs import FILES, LOCAL, WORKERS, Outcome, Run, train_and_test
from benchmarks.public_data import is_here
from persia.modes import Async, Hybrid, Mode, Sync
from persia.replay import Setting, simulate

RATES = {
    ("globo", "ffnn"): Rates(0.001, 0.8),
    ("globo", "deepfm"): Rates(0.001, 0.2),
    ("taobao", "ffnn"): Rates(0.009, 0.025),
    ("taobao", "deepfm"): Rates(0.001, 0.05),
    ("avazu", "ffnn"): Rates(0.001 / 3, 0.2),
    ("avazu", "deepfm"): Rates(0.001, 0.05),
    ("criteo", "ffnn"): Rates(0.001 / 3, 0.4),
    ("criteo", "deepfm"): Rates(0.001, 0.025),
}
"""The best ones of Sync, as `paper.table2` found them with the preset laptop."""
ROWS = {"smoke": 2_048, "laptop": 500_000, "full": 3_000_000}
"""Rows of both parts."""
TRAINED = 0.8
"""Share of them that is for training."""
KINDS = ("cold", "warm")
SMOKE = ("taobao", "ffnn")
"""The only case of a smoke run."""


# --- Table 2 ----------------------------------------------------------------------------------------------------------


def table2(preset: str, *, source: str, network: str, kind: str) -> Iterator[runner.Measure]:
    """Test AUC less Sync's, paired by seed."""
    if preset == "smoke" and (source, network) != SMOKE:
        return
    if source in FILES and not is_here(FILES[source]):
        return
    rates, rows = RATES[source, network], ROWS[preset]
    steps = round(rows * TRAINED) // (WORKERS * LOCAL)
    arrival = Hybrid(4, combine=False, warmup=steps // 2 if kind == "warm" else 0)
    plans = [Run(source, network, mode, rates, seed, rows) for seed in SEEDS[preset] for mode in (Sync(), arrival)]
    results = everywhere(train_and_test, plans, Outcome)
    sync, ours = results[::2], results[1::2]
    yield runner.paired(
        f"paper.arrival.table2.{source}.{network}.{kind}",
        [one.auc for one in ours],
        [one.auc for one in sync],
        "AUC",
        at_least=TARGETS["hybrid_4"],
        details={
            "rates": list(rates),
            "train_rows": ours[0].train_rows,
            "global_steps": ours[0].train_rows // (WORKERS * LOCAL),
            "batches_missed_mean": statistics.fmean(one.summary.row_staleness_mean for one in ours),
            "batches_missed_max": max(one.summary.row_staleness_max for one in ours),
            "rate_of_sync": statistics.fmean(
                one.summary.rate / other.summary.rate for one, other in zip(ours, sync, strict=True)
            ),
            "paper": PAPER.get(source),
        },
    )


for _source, _network in RATES:
    for _kind in KINDS:
        runner.measures(f"paper.arrival.table2.{_source}.{_network}.{_kind}")(
            functools.partial(table2, source=_source, network=_network, kind=_kind)
        )


# --- Figure 6 ---------------------------------------------------------------------------------------------------------

FIGURE_6: dict[str, Mode] = {
    "sync": Sync(),
    "on_arrival": Hybrid("auto", combine=False, warmup=0),
    "combined": Hybrid("auto", warmup=0),
    "async": Async(),
}
PIECES = {"smoke": 4, "laptop": 12, "full": 24}
PIECE_ROWS = {"smoke": 1_024, "laptop": 32_768, "full": 65_536}
NETWORK_LATENCY = 0.5
"""Of a lookup, and of a push, in compute times of a batch."""
JITTER = 0.2
"""Standard deviation of the NN workers' speeds over their mean."""
TRACE_BATCHES = 256
"""Of each NN worker until its speeds repeat."""


class Learning(NamedTuple):
    """One run: the mode, the seed, the number of points of the curve, and the rows between two points."""

    mode: Mode
    seed: int
    pieces: int
    rows: int


def learned(learning: Learning) -> Curve:
    """Trains through, and tests after each piece."""
    plan = Plan((learning.mode,) * learning.pieces, FIRST, learning.seed, learning.rows, local=LOCAL, ids=100_000)
    trace = cluster(WORKERS, JITTER, 0.0, TRACE_BATCHES, learning.seed)
    setting = Setting(trace, local_batch=LOCAL, lookup=NETWORK_LATENCY, push=NETWORK_LATENCY)
    timeline = simulate(learning.mode, setting, learning.pieces * (learning.rows // LOCAL))
    return train_through_along(plan, timeline)


@runner.measures(
    *(f"paper.arrival.figure6.{kind}{part}" for kind in FIGURE_6 if kind != "sync" for part in ("", "_auc"))
)
def figure6(preset: str) -> Iterator[runner.Measure]:
    """Time to a given AUC, and AUC at the end."""
    pieces, seeds = PIECES[preset], SEEDS[preset]
    plans = [Learning(mode, seed, pieces, PIECE_ROWS[preset]) for seed in seeds for mode in FIGURE_6.values()]
    results = everywhere(learned, plans, Curve)
    curves = {kind: results[at :: len(FIGURE_6)] for at, kind in enumerate(FIGURE_6)}
    goals = [curve.areas[pieces * 3 // 4 - 1] for curve in curves["sync"]]

    times = {
        kind: [seconds_to(zip(c.ends, c.areas, strict=True), goal) for c, goal in zip(of, goals, strict=True)]
        for kind, of in curves.items()
    }
    for kind in FIGURE_6:
        if kind == "sync":
            continue
        details = {
            "of": "virtual time of Sync over that of the mode",
            "times": times,
            "curves": {
                name: {
                    "seconds": [statistics.fmean(ends) for ends in zip(*(c.ends for c in of), strict=True)],
                    "auc": [statistics.fmean(areas) for areas in zip(*(c.areas for c in of), strict=True)],
                }
                for name, of in curves.items()
            },
            "rates": list(FIRST),
        }
        name = f"paper.arrival.figure6.{kind}"
        sync, ours = ([time for time in times[of] if time is not None] for of in ("sync", kind))
        if len(ours) == len(sync):
            yield runner.paired_ratio(name, sync, ours, at_least=1.0, details=details)
        else:
            yield runner.Measure(name, 0.0, "ratio", at_least=1.0, details=details)
        areas = [[curve.areas[-1] for curve in curves[of]] for of in (kind, "sync")]
        yield runner.paired(f"{name}_auc", *areas, "AUC", details={"rates": list(FIRST)})
