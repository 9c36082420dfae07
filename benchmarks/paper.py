"""Tables of the papers, repeated in virtual time: Persia's Table 2 (arXiv 2111.05897) and GBA's Table 5.3 (2205.11048).

    python -m benchmarks 'paper.table2.*' [--preset smoke|laptop|full] [--json FILE]

No figure here depends on the speed of the machine: what happens when is simulated (persia.replay), gradients are
real (persia.replay.virtual). Runs are spread over the cores, and kept in the file of PERSIA_RUNS.

paper.table2.DATA.NETWORK.*
    Test AUC after one pass less Sync's, paired by seed. 4 NN workers with local batches of 256; a lookup and a push
    take a quarter of a batch's time each; a fifth of the rows, at random, are for tests. The paper does not say how
    it splits. What a delay costs on data in time order is the question of `modes.globo.*`.
    DATA      globo (needs globo_ctr), the shapes of Taobao, Avazu and Criteo (benchmarks/shapes.py), and the files of
              those sets where PERSIA_DATA has them (benchmarks/public_files.py), as taobao_file, avazu_file and
              criteo_file.
    NETWORK   ffnn (256-128) and deepfm (256-128).
    hybrid_4, hybrid_auto, hybrid_4_cold, hybrid_auto_cold, async
              with the rates that are the best of a grid for Sync, found with a separate seed; "cold" is without the
              warm-up, which is otherwise the default one of 500 steps.
    async_own
              with those that are the best for Async.

    An estimate for two idle cores: each data set and network takes 15 (globo) to 40 minutes (criteo) with the preset
    laptop, and half an hour to 3 hours with the preset full, which needs 8 GB of memory for each process.

paper.gba_excluded.STATE.*
    Share of batches that a mode excludes, and its staleness, in three states of a cluster.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterator, Mapping

import numpy as np

from benchmarks import runner
from benchmarks.modes_runs import FIRST, TUNING_SEED, Rates, best_rates, everywhere
from benchmarks.paper_runs import FILES, LOCAL, NETWORKS, SOURCES, WORKERS, Outcome, Run, train_and_test
from benchmarks.public_data import is_here
from persia.modes import Async, Bsp, Gba, HopBs, HopBw, Hybrid, Mode, Sync
from persia.replay import Setting, Slowdown, Trace, simulate

SEEDS = {"smoke": (0,), "laptop": (0, 1, 2, 3, 4), "full": (0, 1, 2, 3, 4)}
ROWS = {"smoke": 2_048, "laptop": 3_000_000, "full": 12_000_000}
"""Rows of both parts; globo has 5.8 million."""
KINDS = ("hybrid_4", "hybrid_auto", "hybrid_4_cold", "hybrid_auto_cold", "async", "async_own")
TARGETS = {"hybrid_4": -0.001, "hybrid_auto": -0.0005}
"""Least lower end of the interval, by mode."""
PAPER = {
    "taobao": {"hybrid": 0.6586, "sync": 0.6593, "async": 0.6566},
    "avazu": {"hybrid": 0.7793, "sync": 0.7802, "async": 0.7710},
    "criteo": {"hybrid": 0.8047, "sync": 0.8051, "async": 0.8001},
}
"""AUC in Table 2; Sync and Async are XDL's."""


# --- Persia, Table 2 --------------------------------------------------------------------------------------------------


def tuned(preset: str, source: str, network: str, mode: Mode, start: Rates) -> Rates:
    """Returns the rates with the best test AUC of a mode, with a seed that no other run has; `start` in smoke runs.

    Generated rows depend on the seed. Those of a file are the same, split anew: the rates have seen test rows of the
    other seeds.
    """
    if preset == "smoke":
        return start

    def score(grid: list[Rates]) -> list[float]:
        plans = [Run(source, network, mode, rates, TUNING_SEED, ROWS[preset]) for rates in grid]
        return [outcome.auc for outcome in everywhere(train_and_test, plans, Outcome)]

    return best_rates(score, start=start)


def outcomes(
    preset: str, source: str, network: str, modes: Mapping[str, Mode], rates: Rates
) -> dict[str, list[Outcome]]:
    """Returns the outcome with each seed, by the names of the modes."""
    plans = [Run(source, network, mode, rates, seed, ROWS[preset]) for seed in SEEDS[preset] for mode in modes.values()]
    results = everywhere(train_and_test, plans, Outcome)
    return {kind: results[at :: len(modes)] for at, kind in enumerate(modes)}


def facts(source: str, rates: Rates, ours: list[Outcome], sync: list[Outcome]) -> dict[str, object]:
    """Returns what a line says about runs that are compared with Sync's, besides their AUC."""
    summaries = [one.summary for one in ours]
    return {
        "rates": list(rates),
        "train_rows": ours[0].train_rows,
        "test_rows": ours[0].test_rows,
        "global_steps": ours[0].train_rows // (WORKERS * LOCAL),
        "row_staleness_mean": statistics.fmean(one.row_staleness_mean for one in summaries),
        "row_staleness_max": max(one.row_staleness_max for one in summaries),
        "dense_staleness_mean": statistics.fmean(one.staleness_mean for one in summaries),
        "rate_of_sync": statistics.fmean(
            one.summary.rate / other.summary.rate for one, other in zip(ours, sync, strict=True)
        ),
        "paper": PAPER.get(source.removesuffix("_file")),
    }


