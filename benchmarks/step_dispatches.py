"""How many operations the training thread dispatches for the embeddings of a batch, and how many functions are called.

    python -m benchmarks 'step.dispatches*' 'step.python_calls*' [--preset smoke|laptop|full] [--json FILE]

Each one is a kernel or a view on a GPU, and holds the interpreter while it is launched; their number, not their size,
decides the time of a small step. They are counted on tensors of the CPU that go the way of a GPU: pooling, the sum of
gradients by row, and the copy of these from one block. Nothing is timed. A network's own operations do not count.

`step.python_calls*` counts the functions, of Python and native, that Python calls for a batch on the same way: from its
registration and lookup to the block on the device, forward, backward, and from the block of gradients to the update of
the rows, all in one thread and one process. Whoever makes them holds the interpreter.
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import runner
from persia import Batch, IdColumn, IdFeature, Schema
from persia.modes import Hybrid, Mode, Sync
from persia.nn import EmbeddingCollection, SequenceEmbedding
from persia.nn.staging import CpuStaging, Ready, Then, array_block, block_tensors, nothing_to_do, tensor_block
from persia.schema import Adagrad
from persia.schema.features import Pooling

FEATURES, DIM, IDS = 26, 16, 5
SIZES = {"smoke": 32, "laptop": 1024, "full": 4096}
BEFORE = {"single": 43, "sum": 132}
"""Without the copy of the gradients, before features were pooled together (docs/decisions/0036)."""
CALLS_BEFORE = {1: 2718, IDS: 3174}
"""By ids per sample, before rows and gradients were left in one piece (docs/decisions/0039)."""


class Blocks(CpuStaging):
    """Copies in one block each way, as the staging of a GPU does."""

    on_host = False

    def to_device(self, arrays: Mapping[str, Any], then: Then | None = None) -> tuple[dict[str, torch.Tensor], Ready]:
        """Copies a block."""
        block, parts = array_block(arrays)
        tensors = block_tensors(block.clone(), parts)
        return (tensors if then is None else then(tensors)), nothing_to_do

    def to_host(self, tensors: Mapping[str, torch.Tensor]) -> Callable[[], dict[str, Any]]:
        """Copies a block; the thread that pushes takes it apart."""
        block, parts = tensor_block(tensors)
        copy = block.clone()
        return lambda: {name: tensor.numpy() for name, tensor in block_tensors(copy, parts).items()}


def go_the_way_of_a_gpu(embeddings: EmbeddingCollection) -> None:
    """Lets the tensors of a CPU go the way of a GPU: copied as blocks, and pooled by torch."""
    embeddings._expander.on_host = embeddings._transfer._on_host = False
    embeddings._staging = embeddings._transfer._staging = Blocks()


class Dispatched(TorchDispatchMode):
    """Counts the operations that the thread dispatches."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Counts an operation, and performs it."""
        self.operations[str(func)] += 1
        return func(*args, **(kwargs or {}))


def batch_of(size: int, ids: int, seed: int) -> Batch:
    """Returns samples of which each has one id per feature, or several."""
    rng = np.random.default_rng(seed)
    offsets = None if ids == 1 else np.arange(0, ids * size + 1, ids, dtype=np.int64)
    columns = {
        f"f{number}": IdColumn(rng.integers(0, 1000, ids * size).astype(np.uint64), offsets)
        for number in range(FEATURES)
    }
    return Batch(columns, np.zeros((size, 0), np.float32), np.zeros((size, 1), np.float32))


def collection(pooling: Pooling | None, mode: Mode, *, on_gpu: bool) -> EmbeddingCollection:
    """Returns a collection of features of one kind."""
    most = IDS if pooling is None else None
    schema = Schema(
        [IdFeature(f"f{n}", dim=DIM, pooling=pooling, max_length=most) for n in range(FEATURES)], labels=["click"]
    )
    embeddings = EmbeddingCollection(schema, optimizer=Adagrad(lr=0.05), mode=mode)
    if on_gpu:
        go_the_way_of_a_gpu(embeddings)
    return embeddings


