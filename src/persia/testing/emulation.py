"""A comparison of all modes with slow NN workers: real roles, emulated computation (`persia bench modes`).

NN workers are threads that wait instead of computing, so that many fit on few cores; everything else (tokens, sums,
dense PSs, pushes) is real. The columns are the columns of the GBA paper's Tables 5.2 and 5.3.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from persia.batching.batch import Batch
from persia.batching.id_column import IdColumn
from persia.coordinator import TokenScheduler
from persia.errors import ConfigError
from persia.modes import Async, Auto, Bsp, Gba, HopBs, HopBw, Hybrid, Mode, Sync
from persia.nn.pooling import Embeddings
from persia.replay import Setting, Summary, Trace, load_trace, simulate, steady
from persia.schema import Adagrad, IdFeature, Schema
from persia.testing.threads import ThreadMember, Threads
from persia.trainer import Trainer
from persia.trainer.options import TrainerOptions
from persia.trainer.progress import FitResult
from persia.types import ArrivalRecord, PhaseRecord

__all__ = [
    "EMBEDDING_OPTIMIZER",
    "ROWS",
    "EmulatedRun",
    "Emulation",
    "ModeResult",
    "all_modes",
    "compare",
    "network",
    "optimizer",
    "problem",
    "record",
    "run",
    "table",
    "train",
]

ROWS = 16
"""Rows of a batch; few, as computation is emulated."""

FEATURES = 2
IDS = 1000
EMBEDDING_OPTIMIZER = Adagrad(lr=0.05)


class Emulation(NamedTuple):
    """Emulated NN workers and their speed.

    Attributes:
        trace: speed of each NN worker over time, from the first batch on; also determines the number of NN workers.
        compute: compute time of a batch at full speed, in seconds.
    """

    trace: Trace
    compute: float

    @property
    def workers(self) -> int:
        """Number of NN workers."""
        return len(self.trace.workers)

    @classmethod
    def parse(cls, workers: int, slow: str, compute: str, trace: str | None = None) -> Emulation:
        """Parses command-line arguments: `2:4x`, `20ms`, or a trace file, which replaces `slow`.

        Raises:
            ConfigError: an argument is invalid.
        """
        time_ = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s)", compute)
        if time_ is None:
            raise ConfigError(f"Invalid compute = {compute!r}; expected a time, such as 20ms.", field="compute")
        seconds = float(time_[1]) / (1000 if time_[2] == "ms" else 1)
        if trace is not None:
            return cls(load_trace(trace), seconds)
        slow_match = re.fullmatch(r"(\d+):(\d+(?:\.\d+)?)x", slow)
        if slow_match is None or int(slow_match[1]) > workers:
            raise ConfigError(
                f"Invalid slow = {slow!r}; expected COUNT:FACTORx with at most {workers} workers, such as 2:4x.",
                field="slow",
            )
        count = int(slow_match[1])
        return cls(steady([float(slow_match[2])] * count + [1.0] * (workers - count)), seconds)


class EmulatedRun(NamedTuple):
    """Result of a run with real roles.

    Attributes:
        result: result of `fit` on the first NN worker.
        finished: times at which batches were computed, by NN worker, in seconds since the first batch started.
        trainer: trainer of the first NN worker.
        arrivals: gradients in the order of the token list, if the run was recorded.
    """

    result: FitResult
    finished: list[list[float]]
    trainer: Trainer
    arrivals: list[ArrivalRecord]

    @property
    def applied_rows(self) -> int:
        """Number of samples whose gradient was applied."""
        report = self.result.asynchronous
        return self.result.rows - (report.dropped_rows if report is not None else 0)

    @property
    def seconds(self) -> float:
        """Seconds from the start of the first batch to the end of the last one, as the simulation counts."""
        return max(times[-1] for times in self.finished if times)

    @property
    def rate(self) -> float:
        """Applied samples per second."""
        return self.applied_rows / self.seconds


class ModeResult(NamedTuple):
    """Result of one mode.

    Attributes:
        mode: the mode.
        trained: the run with real roles.
        bound: the simulation of the same run, in which only computation takes time.
    """

    mode: Mode
    trained: EmulatedRun
    bound: Summary

    @property
    def rate(self) -> float:
        """Applied samples per second."""
        return self.trained.rate

    @property
    def of_bound(self) -> float:
        """Rate divided by the rate of the simulation."""
        return self.rate / self.bound.rate


class _Clock:
    """Seconds since the first call of `now`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._start: float | None = None

    def now(self) -> float:
        now = time.monotonic()
        with self._lock:
            self._start = now if self._start is None else self._start
        return now - self._start


class _RecordingScheduler(TokenScheduler):
    """A token scheduler that stores the arrivals of recorded phases."""

    def __init__(self) -> None:
        super().__init__()
        self.arrivals: list[ArrivalRecord] = []

    def end_recording(self) -> PhaseRecord:
        phase = super().end_recording()
        self.arrivals += phase.arrivals
        return phase


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
        pooled: list[Any] = list(embeddings.values())
        logits: torch.Tensor = self.head(torch.cat(pooled, 1))
        return logits


