"""All modes side by side while some NN workers are slow: real roles, emulated computing (`persia bench modes`).

NN workers are threads that wait in place of computing, so that many fit on few cores; everything else (tokens, sums,
dense PSs, pushes) happens. The columns are those of the GBA paper's Tables 5.2 and 5.3.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from persia.batching.batch import Batch, IdColumn
from persia.cluster.threads import Member, Threads
from persia.errors import ConfigError
from persia.fit import FitResult
from persia.modes import Async, Bsp, Gba, HopBs, HopBw, Mode, Sync
from persia.nn.types import Embeddings
from persia.options import TrainerOptions
from persia.schema import Adagrad, IdFeature, Schema
from persia.trainer import Trainer

__all__ = ["Emulation", "Line", "all_modes", "compare", "record", "run", "static", "table"]

ROWS = 16
FEATURES = 2
IDS = 1000

Slowness = Callable[[int, int], float]
"""Of an NN worker (rank, own step): by how much it is slower than it should be."""


class Emulation(NamedTuple):
    """What is emulated.

    Attributes:
        workers: NN workers.
        slow: how slow each is, when.
        compute: seconds that a batch takes at full speed.
    """

    workers: int
    slow: Slowness
    compute: float

    @classmethod
    def parse(cls, workers: int, slow: str, compute: str) -> Emulation:
        """From the command line: `2:4x` and `20ms`.

        Raises:
            ConfigError: it is written otherwise.
        """
        found = re.fullmatch(r"(\d+):(\d+(?:\.\d+)?)x", slow)
        time_ = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s)", compute)
        if found is None or int(found[1]) > workers:
            raise ConfigError(f"slow = {slow!r}; write how many of {workers} are how slow: 2:4x.", field="slow")
        if time_ is None:
            raise ConfigError(f"compute = {compute!r}; write a time, such as 20ms.", field="compute")
        seconds = float(time_[1]) / (1000 if time_[2] == "ms" else 1)
        return cls(workers, static(int(found[1]), float(found[2])), seconds)


class Line(NamedTuple):
    """One mode.

    Attributes:
        mode: which.
        result: what `fit` returned on the first NN worker.
        seconds: of the training loop, the slowest NN worker's.
    """

    mode: Mode
    result: FitResult
    seconds: float

    @property
    def applied_rows(self) -> int:
        """Samples whose gradient was applied."""
        report = self.result.asynchronous
        return self.result.rows - (report.dropped_rows if report is not None else 0)

    @property
    def rate(self) -> float:
        """Applied samples per second."""
        return self.applied_rows / self.seconds


class _Waiting(torch.nn.Module):
    """A small network that takes as long as a large one."""

    def __init__(self, pause: Callable[[], None]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = torch.nn.Linear(FEATURES * 4, 1)
        self.pause = pause

    def forward(self, dense: torch.Tensor, embeddings: Embeddings) -> torch.Tensor:
        if self.training:
            self.pause()
        found: list[Any] = list(embeddings.values())
        logits: torch.Tensor = self.head(torch.cat(found, 1))
        return logits


def static(slow: int, factor: float) -> Slowness:
    """The first `slow` NN workers are slower for good."""
    return lambda rank, step: factor if rank < slow else 1.0


def all_modes(workers: int) -> list[Mode]:
    """One of each kind, of the same global batch where it has one."""
    return [Sync(), Async(), HopBs(2), Bsp(workers), HopBw(min(2, workers - 1)), Gba(workers * ROWS)]


def run(mode: Mode, emulation: Emulation, batches: int, watch: Callable[[Trainer], None] | None = None) -> Line:
    """Trains with one mode.

    Args:
        mode: which.
        emulation: of NN workers and computing.
        batches: in all.
        watch: called with the first NN worker's trainer before it trains.
    """
    random = np.random.default_rng(0)
    schema = Schema([IdFeature(f"f{i}", dim=4) for i in range(FEATURES)], labels=["click"])
    data = [
        Batch(
            {f"f{i}": IdColumn(random.integers(0, IDS, ROWS, dtype=np.uint64)) for i in range(FEATURES)},
            np.zeros((ROWS, 0), np.float32),
            random.integers(0, 2, (ROWS, 1)).astype(np.float32),
        )
        for _ in range(batches)
    ]

    def work(member: Member) -> tuple[FitResult, float]:
        step = 0

        def pause() -> None:
            nonlocal step
            time.sleep(emulation.compute * emulation.slow(member.rank, step))
            step += 1

        trainer = Trainer(
            _Waiting(pause),
            schema,
            optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-3),
            embedding_optimizer=Adagrad(lr=0.05),
            mode=mode,
            cluster=member,
            options=TrainerOptions(progress=False),
        )
        if watch is not None and member.rank == 0:
            watch(trainer)
        result = trainer.fit(data)
        return result, result.seconds

    found = Threads(emulation.workers).run(work)
    return Line(mode, found[0][0], max(seconds for _, seconds in found))


def compare(emulation: Emulation, steps: int) -> list[Line]:
    """All modes in turn.

    Args:
        emulation: of NN workers and computing.
        steps: batches per NN worker, on average.
    """
    return [run(mode, emulation, steps * emulation.workers) for mode in all_modes(emulation.workers)]


def record(line: Line) -> dict[str, Any]:
    """A line as plain values, for JSON."""
    report = line.result.asynchronous
    workers = report.workers if report is not None else {}
    return {
        "mode": str(line.mode),
        "rows_per_second": line.rate,
        "rows_per_second_by_worker": {str(rank): w.rows / line.seconds for rank, w in sorted(workers.items())},
        "auc": line.result.progressive.auc,
        "dropped_batches": report.dropped_batches if report is not None else 0,
        "dropped_rows": report.dropped_rows if report is not None else 0,
        "lost_tokens": report.lost_tokens if report is not None else 0,
        "dense_staleness_mean": report.staleness_sum / max(1, report.batches) if report is not None else 0.0,
        "dense_staleness_max": report.staleness_max if report is not None else 0,
        "row_staleness_mean": line.result.row_staleness_mean,
        "row_staleness_max": line.result.row_staleness_max,
    }


def table(lines: Sequence[Line]) -> str:
    """The columns of the paper's Tables 5.2 and 5.3."""
    head = f"{'mode':<44}{'rows/s':>9}{'slowest':>9}{'fastest':>9}{'dropped':>9}{'lost':>6}{'dense':>14}{'rows':>14}"
    text = [head]
    for line in lines:
        values = record(line)
        rates = list(values["rows_per_second_by_worker"].values()) or [float("nan")]
        dense = f"{values['dense_staleness_mean']:.2f} ({values['dense_staleness_max']})"
        rows = f"{values['row_staleness_mean']:.2f} ({values['row_staleness_max']})"
        text.append(
            f"{values['mode']:<44}{values['rows_per_second']:>9.0f}{min(rates):>9.0f}{max(rates):>9.0f}"
            f"{values['dropped_batches']:>9}{values['lost_tokens']:>6}{dense:>14}{rows:>14}"
        )
    return "\n".join(text)
