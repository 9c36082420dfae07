"""Speed and progressive AUC on globo_ctr, one pass, against a plain PyTorch script of the same model.

    python -m benchmarks 'globo.*' [--preset smoke|laptop|full] [--json FILE]

Needs the data (see persia.data.globo); without them every measure is skipped. `globo.modes.*` puts the modes side by
side: this stream punishes every batch of delay.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from benchmarks import runner
from benchmarks.baselines import globo_torch
from persia import Trainer, TrainerOptions, data
from persia.modes import Hybrid, Mode, Sync
from persia.nn.models import FFNN
from persia.optim import Adagrad

SEEDS = (0, 1, 2)
SPEED_ROWS = {"smoke": 30_000, "laptop": 1_000_000, "full": 1_000_000}
CANDIDATES: dict[str, Mode] = {
    "sync": Sync(),
    **{f"hybrid_{n}": Hybrid(n) for n in (1, 2, 4, 8)},  # type: ignore[arg-type]
    "auto": Hybrid("auto"),
}
AUC_ROWS = {"smoke": 30_000, "laptop": None, "full": None}


THREADS = torch.get_num_threads()
"""What torch has chosen; a `Trainer` sets another number."""


class Run(NamedTuple):
    """One pass."""

    rows_per_second: float
    auc: float
    last_day: float
    staleness: float


def persia_run(mode: Mode, seed: int, rows: int | None) -> Run:
    reader = data.globo(batch_size=globo_torch.BATCH)
    torch.manual_seed(seed)
    trainer = Trainer(
        FFNN(reader.schema, hidden=(256, 128), products=[("article_id", "history")]),
        reader.schema,
        optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-3, fused=True),
        embedding_optimizer=Adagrad(lr=0.2, initial_accumulator=0.01),
        mode=mode,
        options=TrainerOptions(seed=seed, progress=False),
    )
    result = trainer.fit(reader, max_steps=None if rows is None else rows // globo_torch.BATCH)
    days = list(result.progressive.auc_per_day.values())
    return Run(result.rows_per_second, statistics.fmean(days), days[-1], result.staleness_mean)


def torch_run(seed: int, rows: int | None) -> Run:
    threads = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        result: dict[str, Any] = globo_torch.run(seed, max_rows=rows)
    finally:
        torch.set_num_threads(threads)
    return Run(result["rows_per_s"], result["auc_mean"], result["auc_per_day"][-1], 0.0)


def found() -> bool:
    if data.find("globo_ctr") is None:
        print("globo_ctr is not here; set PERSIA_DATA to the directory that holds it.", file=sys.stderr)
        return False
    return True


@runner.measures("globo.rows")
def rows(preset: str) -> runner.Measure | None:
    """Rows/s of Hybrid("auto") over the script's, both from the files."""
    if not found():
        return None
    most = SPEED_ROWS[preset]
    return runner.ratio(
        "globo.rows",
        ours=lambda: persia_run(Hybrid("auto"), 0, most).rows_per_second,
        theirs=lambda: torch_run(0, most).rows_per_second,
        of="rows/s",
        rounds=7,
        at_least=1.5,
    )


@runner.measures("globo.auc")
def auc(preset: str) -> runner.Measure | None:
    """Mean progressive AUC of Sync minus the script's, three seeds each."""
    if not found():
        return None
    ours = [persia_run(Sync(), seed, AUC_ROWS[preset]).auc for seed in SEEDS]
    theirs = [torch_run(seed, AUC_ROWS[preset]).auc for seed in SEEDS]
    return runner.Measure(
        "globo.auc",
        statistics.fmean(ours) - statistics.fmean(theirs),
        "AUC",
        **runner.within(0.002),
        details={"ours": ours, "theirs": theirs},
    )


@runner.measures(*(f"globo.modes.{name}" for name in (*CANDIDATES, "auto_loss", "auto_rate")))
def modes(preset: str) -> Iterator[runner.Measure]:
    """AUC and rows/s of each mode; what "auto" loses against what Hybrid(4) loses, and their speeds."""
    if not found():
        return
    runs = {name: [persia_run(mode, seed, AUC_ROWS[preset]) for seed in SEEDS] for name, mode in CANDIDATES.items()}
    mean = {name: Run(*(statistics.fmean(column) for column in zip(*each, strict=True))) for name, each in runs.items()}
    for name, run in mean.items():
        yield runner.Measure(f"globo.modes.{name}", run.auc, "AUC", details=run._asdict())
    loss = {name: mean[name].auc - mean["sync"].auc for name in ("auto", "hybrid_4")}
    details = {"of": "AUC lost", **loss}
    ratio = loss["auto"] / loss["hybrid_4"]
    yield runner.Measure("globo.modes.auto_loss", ratio, "ratio", at_most=1 / 3, details=details)
    yield runner.ratio(
        "globo.modes.auto_rate",
        ours=lambda: persia_run(Hybrid("auto"), 0, SPEED_ROWS[preset]).rows_per_second,
        theirs=lambda: persia_run(Hybrid(4), 0, SPEED_ROWS[preset]).rows_per_second,
        of="rows/s",
        rounds=7,
        at_least=0.97,
    )
