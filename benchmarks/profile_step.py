"""Where the time of a step goes: each part of `benchmarks/step.py`'s workload by itself, nothing else running.

    python -m benchmarks 'profile.step.*' [--preset smoke|laptop|full] [--json FILE]

Prints the parts one by one, with one and with all cores for the store, and the network alone. In training the parts
overlap: lookups and pushes run in background threads, on the cores that torch leaves idle.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

from benchmarks import runner
from benchmarks.baselines.step_torch import DenseOnly, Workload, generate
from persia import Batch, IdColumn, IdFeature, Schema
from persia.cluster import Embedded
from persia.nn import EmbeddingCollection
from persia.optim import Adagrad, RowwiseAdagrad
from persia.schema import EmbeddingOptimizer
from persia.types import Contribution, PushHeader

WORK = {"smoke": Workload(rows=20_000, batch=1024, batches=8), "laptop": Workload(), "full": Workload()}
ROUNDS = {"smoke": 5, "laptop": 30, "full": 100}
OPTIMIZERS = {"adagrad": Adagrad(lr=0.05), "rowwise_adagrad": RowwiseAdagrad(lr=0.05)}
PARTS = ("validate", "register", "lookup", "pool", "pool_backward", "push")


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
        self.times.setdefault(part, []).append(time.perf_counter() - began)
        return result

    def step(self, batch: Batch) -> None:
        """One step without a network: its gradient is 1 everywhere."""
        self._timed("validate", lambda: batch.validate(self.schema))
        batch_id = self._timed("register", lambda: self.worker.register(batch.id_features))
        found = self._timed("lookup", lambda: self.worker.lookup(batch_id))
        rows = {table: torch.from_numpy(values).requires_grad_() for table, values in found.rows.items()}
        offsets = {name: found.offsets.get(name) for name in found.inverse}
        pooled = self._timed("pool", lambda: self.collection._expander(rows, found.inverse, offsets))
        outputs = list(pooled.values())
        ones = [torch.ones_like(output) for output in outputs]
        self._timed("pool_backward", lambda: torch.autograd.backward(outputs, ones))
        self.steps += 1
        header = PushHeader(1, 0, self.steps, self.steps, len(batch))
        contribution = Contribution(batch_id, {table: leaf.grad.numpy() for table, leaf in rows.items()})
        self._timed("push", lambda: self.worker.push(header, [contribution]))


@runner.measures(
    "profile.step.network",
    *(
        f"profile.step.{part}.{optimizer}.{which}"
        for which in ("one_thread", "all_cores")
        for optimizer in OPTIMIZERS
        for part in PARTS
    ),
)
def profile(preset: str) -> Iterator[runner.Measure]:
    """Seconds of each part; `register` removes duplicates, `push` applies the update."""
    work = WORK[preset]
    dense = DenseOnly(work, generate(work))
    dense.time(5)
    yield runner.quantity("profile.step.network", [dense.time(1) for _ in range(ROUNDS[preset])], "s")
    dense.close()
    for which, threads in (("one_thread", 1), ("all_cores", len(os.sched_getaffinity(0)))):
        for name, optimizer in OPTIMIZERS.items():
            parts = Parts(work, threads, optimizer)
            # Twice through the data first: every id of every batch has its row then.
            for batch in itertools.chain(parts.batches, parts.batches):
                parts.step(batch)
            parts.times.clear()
            for batch in itertools.islice(itertools.cycle(parts.batches), ROUNDS[preset]):
                parts.step(batch)
            for part, times in parts.times.items():
                yield runner.quantity(f"profile.step.{part}.{name}.{which}", times, "s", details={"threads": threads})
