"""Embedding PSs that join while a run trains: how long it takes, and what it takes from training.

    python -m benchmarks 'scale.ps_*' [--preset smoke|laptop|full] [--json FILE]

2 PSs on Ray have rows of dim 16 with Adagrad, and a `Trainer` trains random ones of them as fast as it can. 2 more PSs
join. Checkpoints go to PERSIA_BENCH_DIR, or the directory for temporary files.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
ROUNDS = {"smoke": 1, "laptop": 3, "full": 5}
STEADY_SECONDS = {"smoke": 0.5, "laptop": 10.0, "full": 20.0}
DIM, BATCH, CHUNK = 16, 2048, 1_000_000
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
    """The smallest network."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(1))

    def forward(self, dense: torch.Tensor, embeddings: Any) -> torch.Tensor:
        logits: torch.Tensor = embeddings["id"].sum(1, keepdim=True) + self.bias
        return logits


def trainer_on(cluster: Ray) -> persia.Trainer:
    return persia.Trainer(
        Sum(),
        SCHEMA,
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.01),
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
    rates: list[float] = []
    with folder() as path, ray_here(preset):
        with Ray(2, options=options) as cluster:
            trainer = trainer_on(cluster)
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
                    before, began = pushed(cluster), time.perf_counter()
                    cluster.scale(ps=4)
                    taken = time.perf_counter() - began
                    seconds.append(taken)
                    pauses.append(maps.map_state().progress.pause_seconds)
                    rates.append((pushed(cluster) - before) / taken / steady)
            rpc.close(maps)
            began = time.perf_counter()
            trainer.save(str(path / "saved"))
        with Ray(4, options=options) as cluster:
            trainer = trainer_on(cluster)
            trainer.load(str(path / "saved"))
            with training(trainer, cluster, rows):
                resumed = time.perf_counter() - began
    details = {"rows": rows, "dim": DIM, "rows that move": "half"}
    ratio = resumed / statistics.median(seconds)
    of = "seconds to save, start 4 PSs, load and train, over those of scale(ps=4)"
    return [
        runner.quantity("scale.ps_s", seconds, "s", details=details),
        runner.quantity("scale.ps_pause_s", pauses, "s", details=details),
        runner.quantity("scale.ps_rate", rates, "ratio", details={"of": "batches/s while rows move, over before"}),
        runner.Measure("scale.ps_resume", ratio, "ratio", details={"of": of, "s through a checkpoint": resumed}),
    ]