def dispatched(size: int, pooling: Pooling | None, ids: int, *, on_gpu: bool) -> collections.Counter[str]:
    """Returns the operations of the last of a few batches of features of one kind."""
    embeddings = collection(pooling, Hybrid(2, warmup=0), on_gpu=on_gpu)
    count = Dispatched()
    for batch in embeddings.prefetch(batch_of(size, ids, seed) for seed in range(3)):
        count = Dispatched()
        with count:
            found = embeddings(batch)
        values = [one.values if isinstance(one, SequenceEmbedding) else one for one in found.values()]
        gradients = [torch.ones_like(one) for one in values]
        with count:
            torch.autograd.backward(values, gradients)
    return count.operations


def counted(name: str, preset: str, pooling: Pooling, ids: int, before: int) -> runner.Measure:
    """Counts the operations for features with so many ids in each sample."""
    operations = dispatched(SIZES[preset], pooling, ids, on_gpu=True)
    of_kinds: dict[str, int] = {}
    if ids > 1:
        of_kinds = {
            str(kind): dispatched(SIZES[preset], kind, ids, on_gpu=True).total() for kind in ("mean", "sqrtn", None)
        }
    details = {
        "features": FEATURES,
        "before": before,
        "operations": dict(operations),
        "other_poolings": of_kinds,
        "native_core": dispatched(SIZES[preset], pooling, ids, on_gpu=False).total(),
    }
    return runner.Measure(name, operations.total(), "operations", at_most=24, details=details)


@runner.measures("step.dispatches")
def of_single_ids(preset: str) -> runner.Measure:
    """26 features with one id per sample."""
    return counted("step.dispatches", preset, "sum", 1, BEFORE["single"])


@runner.measures("step.dispatches_of_bags")
def of_bags(preset: str) -> runner.Measure:
    """26 features with several ids per sample."""
    return counted("step.dispatches_of_bags", preset, "sum", IDS, BEFORE["sum"])


class Calls:
    """Counts the functions that the thread calls, by part of a step."""

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()

    @contextmanager
    def of(self, part: str) -> Iterator[None]:
        """Counts the calls of the block."""

        def called(frame: object, event: str, function: object) -> None:
            if event in ("call", "c_call"):
                self.counts[part] += 1

        sys.setprofile(called)
        try:
            yield
        finally:
            sys.setprofile(None)


def called(size: int, ids: int, *, on_gpu: bool) -> collections.Counter[str]:
    """Returns the calls for the last of a few batches: when it is drawn, which pushes the one before, and trained."""
    embeddings = collection("sum", Sync(), on_gpu=on_gpu)
    batches = embeddings.prefetch([batch_of(size, ids, seed) for seed in range(6)])
    calls = Calls()
    for _ in range(5):
        calls = Calls()
        with calls.of("draw"):
            batch = next(batches)
        with calls.of("forward"):
            found = embeddings(batch)
        loss = sum(one.values.sum() if isinstance(one, SequenceEmbedding) else one.sum() for one in found.values())
        assert isinstance(loss, torch.Tensor)
        with calls.of("backward"):
            loss.backward()
    batches.close()
    return calls.counts


def counted_calls(name: str, preset: str, ids: int) -> runner.Measure:
    """Counts the calls for features with so many ids in each sample."""
    calls = called(SIZES[preset], ids, on_gpu=True)
    details = {
        "features": FEATURES,
        "before": CALLS_BEFORE[ids],
        "calls": dict(calls),
        "native_core": called(SIZES[preset], ids, on_gpu=False).total(),
    }
    return runner.Measure(name, calls.total(), "calls", details=details)


@runner.measures("step.python_calls")
def calls_of_single_ids(preset: str) -> runner.Measure:
    """26 features with one id per sample."""
    return counted_calls("step.python_calls", preset, 1)


@runner.measures("step.python_calls_of_bags")
def calls_of_bags(preset: str) -> runner.Measure:
    """26 features with several ids per sample."""
    return counted_calls("step.python_calls_of_bags", preset, IDS)