def all_modes(workers: int) -> list[Mode]:
    """Returns one mode of each kind, with the same global batch if it has one.

    Hybrid has no warm-up: a comparison has fewer steps than the warm-up, so it would measure Sync twice.
    """
    backup = min(2, workers - 1)
    return [Sync(), Hybrid(4, warmup=0), Async(), HopBs(2), Bsp(workers), HopBw(backup), Gba(workers * ROWS)]


def problem(batches: int) -> tuple[Schema, list[Batch]]:
    """Returns a schema and batches of random ids and labels."""
    random = np.random.default_rng(0)
    data = [
        Batch(
            {f"f{i}": IdColumn(random.integers(0, IDS, ROWS, dtype=np.uint64)) for i in range(FEATURES)},
            np.zeros((ROWS, 0), np.float32),
            random.integers(0, 2, (ROWS, 1)).astype(np.float32),
        )
        for _ in range(batches)
    ]
    return Schema([IdFeature(f"f{i}", dim=4) for i in range(FEATURES)], labels=["click"]), data


def network(pause: Callable[[], None] = lambda: None) -> torch.nn.Module:
    """Returns a network with fixed initial parameters that calls `pause` for each batch in training."""
    return _Waiting(pause)


def optimizer(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Returns the optimizer of the network."""
    return torch.optim.Adam(parameters, 1e-3)


def train(mode: Mode | Auto, emulation: Emulation, batches: int, record_dir: str | None = None) -> EmulatedRun:
    """Trains with one mode.

    Args:
        mode: the mode.
        emulation: emulated NN workers and computation.
        batches: number of batches of all NN workers together.
        record_dir: option `record_dir` of `TrainerOptions`.
    """
    schema, data = problem(batches)
    clock = _Clock()
    finished: list[list[float]] = [[] for _ in range(emulation.workers)]

    def work(member: ThreadMember) -> tuple[FitResult, Trainer]:
        def pause() -> None:
            start = clock.now()
            time.sleep(emulation.trace.finish(member.rank, start, emulation.compute) - start)
            finished[member.rank].append(clock.now())

        trainer = Trainer(
            network(pause),
            schema,
            optimizer=optimizer,
            embedding_optimizer=EMBEDDING_OPTIMIZER,
            mode=mode,
            cluster=member,
            options=TrainerOptions(device="cpu", progress=False, record_dir=record_dir),
        )
        return trainer.fit(data), trainer

    tokens = _RecordingScheduler()
    cluster = Threads(emulation.workers, tokens=tokens)
    result, trainer = cluster.run(work)[0]
    return EmulatedRun(result, finished, trainer, tokens.arrivals)


def run(mode: Mode, emulation: Emulation, batches: int) -> ModeResult:
    """Trains with one mode and simulates the same run."""
    bound = simulate(mode, Setting(emulation.trace, emulation.compute, ROWS), batches).summary()
    return ModeResult(mode, train(mode, emulation, batches), bound)


def compare(emulation: Emulation, steps: int) -> list[ModeResult]:
    """Runs all modes in turn.

    Args:
        emulation: emulated NN workers and computation.
        steps: mean number of batches per NN worker.
    """
    return [run(mode, emulation, steps * emulation.workers) for mode in all_modes(emulation.workers)]


def record(line: ModeResult) -> dict[str, Any]:
    """Returns a result as plain values, for JSON."""
    result = line.trained.result
    report = result.asynchronous
    return {
        "mode": str(line.mode),
        "rows_per_second": line.rate,
        "of_bound": line.of_bound,
        "rows_per_second_by_worker": [len(times) * ROWS / line.trained.seconds for times in line.trained.finished],
        "auc": result.progressive.auc,
        "dropped_batches": report.dropped_batches if report is not None else 0,
        "dropped_rows": report.dropped_rows if report is not None else 0,
        "lost_tokens": report.lost_tokens if report is not None else 0,
        "dense_staleness_mean": report.staleness_mean if report is not None else 0.0,
        "dense_staleness_max": report.staleness_max if report is not None else 0,
        # Staleness of rows in global steps, or without tokens in steps of the NN worker.
        "row_staleness_mean": result.row_staleness_mean if report is not None else result.staleness_mean,
        "row_staleness_max": result.row_staleness_max if report is not None else result.staleness_max,
    }


def table(lines: Sequence[ModeResult]) -> str:
    """Formats results in the columns of the paper's Tables 5.2 and 5.3."""
    width = max(len("mode"), *(len(str(line.mode)) for line in lines)) + 2
    text = [
        f"{'mode':<{width}}{'AUC':>7}{'rows/s':>9}{'of bound':>10}{'slowest':>9}{'fastest':>9}{'dropped':>9}{'lost':>6}"
        f"{'dense':>11}{'rows':>11}"
    ]
    for line in lines:
        values = record(line)
        rates = values["rows_per_second_by_worker"]
        dense = f"{values['dense_staleness_mean']:.2f} ({values['dense_staleness_max']})"
        rows = f"{values['row_staleness_mean']:.2f} ({values['row_staleness_max']})"
        text.append(
            f"{values['mode']:<{width}}{values['auc']:>7.4f}{values['rows_per_second']:>9.0f}{line.of_bound:>10.2f}"
            f"{min(rates):>9.0f}{max(rates):>9.0f}{values['dropped_batches']:>9}{values['lost_tokens']:>6}"
            f"{dense:>11}{rows:>11}"
        )
    return "\n".join(text)
