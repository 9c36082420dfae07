"""Duplicate removal and pooling of one batch against the operations of PyTorch that do the same.

    python -m benchmarks 'batch.*' [--preset smoke|laptop|full] [--json FILE]

Both sides use one thread, on the ids of one batch: 26 features x 4,096 samples.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from benchmarks import runner
from persia import batching

FEATURES = 26
SAMPLES = 4096
DIM = 16
VOCABULARY = 1_000_000
ROUNDS = {"smoke": 1, "laptop": 15, "full": 31}
REPEATS = 10


def ids_of_a_batch(skew: str) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    uniform = rng.random((FEATURES, SAMPLES))
    ids = VOCABULARY * uniform**3 if skew == "cubic" else VOCABULARY**uniform
    return list(ids.astype(np.uint64))


def rate(call: Callable[[], object]) -> Callable[[], float]:
    """Calls per second, of a few calls in a row."""

    def measure() -> float:
        start = time.perf_counter()
        for _ in range(REPEATS):
            call()
        return REPEATS / (time.perf_counter() - start)

    call()
    return measure


def compare(name: str, preset: str, ours: Callable[[], object], theirs: Callable[[], object], target: float | None):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return runner.ratio(
            name, ours=rate(ours), theirs=rate(theirs), of="calls/s", rounds=ROUNDS[preset], at_least=target
        )
    finally:
        torch.set_num_threads(threads)


@runner.measures("batch.unique")
def unique(preset: str, name: str = "batch.unique", skew: str = "cubic", target: float | None = 4.0):
    """One table, 106,496 ids, against `torch.unique(return_inverse=True)`."""
    ids = np.concatenate(ids_of_a_batch(skew))
    tensor = torch.from_numpy(ids.astype(np.int64))
    pool, scratch = batching.ThreadPool(1), batching.Scratch()
    return compare(
        name,
        preset,
        lambda: batching.unique([[ids]], pool, scratch),
        lambda: torch.unique(tensor, return_inverse=True),
        target,
    )


@runner.measures("batch.unique_zipf")
def unique_zipf(preset: str):
    """The same with Zipf(1) ids."""
    return unique(preset, "batch.unique_zipf", "zipf", None)


@runner.measures("batch.unique_tables")
def unique_tables(preset: str):
    """26 tables in one call, against one `torch.unique` each."""
    ids = ids_of_a_batch("cubic")
    tensors = [torch.from_numpy(i.astype(np.int64)) for i in ids]
    pool, scratch = batching.ThreadPool(1), batching.Scratch()
    return compare(
        "batch.unique_tables",
        preset,
        lambda: batching.unique([[i] for i in ids], pool, scratch),
        lambda: [torch.unique(tensor, return_inverse=True) for tensor in tensors],
        None,
    )


def pooling_setup():
    pool, scratch = batching.ThreadPool(1), batching.Scratch()
    unique = batching.unique([[ids] for ids in ids_of_a_batch("cubic")], pool, scratch)
    rng = np.random.default_rng(1)
    rows = [rng.standard_normal((len(ids), DIM), np.float32) for ids, _ in unique]
    plans = [batching.FeaturePlan(table, inverse) for table, (_, (inverse,)) in enumerate(unique)]
    buffer = rng.standard_normal((SAMPLES, FEATURES * DIM), np.float32)
    slices = [buffer[:, DIM * f : DIM * (f + 1)] for f in range(FEATURES)]
    index = [torch.from_numpy(plan.inverse.astype(np.int64)) for plan in plans]
    return pool, scratch, rows, plans, buffer, slices, index


@runner.measures("batch.pool_forward")
def pool_forward(preset: str):
    """26 single-valued features into one buffer, against `torch.index_select` of each and `torch.cat`."""
    pool, _, rows, plans, _, slices, index = pooling_setup()
    tensors = [torch.from_numpy(r) for r in rows]
    return compare(
        "batch.pool_forward",
        preset,
        lambda: batching.pool_forward(rows, plans, pool, slices),
        lambda: torch.cat([t.index_select(0, i) for t, i in zip(tensors, index, strict=True)], 1),
        None,
    )


@runner.measures("batch.pool_backward")
def pool_backward(preset: str):
    """The gradients of the same rows, against `torch.index_add_` into zeros."""
    pool, scratch, rows, plans, buffer, slices, index = pooling_setup()
    out = [np.empty_like(r) for r in rows]
    tensors = [torch.from_numpy(r) for r in rows]
    parts = torch.from_numpy(buffer).split(DIM, 1)
    return compare(
        "batch.pool_backward",
        preset,
        lambda: batching.pool_backward([r.shape for r in rows], plans, slices, pool, scratch, out),
        lambda: [t.zero_().index_add_(0, i, g) for t, i, g in zip(tensors, index, parts, strict=True)],
        None,
    )
