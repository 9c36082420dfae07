"""The log of changes: what publishing takes from training, and whether evicted ids are gone from what is served.

    python -m benchmarks 'publish.*' [--preset smoke|laptop|full] [--json FILE]

All roles are in one process. Training goes as fast as it can, so that publishing takes from it what it needs; files go
to PERSIA_BENCH_DIR, or the directory for temporary files.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

import persia
from benchmarks import runner
from persia.modes import Hybrid
from persia.optim import Adagrad
from persia.publish import PublishOptions, Replica, follow

BATCHES = {"smoke": 3, "laptop": 150, "full": 600}
ROUNDS = {"smoke": 1, "laptop": 7, "full": 9}
SECONDS = {"smoke": 0.05, "laptop": 2.0, "full": 2.0}
"""Between two increments: with a poll every second, a click is served after 5 s at most."""

FEATURES, BATCH = 26, 4096


@contextmanager
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="persia-bench-", dir=os.environ.get("PERSIA_BENCH_DIR")))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def trainer_of(schema: persia.Schema, publish: PublishOptions | None) -> persia.Trainer:
    """A trainer of the network of the serving benchmarks: 26 features of dim 16, MLP 256-128."""
    torch.manual_seed(0)
    return persia.Trainer(
        persia.nn.models.FFNN(schema, hidden=(256, 128)),
        schema,
        optimizer=lambda params: torch.optim.Adam(params, 1e-3),
        embedding_optimizer=Adagrad(lr=0.05),
        mode=Hybrid(4, warmup=0),
        options=persia.TrainerOptions(device="cpu", progress=False, publish=publish),
    )


@runner.measures("publish.slowdown")
def slowdown(preset: str) -> runner.Measure:
    """Samples/s while rows and network are published, over those while they are not, in alternation."""
    batches = BATCHES[preset]
    size = BATCH if preset != "smoke" else 64
    reader = persia.data.synthetic(
        batches * size, id_features=FEATURES, ids_per_feature=10_000, dense_features=13, batch_size=size
    )
    data = list(reader)
    ratios = []
    processor: list[list[float]] = [[], []]
    with folder() as path:
        options = PublishOptions(str(path / "log"), seconds=SECONDS[preset])
        publishing, quiet = trainer_of(reader.schema, options), trainer_of(reader.schema, None)
        for trainer in (publishing, quiet):
            trainer.fit(data)
        rates = [0.0, 0.0]
        for number in range(ROUNDS[preset]):
            for which in [0, 1] if number % 2 else [1, 0]:
                began = time.process_time()
                result = (publishing, quiet)[which].fit(data, again=True)
                processor[which].append(time.process_time() - began)
                rates[which] = result.rows / result.seconds
            ratios.append(rates[0] / rates[1])
        rows = publishing.embeddings.statistics()
        details = {
            "of": "samples/s, publishing over not",
            "seconds": SECONDS[preset],
            "stored_rows": sum(table["rows"] for table in rows.values()),
            "samples_per_s": rates[1],
            "cpu_s": [statistics.median(seconds) for seconds in processor],  # with the last entries of each call
        }
    return runner.quantity("publish.slowdown", ratios, "ratio", at_least=0.93, details=details)


@runner.measures("publish.stale_tombstones")
def stale_tombstones(preset: str) -> runner.Measure:
    """Evicted ids that a reader still has after the next increment, over calls of `fit` full of evictions."""
    batches, capacity = {"smoke": (4, 200), "laptop": (200, 2_000), "full": (400, 10_000)}[preset]
    stale = 0
    with folder() as path:
        reader = persia.data.synthetic(
            batches * 512, id_features=2, ids_per_feature=5 * capacity, dense_features=1, batch_size=512
        )
        tables = [persia.Table(feature.name, 16, capacity=capacity) for feature in reader.schema.id_features]
        schema = persia.Schema(reader.schema.id_features, reader.schema.dense_features, reader.schema.labels, tables)
        trainer = trainer_of(schema, PublishOptions(str(path / "log"), seconds=0.05))
        replica = Replica(follow(str(path / "log")))
        for number in range(ROUNDS[preset]):
            trainer.fit(reader, epochs=number + 1)
            replica.refresh()
            for server in trainer.embeddings.connection.servers:
                chunks = list(server.export_rows())
                for table in tables:
                    live = [chunk.arrays["ids"] for chunk in chunks if chunk.table == table.name]
                    served = np.fromiter(replica.rows(table.name), np.uint64)
                    assert len(served) > 0
                    stale += len(np.setdiff1d(served, np.concatenate(live)))
        evicted = sum(table["evicted"] for table in trainer.embeddings.statistics().values())
    assert evicted > 0
    return runner.Measure("publish.stale_tombstones", stale, "rows", at_most=0, details={"evicted": evicted})
