"""Where the time of a step goes: each part of `benchmarks/step.py`'s workload by itself, nothing else running.

    python benchmarks/profile_step.py [--preset smoke|laptop|full] [--json FILE]

Prints the parts one by one, with one and with all cores for the store, and the network alone. In training the parts
overlap: lookups and pushes run in background threads, on the cores that torch leaves idle.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import harness
from benchmarks.baselines.step_torch import DenseOnly, Workload, generate

from persia import Batch, IdColumn, IdFeature, Schema
from persia.cluster import Embedded
from persia.nn import EmbeddingCollection
from persia.optim import Adagrad, RowwiseAdagrad
from persia.schema import EmbeddingOptimizer
from persia.types import Contribution, PushHeader

WORK = {"smoke": Workload(rows=20_000, batch=1024, batches=8), "laptop": Workload(), "full": Workload()}
ROUNDS = {"smoke": 5, "laptop": 30, "full": 100}


class Parts:
    """The parts of one step, called by hand in the training thread."""

    def __init__(self, work: Workload, threads: int, optimizer: EmbeddingOptimizer) -> None:
        names = [f"f{i}" for i in range(work.features)]
        self.schema = Schema([IdFeature(name, dim=work.dim) for name in names], [f"d{i}" for i in range(work.dense)])
        self.collection = EmbeddingCollection(self.schema, optimizer=optimizer, cluster=Embedded(threads))
        self.worker = self.collection.connection.worker
        self.batches = [
            Batch({n: IdColumn(ids.astype(np.uint64)) for n, ids in zip(names, s.ids, strict=True)}, s.dense, s.labels)
            for s in generate(work)
        ]
        self.times: dict[str, list[float]] = {}
        self.steps = 0

    def _timed(self, part: str, work: Callable[[], object]) -> object:
        began = time.perf_counter()
        result = work()
        self.times.setdefault(part, []).append(1e3 * (time.perf_counter() - began))
        return result

    def step(self, batch: Batch) -> None:
        """One step without a network: its gradient is 1 everywhere."""
        self._timed("validate", lambda: batch.validate(self.schema))
        batch_id = self._timed("register (duplicate removal)", lambda: self.worker.register(batch.id_features))
        found = self._timed("lookup", lambda: self.worker.lookup(batch_id))
        rows = {table: torch.from_numpy(values).requires_grad_() for table, values in found.rows.items()}
        offsets = {name: found.offsets.get(name) for name in found.inverse}
        pooled = self._timed("pool", lambda: self.collection._expander(rows, found.inverse, offsets))
        outputs = list(pooled.values())
        ones = [torch.ones_like(output) for output in outputs]
        self._timed("pool backward", lambda: torch.autograd.backward(outputs, ones))
        self.steps += 1
        header = PushHeader(1, 0, self.steps, self.steps, len(batch))
        contribution = Contribution(batch_id, {table: leaf.grad.numpy() for table, leaf in rows.items()})
        self._timed("push (Adagrad update)", lambda: self.worker.push(header, [contribution]))


def profile(preset: str) -> Iterator[harness.Measure]:
    """Milliseconds of each part, median."""
    work = WORK[preset]
    dense = DenseOnly(work, generate(work))
    dense.time(5)
    yield milliseconds("network alone", [1e3 * dense.time(1) for _ in range(ROUNDS[preset])])
    dense.close()
    for threads in sorted({1, len(os.sched_getaffinity(0))}):
        for optimizer in (Adagrad(lr=0.05), RowwiseAdagrad(lr=0.05)):
            parts = Parts(work, threads, optimizer)
            # Twice through the data first: every id of every batch has its row then.
            for batch in itertools.chain(parts.batches, parts.batches):
                parts.step(batch)
            parts.times.clear()
            for batch in itertools.islice(itertools.cycle(parts.batches), ROUNDS[preset]):
                parts.step(batch)
            what = f"{type(optimizer).__name__}, {threads} threads"
            for part, times in parts.times.items():
                yield milliseconds(f"{part}: {what}", times)


def milliseconds(part: str, times: list[float]) -> harness.Measure:
    middle = statistics.median(times)
    quartiles = statistics.quantiles(times, n=4)
    spread = (quartiles[2] - quartiles[0]) / 2 / middle
    return harness.Measure(f"profile.step.{part}", middle, "ms", None, spread=spread)


if __name__ == "__main__":
    harness.main({"profile.step": profile})
