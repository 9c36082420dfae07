"""Table 2 of the Persia paper (arXiv 2111.05897) with rows that are refreshed until their use, in virtual time.

    python -m benchmarks 'paper.table2.*.fresh' [--preset smoke|laptop|full] [--json FILE]

paper.table2.DATA.NETWORK.fresh
    As `paper.table2.DATA.NETWORK.hybrid_4_cold` of benchmarks/paper.py, at the rates that it has found for Sync: no
    warm-up. But rows are refreshed, which is the default of `Hybrid`. Any depth of 1 or more gives the same bits then
    (`fresh.replay.*` has 1, 4 and 16), so this is `Hybrid("auto")` as well.

Runs are spread over the cores, and kept in the file of PERSIA_RUNS. The preset laptop takes about an hour of two cores.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from benchmarks import runner
from benchmarks.modes_runs import everywhere
from benchmarks.paper import ROWS, SEEDS, TARGETS, facts
from benchmarks.paper_arrival import RATES, SMOKE
from benchmarks.paper_runs import FILES, LOCAL, Outcome, Run, dataset, setting, train_along, train_and_test
from benchmarks.public_data import is_here
from persia.modes import Hybrid, Sync
from persia.replay import simulate

FRESH = Hybrid(4, warmup=0)


def train_fresh(run: Run) -> Outcome:
    """Trains and tests as `train_and_test`, with rows that are refreshed."""
    rows = dataset(run.source, run.rows, run.seed)
    timeline = simulate(run.mode, setting(run.seed), len(rows.train) // LOCAL, refresh=True)
    return train_along(run, timeline)


def table2(preset: str, *, source: str, network: str) -> Iterator[runner.Measure]:
    """Test AUC less Sync's, paired by seed."""
    if preset == "smoke" and (source, network) != SMOKE:
        return
    if source in FILES and not is_here(FILES[source]):
        return
    rates = RATES[source, network]
    plans = [
        Run(source, network, mode, rates, seed, ROWS[preset]) for mode in (Sync(), FRESH) for seed in SEEDS[preset]
    ]
    seeds = len(SEEDS[preset])
    sync, ours = everywhere(train_and_test, plans[:seeds], Outcome), everywhere(train_fresh, plans[seeds:], Outcome)
    yield runner.paired(
        f"paper.table2.{source}.{network}.fresh",
        [one.auc for one in ours],
        [one.auc for one in sync],
        "AUC",
        at_least=TARGETS["hybrid_4"],
        details=facts(source, rates, ours, sync),
    )


for _source, _network in RATES:
    runner.measures(f"paper.table2.{_source}.{_network}.fresh")(
        functools.partial(table2, source=_source, network=_network)
    )
