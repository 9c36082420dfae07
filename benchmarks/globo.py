"""Speed and progressive AUC on globo_ctr, one pass, against a plain PyTorch script of the same model.

    python -m benchmarks 'globo.*' [--preset smoke|laptop|full] [--json FILE]

Needs globo_ctr, which `python -m persia.data.datasets.prepare_globo` makes; without it every measure is skipped.
`globo.modes.*` puts the modes side by side: this stream punishes every batch of delay.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from benchmarks import runner
from benchmarks.baselines import globo_torch
from benchmarks.elsewhere import AS_A_PROGRAM, Elsewhere
from benchmarks.gba_runs import best_rate
from benchmarks.modes_runs import TUNING_SEED, everywhere
from benchmarks.public_data import is_here
from persia import Trainer, TrainerOptions, data
from persia.modes import Hybrid, Mode, Sync
from persia.nn.models import FFNN
from persia.optim import Adagrad
from persia.services import Cluster

SEEDS = {"smoke": (0,), "laptop": (0, 1, 2), "full": (0, 1, 2)}
SPEED_ROWS = {"smoke": 10_240, "laptop": 1_000_000, "full": 1_000_000}
BESIDE_ROWS = 200_000
"""At most so many rows beside other processes."""
ROUNDS = {"smoke": 1, "laptop": 7, "full": 7}
CANDIDATES: dict[str, Mode] = {
    "sync": Sync(),
    **{f"hybrid_{n}": Hybrid(n, warmup=0) for n in (1, 4, 8)},  # type: ignore[arg-type]
    "auto": Hybrid("auto", warmup=0),
}
LEAST = {"hybrid_1": -0.008, "hybrid_4": -0.008, "hybrid_8": -0.008, "auto": -0.001}
"""AUC less Sync's, at the lower end of the interval, where rows are refreshed until their use."""

MODE_SEEDS = {"smoke": (0,), "laptop": (0, 1, 2, 3, 4), "full": (0, 1, 2, 3, 4)}
TUNING_ROWS = {"laptop": 1_500_000, "full": 1_500_000}
START_RATE = 0.1
AUC_ROWS = {"smoke": 10_240, "laptop": None, "full": None}


THREADS = torch.get_num_threads()
"""Number that torch has chosen; a `Trainer` sets another one."""


class Pass(NamedTuple):
    """A pass over the data, or over its first rows."""

    mode: Mode
    seed: int
    rows: int | None
    optimizer: Adagrad


class Run(NamedTuple):
    """Result of a pass."""

    rows_per_second: float
    auc: float
    per_day: tuple[float, ...]
    staleness: float


SCRIPT = Adagrad(lr=0.2, initial_accumulator=0.01)
"""Optimizer of the PyTorch script."""


