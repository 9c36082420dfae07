"""Figures 6 and 9 of the Persia paper (arXiv 2111.05897): Sync, Hybrid and Async on real roles.

    python -m benchmarks 'paper.figure*' [--preset smoke|laptop|full] [--json FILE]

NN workers wait instead of computing, so that several fit on few cores; everything else is real. Hybrid is "auto"
without a warm-up.

paper.figure6    Seconds to the test AUC that Sync has after three quarters of the data: the fewer ones of Sync and
                 Async over those of Hybrid, geometric mean over seeds. NN workers are threads, and lookups and pushes
                 take time as on a network. `curves` has AUC by seconds.
paper.figure9_modes.hybrid_vs_sync, paper.figure9_modes.async_vs_hybrid
                 Ratios of samples/s on Ray, where all processes share a link of known rate (a network namespace whose
                 loopback is limited by `tc tbf`), by the rate of the link. No target.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence

import msgspec

from benchmarks import runner
from benchmarks.compressed.network import ShapedNetwork
from benchmarks.modes_runs import everywhere, seconds_to
from benchmarks.paper_figures_runs import MODES, Curve, CurvePlan, SpeedPlan, Speeds, learn, rates

SEEDS = {"smoke": (0,), "laptop": (0, 1, 2, 3, 4), "full": (0, 1, 2, 3, 4)}
PIECES = {"smoke": 2, "laptop": 12, "full": 24}
PIECE_ROWS = {"smoke": 1_024, "laptop": 65_536, "full": 65_536}
TEST_ROWS = {"smoke": 1_024, "laptop": 32_768, "full": 65_536}
COMPUTE = {"smoke": 0.01, "laptop": 0.08, "full": 0.08}
"""Seconds; the network takes half as long for a lookup, and for a push."""
JITTER = 0.2
WORKERS, LOCAL = 4, 256
LR, NETWORK_LR = 0.1, 3e-3


@runner.measures("paper.figure6")
def figure6(preset: str) -> runner.Measure:
    """Time to a given AUC."""
    seconds = COMPUTE[preset]
    plans = {
        (kind, seed): CurvePlan(
            kind, seed, WORKERS, LOCAL, PIECES[preset], PIECE_ROWS[preset], TEST_ROWS[preset],
            seconds, JITTER, seconds / 2, LR, NETWORK_LR,
        )
        for seed in SEEDS[preset]
        for kind in MODES
    }  # fmt: skip
    curves = dict(zip(plans, everywhere(learn, list(plans.values()), Curve, processes=1), strict=True))
    times: dict[str, list[float | None]] = {kind: [] for kind in MODES}
    hybrid, faster = [], []
    for seed in SEEDS[preset]:
        goal = curves["sync", seed].auc[PIECES[preset] * 3 // 4 - 1]
        reached = {kind: seconds_to(points_of(curves[kind, seed]), goal) for kind in MODES}
        for kind, time in reached.items():
            times[kind].append(time)
        needed = {kind: math.inf if time is None else time for kind, time in reached.items()}
        hybrid.append(needed.pop("hybrid"))
        faster.append(min(needed.values()))
    details = {
        "of": "seconds, the faster of Sync and Async over Hybrid",
        "seconds_to_auc": times,
        "curves": {kind: mean_curve([curves[kind, seed] for seed in SEEDS[preset]]) for kind in MODES},
        "nn_workers": WORKERS,
        "seconds_of_a_batch": [seconds, JITTER],
        "seconds_of_a_lookup_and_of_a_push": seconds / 2,
        "rates": [NETWORK_LR, LR],
    }
    return runner.paired_ratio("paper.figure6", faster, hybrid, at_least=1.0, details=details)


def points_of(curve: Curve) -> Iterator[tuple[float, float]]:
    """Returns seconds and AUC of each point."""
    return zip(curve.seconds, curve.auc, strict=True)


def mean_curve(curves: Sequence[Curve]) -> dict[str, list[float]]:
    """Returns the means over seeds, point by point."""
    return {
        "seconds": [round(statistics.fmean(point), 2) for point in zip(*(c.seconds for c in curves), strict=True)],
        "auc": [round(statistics.fmean(point), 5) for point in zip(*(c.auc for c in curves), strict=True)],
        "staleness": [round(c.staleness, 2) for c in curves],
    }


GBIT = {"smoke": (None,), "laptop": (0.1, 0.2, 0.4), "full": (0.1, 0.2, 0.4, 0.8)}
STEPS = {"smoke": 5, "laptop": 100, "full": 300}
ROUNDS = {"smoke": 1, "laptop": 5, "full": 9}
SPEED_COMPUTE = {"smoke": 0.01, "laptop": 0.06, "full": 0.06}


@runner.measures("paper.figure9_modes.hybrid_vs_sync", "paper.figure9_modes.async_vs_hybrid")
def figure9(preset: str) -> Iterator[runner.Measure]:
    """Samples/s by the rate of the link; the values belong to the middle rate."""
    small = preset == "smoke"
    if not small and not ShapedNetwork.allowed():
        print("paper.figure9_modes is skipped: no rights for network namespaces.", file=sys.stderr)
        return
    plans = [
        SpeedPlan(gbit, 2, LOCAL, STEPS[preset], ROUNDS[preset], SPEED_COMPUTE[preset], JITTER, not small)
        for gbit in GBIT[preset]
    ]
    speeds = dict(zip(GBIT[preset], everywhere(shaped_rates, plans, Speeds, processes=1), strict=True))
    middle = GBIT[preset][len(GBIT[preset]) // 2]
    for ours, theirs in (("hybrid", "sync"), ("async", "hybrid")):
        ratios = {
            gbit: [a / b for a, b in zip(one.rates[ours], one.rates[theirs], strict=True)]
            for gbit, one in speeds.items()
        }
        details = {
            "of": "rows/s",
            "by_gbit": {str(gbit): statistics.median(each) for gbit, each in ratios.items()},
            "rows_per_s": {
                str(gbit): {kind: statistics.median(each) for kind, each in one.rates.items()}
                for gbit, one in speeds.items()
            },
            "dense_bytes": speeds[middle].dense_bytes,
            "seconds_of_a_batch": [SPEED_COMPUTE[preset], JITTER],
        }
        name = f"paper.figure9_modes.{ours}_vs_{theirs}"
        if small:
            yield runner.Measure(name, ratios[middle][0], "ratio", details=details)
        else:
            yield runner.quantity(name, ratios[middle], "ratio", details=details)


def shaped_rates(plan: SpeedPlan) -> Speeds:
    """Runs a plan in a namespace whose loopback has its rate; here if it has none."""
    if plan.gbit is None:
        return rates(plan)
    with shaped_loopback(plan.gbit) as name:
        done = subprocess.run(
            ["ip", "netns", "exec", name, sys.executable, "-m", "benchmarks.paper_figures_runs",
             msgspec.json.encode(plan).decode()],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    if done.returncode:
        raise OSError(f"The run at {plan.gbit} Gbit/s failed:\n{done.stderr[-4000:]}")
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Speeds)


@contextlib.contextmanager
def shaped_loopback(gbit: float) -> Iterator[str]:
    """Makes a network namespace whose processes reach each other at this rate, all together, and yields its name."""
    name = f"persia-bench-{secrets.token_hex(4)}"

    def run(*command: str) -> None:
        subprocess.run(command, check=True, capture_output=True, timeout=20)

    run("ip", "netns", "add", name)
    try:
        run("ip", "-n", name, "link", "set", "lo", "up")
        run("tc", "-n", name, "qdisc", "replace", "dev", "lo", "root", "tbf", "rate", f"{int(gbit * 1e9)}bit",
            "burst", "160000", "latency", "500ms")  # fmt: skip
        yield name
    finally:
        run("ip", "netns", "del", name)
