"""Cost of rows that are looked up ahead, in virtual time: as the lookup has found them, or refreshed until their use.

    python -m benchmarks 'fresh.replay.*' [--preset smoke|laptop|full] [--json FILE]

No figure here depends on the speed of the machine: what happens when is simulated (persia.replay), gradients are
real (persia.replay.virtual). Runs are spread over the cores, and kept in the file of PERSIA_RUNS. The preset laptop
takes about 30 minutes of one core.

fresh.replay.DATA.LATENCY.KIND
    AUC less Sync's, paired by seed, at Sync's rates. No mode has a warm-up.
    DATA      100000_1.05, 100000_0.7, 500_1.05
                  ids of each of 8 features, and the exponent of how often they occur; 8 NN workers, two of them 4 times
                  slower; the mean of the AUCs after each of 8 days
              globo, taobao, avazu, criteo
                  the shapes of `paper.table2`, DeepFM; 4 NN workers that are slow at random; the AUC of test rows
              globo_in_order
                  the stream of `modes.globo`; 4 NN workers that are slow in turns; the progressive AUC
              Those of globo need globo_ctr.
    LATENCY   quarter, whole: of a lookup, and of a push, in compute times of a batch.
    KIND      hybrid_1, hybrid_4, hybrid_16
                  rows are as their lookup has found them
              hybrid_1_refresh, hybrid_4_refresh, hybrid_16_refresh
                  rows are those of the moment of use, less the latency of a lookup
              sync_ahead
                  the same for Sync: lookups run ahead, and a batch waits for the updates of all steps before it
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterator

from benchmarks import runner
from benchmarks.fresh_runs import DATA, KINDS, LATENCIES, Case, Learned, learned
from benchmarks.modes_runs import everywhere
from benchmarks.public_data import is_here

SEEDS = {"smoke": (0,), "laptop": (0, 1, 2, 3, 4), "full": (0, 1, 2, 3, 4)}
ROWS = {
    "stationary": {"smoke": 8_192, "laptop": 262_144, "full": 262_144},
    "shape": {"smoke": 2_048, "laptop": 500_000, "full": 3_000_000},
    "stream": {"smoke": 10_240, "laptop": 524_288, "full": 2_500_000},
}
SMOKE = ("500_1.05", "avazu", "globo_in_order")
"""One data set of each kind: the only ones of a smoke run."""
SPARSE = ("100000_1.05", "100000_0.7")
TARGET = -0.0005
"""Least lower end of the interval of a depth of 4 with refreshed rows, on sparse ids."""


def replay(preset: str, *, data: str) -> Iterator[runner.Measure]:
    """AUC less Sync's on one data set."""
    if preset == "smoke" and data not in SMOKE:
        return
    if data.startswith("globo") and not is_here("globo_ctr"):
        return
    source = DATA[data]
    rows = ROWS[source.kind][preset]
    runs = everywhere(learned, [Case(data, seed, rows) for seed in SEEDS[preset]], dict[str, Learned])
    for latency in LATENCIES:
        sync = [run[f"{latency}.sync"] for run in runs]
        for kind in KINDS:
            if kind == "sync":
                continue
            ours = [run[f"{latency}.{kind}"] for run in runs]
            bounds = {"at_least": 0.0, "at_most": 0.0} if kind == "sync_ahead" else {}
            if kind == "hybrid_4_refresh" and data in SPARSE:
                bounds = {"at_least": TARGET}
            yield runner.paired(
                f"fresh.replay.{data}.{latency}.{kind}",
                [statistics.fmean(one.areas) for one in ours],
                [statistics.fmean(one.areas) for one in sync],
                "AUC",
                **bounds,
                details={
                    "rows": rows,
                    "rates": list(source.rates),
                    **_by_day(ours, sync),
                    "row_staleness_mean": statistics.fmean(one.summary.row_staleness_mean for one in ours),
                    "row_staleness_max": max(one.summary.row_staleness_max for one in ours),
                    "rate_of_sync": statistics.fmean(
                        one.summary.rate / other.summary.rate for one, other in zip(ours, sync, strict=True)
                    ),
                },
            )


def _by_day(ours: list[Learned], sync: list[Learned]) -> dict[str, list[float]]:
    """Returns the difference after each day, mean over the seeds; nothing if there is one AUC."""
    gaps = [[a - b for a, b in zip(one.areas, other.areas, strict=True)] for one, other in zip(ours, sync, strict=True)]
    days = [round(statistics.fmean(day), 5) for day in zip(*gaps, strict=True)]
    return {"per_day": days} if len(days) > 1 else {}


for _data in DATA:
    _names = (
        f"fresh.replay.{_data}.{_latency}.{_kind}" for _latency in LATENCIES for _kind in KINDS if _kind != "sync"
    )
    runner.measures(*_names)(functools.partial(replay, data=_data))
