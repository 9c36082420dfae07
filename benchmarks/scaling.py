"""Embedding PSs and NN workers that join while a run trains: how long it takes, and what it takes from training.

    python -m benchmarks 'scale.ps_*' scale.nn_pause_s [--preset smoke|laptop|full] [--json FILE]

2 PSs on Ray have rows of dim 16 with Adagrad, and a `Trainer` trains random ones of them as fast as it can. 2 more PSs
join. Checkpoints go to PERSIA_BENCH_DIR, or the directory for temporary files. 2 NN workers train such rows with a
network of 2 layers in the same way, and 2 more join and leave.
"""

from __future__ import annotations

import statistics
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

import persia
from benchmarks import runner
from benchmarks.cluster import ray_here
from benchmarks.publish import folder
from persia import IdColumn, rpc
from persia.cluster import Ray, RayOptions
from persia.services import BucketMaps

ROWS = {"smoke": 20_000, "laptop": 10_000_000, "full": 10_000_000}
ROUNDS = {"smoke": 1, "laptop": runner.MIN_ROUNDS, "full": 9}
STEADY_SECONDS = {"smoke": 0.5, "laptop": 10.0, "full": 20.0}
DIM, HIDDEN, BATCH, CHUNK = 16, 1024, 2048, 1_000_000
SECONDS = 600.0
SCHEMA = persia.Schema([persia.IdFeature("id", DIM)], labels=["click"])


class RandomIds:
    """Batches of random ids, without end.

    Args:
        rows: number of ids.
    """

    schema = SCHEMA

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def batches(self, epoch: int = 0, start: int = 0) -> Iterator[persia.Batch]:
        random = np.random.default_rng(start)
        dense, labels = np.zeros((BATCH, 0), np.float32), np.zeros((BATCH, 1), np.float32)
        while True:
            ids = random.integers(0, self.rows, BATCH, dtype=np.uint64)
            yield persia.Batch({"id": IdColumn(ids)}, dense, labels)


class Sum(torch.nn.Module):
    """The smallest network.

    Args:
        path: as of `Timed`.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        self.bias = torch.nn.Parameter(torch.zeros(1))

    def forward(self, dense: torch.Tensor, embeddings: Any) -> torch.Tensor:
        note_time(self.path)
        logits: torch.Tensor = embeddings["id"].sum(1, keepdim=True) + self.bias
        return logits


class Timed(torch.nn.Module):
    """A network of 2 layers that notes when NN worker 0 trains a batch.

    Args:
        path: file that gets the times, float64 in seconds of the monotonic clock, which processes of a host share.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        self.layers = torch.nn.Sequential(torch.nn.Linear(DIM, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, 1))

    def forward(self, dense: torch.Tensor, embeddings: Any) -> torch.Tensor:
        note_time(self.path)
        logits: torch.Tensor = self.layers(embeddings["id"])
        return logits


def note_time(path: str) -> None:
    """Appends the time, if this is NN worker 0."""
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        with open(path, "ab") as file:
            file.write(struct.pack("<d", time.monotonic()))


def trainer_on(cluster: Ray, network: torch.nn.Module) -> persia.Trainer:
    return persia.Trainer(
        network,
        SCHEMA,
        optimizer=lambda parameters: torch.optim.Adam(parameters, 0.01),
        embedding_optimizer=persia.optim.Adagrad(lr=0.05),
        mode=persia.modes.Hybrid(4, warmup=0),
        cluster=cluster,
        options=persia.TrainerOptions(progress=False, device="cpu"),
    )


@contextmanager
def training(trainer: persia.Trainer, cluster: Ray, rows: int) -> Iterator[None]:
    """Trains in a thread while the block runs, which begins once it trains."""
    failures: list[BaseException] = []

    def train() -> None:
        try:
            trainer.fit(RandomIds(rows))
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=train)
    before = pushed(cluster)
    thread.start()
    try:
        while pushed(cluster) <= before and not failures:
            time.sleep(0.05)
        yield
    finally:
        trainer.stop()
        thread.join(SECONDS)
    if failures:
        raise failures[0]


def pushed(cluster: Ray) -> float:
    """Batches that were pushed so far."""
    return sum(
        counters.get("pushed", 0.0)
        for name, counters in cluster.statistics().items()
        if name.startswith("embedding_worker")
    )


