"""Where the time of a step goes: each part of `benchmarks/step.py`'s workload by itself, nothing else running.

    python -m benchmarks 'profile.step.*' [--preset smoke|laptop|full] [--json FILE]

Prints the parts one by one, with one and with all cores for the store, and the network alone. Pooling and the sums of
gradients use as many threads as torch.

The parts are the calls that training on a CPU makes for each batch, in the same order, but one after another in the
calling thread. So does the training thread in `Sync`. Where lookups run ahead three threads make them, so they overlap:

- The lookup thread: `validate`; `register`, which removes duplicates; `lookup`; `transfer`, which wraps the rows as
  tensors; `pool`; and `hooks`, which makes autograd leaves of the rows.
- The training thread: `take`, which brings the pooled features into the graph; the network; and `keep`, the backward
  pass from the features on, which keeps their gradients for the next thread.
- The push thread: `pool_backward`, which sums the gradients by row; and `push`, which applies the update.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np
import torch

from benchmarks import runner
from benchmarks.baselines.step_torch import DenseOnly, Workload, generate
from persia import Batch, IdColumn, IdFeature, Schema
from persia.cluster import Embedded
from persia.nn import EmbeddingCollection
from persia.nn.pooling import PooledAhead
from persia.nn.prepared import PreparedBatch
from persia.nn.transfer import Encoded
from persia.optim import Adagrad, RowwiseAdagrad
from persia.schema import EmbeddingOptimizer
from persia.types import Contribution, PushHeader, RegisteredBatch

T = TypeVar("T")

WORK = {"smoke": Workload(rows=2_000, batch=128, batches=2), "laptop": Workload(), "full": Workload()}
ROUNDS = {"smoke": 5, "laptop": 30, "full": 100}
OPTIMIZERS = {"adagrad": Adagrad(lr=0.05), "rowwise_adagrad": RowwiseAdagrad(lr=0.05)}
PARTS = ("validate", "register", "lookup", "transfer", "pool", "hooks", "take", "keep", "pool_backward", "push")


class Parts:
    """The parts of one step, called one after another in the calling thread.

    Args:
        work: shape of the batches.
        threads: of the store.
        optimizer: of the rows.
    """

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
        self._gradients: Callable[[], Encoded]
        """Sums and returns the gradients of the batch whose backward pass has ended last."""

    def step(self, batch: Batch) -> None:
        """Makes one step without a network: the gradient of the features is 1 everywhere."""
        prepared = self._look_up(batch)
        self._train(prepared)
        self._push(prepared)

    def _timed(self, part: str, work: Callable[[], T]) -> T:
        began = time.perf_counter()
        result = work()
        self.times.setdefault(part, []).append(time.perf_counter() - began)
        return result

    def _look_up(self, batch: Batch) -> PreparedBatch:
        """Makes the calls of the lookup thread: see `TrainingLookup`."""
        self._timed("validate", lambda: batch.validate(self.schema))
        batch_id = self._timed("register", lambda: self.worker.register(batch.id_features))
        rows = self._timed("lookup", lambda: self.worker.lookup(batch_id))
        registered = RegisteredBatch(batch_id, batch.dense, batch.labels, batch.day)
        prepared, _ = self._timed("transfer", lambda: self.collection._transfer.rows(registered, rows))
        prepared.pooled = self._timed("pool", lambda: self._pooled(prepared))
        self._timed("hooks", lambda: prepared.await_gradient(batch_id, self._end_of_backward))
        return prepared

    def _pooled(self, prepared: PreparedBatch) -> PooledAhead:
        pooled = self.collection._expander.ahead(prepared.host_rows(), prepared.inverse, prepared.offsets)
        pooled.pool()
        return pooled

    def _train(self, prepared: PreparedBatch) -> None:
        """Makes the calls of the training thread, without the network."""
        assert prepared.pooled is not None
        embeddings = self._timed("take", prepared.pooled.embeddings)
        outputs = [values for values in embeddings.values() if isinstance(values, torch.Tensor)]  # All are pooled.
        ones = [torch.ones_like(output) for output in outputs]
        self._timed("keep", lambda: torch.autograd.backward(outputs, ones))

    def _end_of_backward(self, prepared: PreparedBatch) -> None:
        """Takes the gradients; rows in this process are never compressed."""
        self._gradients = self.collection._transfer.gradients_of(prepared, None, compressed=False)

    def _push(self, prepared: PreparedBatch) -> None:
        """Makes the calls of the push thread: see `StepPass`."""
        assert prepared.batch_id is not None
        contribution = Contribution(prepared.batch_id, *self._timed("pool_backward", self._gradients))
        self.steps += 1
        header = PushHeader(1, 0, self.steps, self.steps, len(prepared))
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
    """Seconds of each part, for one batch."""
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