def table2(preset: str, *, source: str, network: str) -> Iterator[runner.Measure]:
    """Test AUC less Sync's with one network on one data set."""
    if source in FILES and not is_here(FILES[source]):
        return
    shared = tuned(preset, source, network, Sync(), FIRST)
    modes = {
        "sync": Sync(),
        "hybrid_4": Hybrid(4),
        "hybrid_auto": Hybrid("auto"),
        "hybrid_4_cold": Hybrid(4, warmup=0),
        "hybrid_auto_cold": Hybrid("auto", warmup=0),
        "async": Async(),
    }
    results = outcomes(preset, source, network, modes, shared)
    own = tuned(preset, source, network, Async(), shared)
    results |= outcomes(preset, source, network, {"async_own": Async()}, own)
    sync = results.pop("sync")
    for kind, ours in results.items():
        yield runner.paired(
            f"paper.table2.{source}.{network}.{kind}",
            [one.auc for one in ours],
            [one.auc for one in sync],
            "AUC",
            at_least=TARGETS.get(kind),
            details=facts(source, own if kind == "async_own" else shared, ours, sync),
        )


for _source in SOURCES:
    for _network in NETWORKS:
        _names = (f"paper.table2.{_source}.{_network}.{_kind}" for _kind in KINDS)
        runner.measures(*_names)(functools.partial(table2, source=_source, network=_network))


# --- GBA, Table 5.3 ---------------------------------------------------------------------------------------------------

NN_WORKERS = {"smoke": 16, "laptop": 400, "full": 400}
LOCAL_BATCH = 1_024
STEPS = {"smoke": 20, "laptop": 100, "full": 400}
"""Global steps that are simulated."""
STATES = {"strained": (23 / 78, 3e-3), "busy": (15 / 90, 1e-3), "quiet": (12 / 99, 3e-4)}
"""Standard deviation of the NN workers' speeds over their mean, from the table's local QPS of Async; and the
probability that a batch stalls, which is assumed."""
STALL = (8.0, 50.0)
"""Factors of a stall."""
PAPER_EXCLUDED = {
    "strained": {"hop_bw": 300_000, "gba": 1_454},
    "busy": {"hop_bw": 300_000, "gba": 898},
    "quiet": {"hop_bw": 300_000, "gba": 786},
}
"""Excluded batches in Table 5.3, which does not give their total."""
PAPER_STALENESS = {
    "strained": {"hop_bs": (0.06, 2), "gba": (0.21, 11), "bsp": (2.61, 12)},
    "busy": {"hop_bs": (0.04, 2), "gba": (0.15, 11), "bsp": (1.92, 12)},
    "quiet": {"hop_bs": (0.03, 2), "gba": (0.12, 9), "bsp": (1.62, 10)},
}
"""Mean and maximum staleness there."""


def compared(workers: int) -> dict[str, Mode]:
    """Returns the modes of Table 5.3 in its proportions: M = N, iota = 4, b1 = 2, b2 = N / 8, b3 = N / 4."""
    return {
        "hop_bw": HopBw(workers // 4),
        "gba": Gba(workers * LOCAL_BATCH, tolerance=4),
        "hop_bs": HopBs(2),
        "bsp": Bsp(workers // 8),
    }


def cluster(workers: int, deviation: float, stalls: float, count: int, seed: int = 0) -> Trace:
    """Returns a trace in which each batch of an NN worker has a different speed.

    Args:
        workers: number of NN workers.
        deviation: standard deviation of speeds over their mean; they are log-normal.
        stalls: probability of a stall, for each batch.
        count: number of batches of each NN worker until the trace repeats.
        seed: seed of the random choice.
    """
    rng = np.random.default_rng(seed)
    slower = rng.lognormal(0.0, np.log1p(deviation**2) ** 0.5, (workers, count))
    stalled = rng.random(slower.shape) < stalls
    slower = np.where(stalled, np.exp(rng.uniform(*np.log(STALL), slower.shape)), slower)
    starts = np.cumsum(slower, axis=1) - slower
    period = float(slower.sum(axis=1).min())
    drawn = [
        [Slowdown(float(s), float(f)) for s, f in zip(*parts, strict=True) if s < period]
        for parts in zip(starts, slower, strict=True)
    ]
    return Trace(drawn, period)


@runner.measures(*(f"paper.gba_excluded.{state}.{kind}" for state in STATES for kind in compared(8)))
def gba_excluded(preset: str) -> Iterator[runner.Measure]:
    """Share of batches excluded: dropped by Hop-BW, or of weight 0 in Gba.

    Staleness counts updates of the dense parameters between pull and apply. An update of Hop-BS is one gradient, so
    its staleness is also given in rounds of N of them; the paper seems to count those.
    """
    workers = NN_WORKERS[preset]
    for state, (deviation, stalls) in STATES.items():
        setting = Setting(cluster(workers, deviation, stalls, 2 * STEPS[preset]), local_batch=LOCAL_BATCH)
        summaries = {
            kind: simulate(mode, setting, workers * STEPS[preset]).summary() for kind, mode in compared(workers).items()
        }
        for kind, summary in summaries.items():
            excluded = summary.dropped + summary.decayed
            details = {
                "excluded": excluded,
                "batches": summary.batches,
                "staleness_mean": summary.staleness_mean,
                "staleness_max": summary.staleness_max,
                "rows_per_virtual_s": summary.rate,
                "paper_excluded": PAPER_EXCLUDED[state].get(kind),
                "paper_staleness": PAPER_STALENESS[state].get(kind),
            }
            if kind == "hop_bs":
                details["staleness_rounds"] = summary.staleness_mean / workers
            name = f"paper.gba_excluded.{state}.{kind}"
            yield runner.Measure(name, excluded / summary.batches, "fraction", details=details)
