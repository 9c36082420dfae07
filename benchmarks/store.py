"""The embedding store against plain arrays.

python -m benchmarks 'store.*' [--preset smoke|laptop|full] [--json FILE]
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks import runner
from persia.store import NativeStore, TableConfig

BATCH = 65_536
DIM = 16


@dataclass(frozen=True)
class Scale:
    """How much of everything a preset does."""

    rows: int
    large: int  # rows of the large table in store.growth
    small: int
    batches: int  # per timing
    rounds: int


SCALES = {
    "smoke": Scale(300_000, 1_000_000, 100_000, 4, 5),
    "laptop": Scale(12_000_000, 100_000_000, 1_000_000, 20, 7),
    "full": Scale(12_000_000, 100_000_000, 1_000_000, 60, 15),
}


def ids_of(rows: np.ndarray) -> np.ndarray:
    """Row numbers to ids that are spread over 64 bits: a store must not profit from small, dense ids."""
    return rows.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def filled(rows: int, dim: int = DIM, threads: int = 1, **settings) -> NativeStore:
    store = NativeStore(threads)
    store.create_table(TableConfig("table", dim, **settings))
    out = np.empty((BATCH, dim), np.float32)
    for start in range(0, rows, BATCH):
        ids = ids_of(np.arange(start, min(start + BATCH, rows)))
        store.lookup([0], [ids], True, [out[: len(ids)]])
    return store


def uniform_batches(rows: int, count: int) -> list[np.ndarray]:
    """Distinct row numbers per batch."""
    random = np.random.default_rng(0)
    return [random.choice(rows, min(BATCH, rows // 2), replace=False, shuffle=True) for _ in range(count)]


def zipf_batches(rows: int, count: int, exponent: float = 1.05) -> list[np.ndarray]:
    """Zipf(1.05) over all rows, popular rows spread over the table; repeated as they come."""
    random = np.random.default_rng(0)
    weights = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -exponent)
    place = random.permutation(rows)
    ranks = [np.searchsorted(weights, random.random(BATCH) * weights[-1]) for _ in range(count)]
    return [place[rank] for rank in ranks]


def rate(batches: list[np.ndarray], call: Callable[[np.ndarray, int], object]) -> Callable[[], float]:
    """Rows per second over all batches."""

    def measure() -> float:
        start = time.perf_counter()
        for number, batch in enumerate(batches):
            call(batch, number)
        return sum(map(len, batches)) / (time.perf_counter() - start)

    measure()
    return measure


def looking_up(store: NativeStore, batches: list[np.ndarray], dim: int = DIM) -> Callable[[], float]:
    out = [np.empty((len(batches[0]), dim), np.float32)]
    keys = [ids_of(batch) for batch in batches]
    return rate(keys, lambda ids, _: store.lookup([0], [ids], True, out))


def selecting(table: torch.Tensor, batches: list[np.ndarray]) -> Callable[[], float]:
    out = torch.empty(len(batches[0]), table.shape[1])
    index = [torch.from_numpy(batch) for batch in batches]
    return rate(index, lambda rows, _: torch.index_select(table, 0, rows, out=out))


def lookup(name: str, preset: str, batches_of, target: float) -> runner.Measure:
    scale = SCALES[preset]
    torch.set_num_threads(1)
    batches = batches_of(scale.rows, scale.batches)
    ours = looking_up(filled(scale.rows), batches)
    theirs = selecting(torch.randn(scale.rows, DIM), batches)
    return runner.ratio(name, ours=ours, theirs=theirs, of="rows/s", rounds=scale.rounds, at_least=target)


@runner.measures("store.lookup_uniform")
def lookup_uniform(preset: str) -> runner.Measure:
    """Existing rows, distinct uniform ids, LRU on, 1 thread, against `torch.index_select`."""
    return lookup("store.lookup_uniform", preset, uniform_batches, 0.8)


@runner.measures("store.lookup_zipf")
def lookup_zipf(preset: str) -> runner.Measure:
    """The same with Zipf(1.05) ids."""
    return lookup("store.lookup_zipf", preset, zipf_batches, 1.0)


@runner.measures("store.update_adagrad")
def update_adagrad(preset: str) -> runner.Measure:
    """Adagrad on existing rows, against `torch.index_add_`, 1 thread."""
    scale = SCALES[preset]
    torch.set_num_threads(1)
    batches = uniform_batches(scale.rows, scale.batches)
    store = filled(scale.rows)
    table = torch.randn(scale.rows, DIM)
    gradients = np.random.default_rng(1).normal(size=(len(batches[0]), DIM)).astype(np.float32)
    tensor = torch.from_numpy(gradients)
    keys = [ids_of(batch) for batch in batches]
    index = [torch.from_numpy(batch) for batch in batches]
    ours = rate(keys, lambda ids, number: store.update([0], [ids], [gradients], [0.05], number))
    theirs = rate(index, lambda rows, _: table.index_add_(0, rows, tensor))
    return runner.ratio(
        "store.update_adagrad", ours=ours, theirs=theirs, of="rows/s", rounds=scale.rounds, at_least=0.6
    )


@runner.measures("store.insert")
def insert(preset: str) -> runner.Measure:
    """New rows into an empty table, Adagrad state included, all cores (touching new memory is most of it)."""
    scale = SCALES[preset]
    batches = [ids_of(np.arange(start, start + BATCH)) for start in range(0, scale.rows, BATCH)]
    out = [np.empty((BATCH, DIM), np.float32)]

    def measure() -> float:
        # A virtual machine pays its host for the first touch of memory, several times what the store itself needs per
        # row: touch as much as the store will use, and free it again.
        np.ones(scale.rows * 24)
        store = filled(0, threads=len(os.sched_getaffinity(0)))
        start = time.perf_counter()
        for ids in batches:
            store.lookup([0], [ids], True, out)
        return len(batches) * BATCH / (time.perf_counter() - start)

    rates = [measure() for _ in range(runner.MIN_ROUNDS)]
    return runner.quantity("store.insert", rates, "rows/s", at_least=8e6)


@runner.measures("store.threads")
def threads(preset: str) -> runner.Measure:
    """Lookups with 2 threads over those with 1, the same table settings."""
    scale = SCALES[preset]
    batches = uniform_batches(scale.rows, scale.batches)
    two = looking_up(filled(scale.rows, threads=2), batches)
    one = looking_up(filled(scale.rows, threads=1), batches)
    return runner.ratio("store.threads", ours=two, theirs=one, of="rows/s", rounds=scale.rounds, at_least=1.7)


@runner.measures("store.growth")
def growth(preset: str) -> runner.Measure:
    """Lookups in a table of 100 M rows over those in one of 1 M, dim 8."""
    scale = SCALES[preset]
    large = looking_up(filled(scale.large, 8), uniform_batches(scale.large, scale.batches), 8)
    small = looking_up(filled(scale.small, 8), uniform_batches(scale.small, scale.batches), 8)
    return runner.ratio("store.growth", ours=large, theirs=small, of="rows/s", rounds=scale.rounds, at_least=0.6)


@runner.measures("store.bytes_per_row")
def bytes_per_row(preset: str) -> runner.Measure:
    """Bytes per row beyond embedding and optimizer state, index included: the worst over the growth of a table."""
    scale = SCALES[preset]
    store = NativeStore()
    index = store.create_table(TableConfig("table", DIM))
    config = store.config(index)
    payload = 4 * (config.dim + config.state_width)
    worst = []
    for start in range(0, scale.rows, BATCH):
        store.lookup([index], [ids_of(np.arange(start, start + BATCH))], True)
        worst.append(store.memory_bytes(index) / store.size(index) - payload)
    settled = worst[min(10, len(worst) // 2) :]  # the fixed header of a small table is not per row
    return runner.Measure("store.bytes_per_row", max(settled), "bytes", at_most=40.0)