@runner.measures("scale.ps_s", "scale.ps_pause_s", "scale.ps_rate", "scale.ps_resume")
def ps_join(preset: str) -> list[runner.Measure]:
    """From `scale(ps=4)` to equal parts of the rows, and the same through a checkpoint."""
    rows, options = ROWS[preset], RayOptions(threads=1)
    seconds: list[float] = []
    pauses: list[float] = []
    stops: list[float] = []
    rates: list[float] = []
    with folder() as path, ray_here(preset):
        times = Path(path) / "times"
        with Ray(2, options=options) as cluster:
            trainer = trainer_on(cluster, Sum(str(times)))
            for first in range(0, rows, CHUNK):
                ids = np.arange(first, min(rows, first + CHUNK), dtype=np.uint64)
                trainer.embeddings.set_rows("id", ids, np.zeros((len(ids), DIM), np.float32))
            maps = rpc.connect(cluster.control_address, BucketMaps, timeout=SECONDS)
            with training(trainer, cluster, rows):
                for number in range(ROUNDS[preset]):
                    if number:
                        cluster.scale(ps=2)
                    before, began = pushed(cluster), time.perf_counter()
                    time.sleep(STEADY_SECONDS[preset])
                    steady = (pushed(cluster) - before) / (time.perf_counter() - began)
                    before, began = pushed(cluster), time.monotonic()
                    cluster.scale(ps=4)
                    taken = time.monotonic() - began
                    seconds.append(taken)
                    pauses.append(longest_gap(times, began))
                    stops.append(maps.map_state().progress.pause_seconds)
                    rates.append((pushed(cluster) - before) / taken / steady)
            rpc.close(maps)
            began = time.perf_counter()
            trainer.save(str(path / "saved"))
        with Ray(4, options=options) as cluster:
            trainer = trainer_on(cluster, Sum(str(times)))
            trainer.load(str(path / "saved"))
            with training(trainer, cluster, rows):
                resumed = time.perf_counter() - began
    details = {"rows": rows, "dim": DIM, "rows that move": "half"}
    ratio = resumed / statistics.median(seconds)
    pause = {"of": "the longest time between two batches while rows move", "s of the stop": statistics.median(stops)}
    rate = {"of": "batches/s while rows move, over before"}
    of = "seconds to save, start 4 PSs, load and train, over those of scale(ps=4)"
    resume = {"of": of, "s through a checkpoint": resumed}
    return [
        runner.quantity("scale.ps_s", seconds, "s", details=details),
        runner.quantity("scale.ps_pause_s", pauses, "s", at_most=1.0, details=pause),
        runner.quantity("scale.ps_rate", rates, "ratio", at_least=0.7, details=rate),
        runner.Measure("scale.ps_resume", ratio, "ratio", at_least=4.0, details=resume),
    ]


@runner.measures("scale.nn_pause_s")
def nn_workers_join(preset: str) -> runner.Measure:
    """The longest time between two batches of NN worker 0 while 2 NN workers become 4, and 4 become 2."""
    rows = min(ROWS[preset], CHUNK)
    pauses: list[float] = []
    seconds: list[float] = []
    with folder() as path, ray_here(preset), Ray(1, nn_workers=2, options=RayOptions(threads=1)) as cluster:
        times = Path(path) / "times"
        trainer = trainer_on(cluster, Timed(str(times)))
        with training(trainer, cluster, rows):
            for _ in range(ROUNDS[preset]):
                for nn_workers in (4, 2):
                    time.sleep(STEADY_SECONDS[preset])
                    began = time.monotonic()
                    cluster.scale(nn_workers=nn_workers)
                    seconds.append(time.monotonic() - began)
                    before = pushed(cluster)
                    while pushed(cluster) <= before:  # `scale` may return before the first batch.
                        time.sleep(0.05)
                    pauses.append(longest_gap(times, began))
    pauses = [max(pauses)] if preset == "smoke" else pauses
    details = {"of": "2 to 4 NN workers and back", "rows": rows, "s of scale()": statistics.median(seconds)}
    return runner.quantity("scale.nn_pause_s", pauses, "s", at_most=2.0, details=details)


def longest_gap(path: Path, since: float) -> float:
    """Returns the longest time between two batches, of those from a moment on and the one before."""
    times = np.frombuffer(path.read_bytes(), "<f8")
    return float(np.diff(times[max(0, np.searchsorted(times, since) - 1) :]).max())