def persia_run(
    mode: Mode, seed: int, rows: int | None, optimizer: Adagrad = SCRIPT, cluster: Cluster | None = None
) -> Run:
    reader = data.globo(batch_size=globo_torch.BATCH)
    torch.manual_seed(seed)
    trainer = Trainer(
        FFNN(reader.schema, hidden=(256, 128), products=[("article_id", "history")]),
        reader.schema,
        optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-3, fused=True),
        embedding_optimizer=optimizer,
        mode=mode,
        cluster=cluster,
        options=TrainerOptions(seed=seed, device="cpu", progress=False),
    )
    result = trainer.fit(reader, max_steps=None if rows is None else rows // globo_torch.BATCH)
    days = tuple(result.progressive.auc_per_day.values())
    return Run(result.rows_per_second, statistics.fmean(days), days, result.staleness_mean)


def one_pass(plan: Pass) -> Run:
    return persia_run(*plan)


def torch_run(seed: int, rows: int | None) -> Run:
    threads = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        result: dict[str, Any] = globo_torch.run(seed, max_rows=rows)
    finally:
        torch.set_num_threads(threads)
    return Run(result["rows_per_s"], result["auc_mean"], tuple(result["auc_per_day"]), 0.0)


@runner.measures("globo.rows")
def rows(preset: str, beside: int = 0) -> runner.Measure | None:
    """Rows/s in the default mode over the script's, both from the files, each in a process as a user would start it."""
    if not is_here("globo_ctr"):
        return None
    most = min(SPEED_ROWS[preset], BESIDE_ROWS) if beside else SPEED_ROWS[preset]
    ours, theirs = Elsewhere(AS_A_PROGRAM), Elsewhere(AS_A_PROGRAM)
    try:
        return runner.ratio(
            "globo.rows",
            ours=lambda: ours.call(persia_run, Hybrid(), 0, most).rows_per_second,
            theirs=lambda: theirs.call(torch_run, 0, most).rows_per_second,
            of="rows/s",
            rounds=ROUNDS[preset],
            at_least=1.1,
            details={"mode": 'Hybrid("auto")'},
        )
    finally:
        ours.close()
        theirs.close()


@runner.measures("globo.auc")
def auc(preset: str) -> runner.Measure | None:
    """Mean progressive AUC of Sync minus the script's, over three seeds each."""
    if not is_here("globo_ctr"):
        return None
    ours = [persia_run(Sync(), seed, AUC_ROWS[preset]).auc for seed in SEEDS[preset]]
    theirs = [torch_run(seed, AUC_ROWS[preset]).auc for seed in SEEDS[preset]]
    return runner.Measure(
        "globo.auc",
        statistics.fmean(ours) - statistics.fmean(theirs),
        "AUC",
        **runner.within(0.002),
        details={"ours": ours, "theirs": theirs},
    )


@functools.cache
def tuned_rate(preset: str) -> tuple[float, int]:
    """The best rate of rows for Sync, on a seed of its own and the first quarter of the rows; its number of days."""
    days = 0

    def score(rates: list[float]) -> list[float]:
        nonlocal days
        plans = [Pass(Sync(), TUNING_SEED, TUNING_ROWS[preset], Adagrad(lr=rate)) for rate in rates]
        found = everywhere(one_pass, plans, Run, processes=1)
        days = len(found[0].per_day)
        return [run.auc for run in found]

    return (START_RATE if preset == "smoke" else best_rate(score, START_RATE)), days


@runner.measures(*(f"globo.modes.{name}" for name in (*CANDIDATES, "auto_rate")))
def modes(preset: str) -> Iterator[runner.Measure]:
    """AUC of each mode minus Sync's, at Sync's best rate; and the speed of "auto" over Sync's.

    The AUC is the mean of the days that the rate was not tuned on. The rate is the best for a quarter of the stream,
    so it may be too high for all of it, which costs most where gradients are late.
    """
    if not is_here("globo_ctr"):
        return
    rate, tuning_days = tuned_rate(preset)
    optimizer = Adagrad(lr=rate)
    seeds = MODE_SEEDS[preset]
    pairs = [(name, seed) for seed in seeds for name in CANDIDATES]
    plans = {(name, seed): Pass(CANDIDATES[name], seed, AUC_ROWS[preset], optimizer) for name, seed in pairs}
    done = dict(zip(plans, everywhere(one_pass, list(plans.values()), Run, processes=1), strict=True))
    runs = {name: [done[name, seed] for seed in seeds] for name in CANDIDATES}
    for name, each in runs.items():
        yield runner.paired(
            f"globo.modes.{name}",
            [statistics.fmean(run.per_day[tuning_days:]) for run in each],
            [statistics.fmean(run.per_day[tuning_days:]) for run in runs["sync"]],
            "AUC",
            at_least=LEAST.get(name),
            details={
                "per_day": [
                    round(statistics.fmean(day), 5) for day in zip(*(run.per_day for run in each), strict=True)
                ],
                "rows_per_second": statistics.fmean(run.rows_per_second for run in each),
                "staleness": statistics.fmean(run.staleness for run in each),
                "rate_of_rows": rate,
                "tuning_days": tuning_days,
            },
        )
    yield runner.ratio(
        "globo.modes.auto_rate",
        ours=lambda: persia_run(Hybrid("auto", warmup=0), 0, SPEED_ROWS[preset], optimizer).rows_per_second,
        theirs=lambda: persia_run(Sync(), 0, SPEED_ROWS[preset], optimizer).rows_per_second,
        of="rows/s",
        rounds=ROUNDS[preset],
        at_least=1.1,
    )
