"""The embedding store against plain arrays: lookups, updates, insertion, memory.

    python -m benchmarks 'store.*' [--preset smoke|laptop|full] [--json FILE]

`full` takes 12 GB of memory in `store.growth`. Pauses are in `store_pauses.py`, hit rates in `hit_rates.py`.
"""

from __future__ import annotations

import functools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import runner
from persia.store import ROW_OVERHEAD, NativeStore, TableConfig

BATCH = 65_536
DIM = 16


@dataclass(frozen=True)
class Scale:
    """How much of everything a preset does."""

    rows: int
    large: int  # rows of the large table in store.growth
    small: int
    sizes: tuple[int, int]  # first and last size of a table in store.bytes_per_row
    batches: int  # per timing
    rounds: int


SCALES = {
    "smoke": Scale(300_000, 600_000, 100_000, (100_000, 400_000), 2, 1),
    "laptop": Scale(12_000_000, 20_000_000, 1_000_000, (1_000_000, 20_000_000), 20, 7),
    "full": Scale(12_000_000, 100_000_000, 1_000_000, (1_000_000, 20_000_000), 60, 15),
}
TABLES: dict[str, dict[str, Any]] = {
    "": {"dim": DIM},
    ".dim_8": {"dim": 8},
    ".rowwise": {"dim": DIM, "optimizer": "rowwise_adagrad"},
    ".bf16": {"dim": DIM, "dtype": "bfloat16"},
}
"""Settings of the tables of store.bytes_per_row, by the suffix of their measures."""
POINTS = 40
"""Sizes that the details of store.bytes_per_row have, at least."""


def ids_of(rows: np.ndarray) -> np.ndarray:
    """Row numbers to ids that are spread over 64 bits: a store must not profit from small, dense ids."""
    return rows.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def filled(rows: int, dim: int = DIM, threads: int = 1, files: str | None = None, **settings) -> NativeStore:
    store = NativeStore(threads)
    store.create_table(TableConfig("table", dim, **settings), files)
    out = np.empty((BATCH, store.config(0).row_words), np.float32)
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


def looking_up(store: NativeStore, batches: list[np.ndarray]) -> Callable[[], float]:
    out = [np.empty((len(batches[0]), store.config(0).row_words), np.float32)]
    keys = [ids_of(batch) for batch in batches]
    return rate(keys, lambda ids, _: store.lookup([0], [ids], True, out))


def selecting(table: torch.Tensor, batches: list[np.ndarray]) -> Callable[[], float]:
    out = torch.empty(len(batches[0]), table.shape[1])
    index = [torch.from_numpy(batch) for batch in batches]
    return rate(index, lambda rows, _: torch.index_select(table, 0, rows, out=out))


def lookup(name: str, preset: str, batches_of, target: float, **settings: Any) -> runner.Measure:
    scale = SCALES[preset]
    torch.set_num_threads(1)
    batches = batches_of(scale.rows, scale.batches)
    ours = looking_up(filled(scale.rows, **settings), batches)
    theirs = selecting(torch.randn(scale.rows, DIM), batches)
    return runner.ratio(name, ours=ours, theirs=theirs, of="rows/s", rounds=scale.rounds, at_least=target)


@runner.measures("store.lookup_uniform")
def lookup_uniform(preset: str) -> runner.Measure:
    """Existing rows, distinct uniform ids, LRU on, 1 thread, against `torch.index_select`."""
    return lookup("store.lookup_uniform", preset, uniform_batches, 0.9)


@runner.measures("store.lookup_zipf")
def lookup_zipf(preset: str) -> runner.Measure:
    """The same with Zipf(1.05) ids."""
    return lookup("store.lookup_zipf", preset, zipf_batches, 1.0)


@runner.measures("store.lookup_bf16")
def lookup_bf16(preset: str) -> runner.Measure:
    """As store.lookup_uniform, with rows of bfloat16, which are looked up as they are, against float32.

    NN workers widen the rows, which is not part of it.
    """
    return lookup("store.lookup_bf16", preset, uniform_batches, 1.2, dtype="bfloat16")


def update(name: str, preset: str, target: float, **settings: Any) -> runner.Measure:
    scale = SCALES[preset]
    torch.set_num_threads(1)
    batches = uniform_batches(scale.rows, scale.batches)
    store = filled(scale.rows, **settings)
    table = torch.randn(scale.rows, DIM)
    gradients = np.random.default_rng(1).normal(size=(len(batches[0]), DIM)).astype(np.float32)
    tensor = torch.from_numpy(gradients)
    keys = [ids_of(batch) for batch in batches]
    index = [torch.from_numpy(batch) for batch in batches]
    ours = rate(keys, lambda ids, number: store.update([0], [ids], [gradients], [0.05], number))
    theirs = rate(index, lambda rows, _: table.index_add_(0, rows, tensor))
    return runner.ratio(name, ours=ours, theirs=theirs, of="rows/s", rounds=scale.rounds, at_least=target)


@runner.measures("store.update_adagrad")
def update_adagrad(preset: str) -> runner.Measure:
    """Adagrad on existing rows, against `torch.index_add_`, 1 thread."""
    return update("store.update_adagrad", preset, 0.8)


@runner.measures("store.update_rowwise")
def update_rowwise(preset: str) -> runner.Measure:
    """The same with row-wise Adagrad, whose state is one float a row."""
    return update("store.update_rowwise", preset, 1.0, optimizer="rowwise_adagrad")


@runner.measures("store.update_adagrad_bf16", "store.update_rowwise_bf16")
def update_bf16(preset: str) -> Iterator[runner.Measure]:
    """Updates of bfloat16 rows, which are rounded at random, over updates of float32 rows; the same state."""
    scale = SCALES[preset]
    batches = [ids_of(batch) for batch in uniform_batches(scale.rows, scale.batches)]
    gradients = np.random.default_rng(1).normal(size=(len(batches[0]), DIM)).astype(np.float32)
    for optimizer in ("adagrad", "rowwise_adagrad"):
        rates = []
        for dtype in ("bfloat16", "float32"):
            store = filled(scale.rows, dtype=dtype, optimizer=optimizer)
            rates.append(rate(batches, functools.partial(_push, store, gradients)))
        name = f"store.update_{optimizer.removesuffix('_adagrad')}_bf16"
        yield runner.ratio(name, ours=rates[0], theirs=rates[1], of="rows/s", rounds=scale.rounds)


def _push(store: NativeStore, gradients: np.ndarray, ids: np.ndarray, step: int) -> None:
    store.update([0], [ids], [gradients], [0.05], step)


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

    rates = [measure() for _ in range(runner.rounds_of(preset))]
    return runner.quantity("store.insert", rates, "rows/s", at_least=9e6)


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
    """Time per row of a lookup in a large table over that in one of 1 M rows, over the same of `torch.index_select`.

    1 thread, rows of 8 floats without optimizer state, so that 100 M of them fit (`full`; `laptop` has 20 M).
    """
    scale = SCALES[preset]
    torch.set_num_threads(1)
    large, small = (uniform_batches(rows, scale.batches) for rows in (scale.large, scale.small))
    ours = [
        looking_up(filled(rows, 8, optimizer="sgd"), batches)
        for rows, batches in ((scale.large, large), (scale.small, small))
    ]
    theirs = [selecting(torch.ones(rows, 8), batches) for rows, batches in ((scale.large, large), (scale.small, small))]
    rounds = [[measure() for measure in (*ours, *theirs)] for _ in range(scale.rounds)]
    return runner.quantity(
        "store.growth",
        [
            (our_small / our_large) / (their_small / their_large)
            for our_large, our_small, their_large, their_small in rounds
        ],
        "ratio",
        at_most=1.2,
        details={
            "of": "growth of the time per row",
            "rows": [scale.small, scale.large],
            "ours": statistics.median(small / large for large, small, _, _ in rounds),
            "theirs": statistics.median(small / large for _, _, large, small in rounds),
        },
    )


def resident_bytes() -> int:
    """Memory of this process that is in use, as the system counts it."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def bytes_beyond_payload(first: int, last: int, settings: dict[str, Any]) -> tuple[list[tuple[int, float]], float]:
    """Per row: (rows, bytes) of each size from `first` to `last` rows; and at the last one, as the system counts."""
    before = resident_bytes()
    store = filled(0, **settings)
    config = store.config(0)
    payload = config.row_bytes - ROW_OVERHEAD
    out = np.empty((BATCH, config.row_words), np.float32)
    beyond = []
    for start in range(0, last, BATCH):
        store.lookup([0], [ids_of(np.arange(start, start + BATCH))], True, [out])
        if store.size(0) >= first:
            beyond.append((store.size(0), store.memory_bytes(0) / store.size(0) - payload))
    return beyond, (resident_bytes() - before) / store.size(0) - payload


@runner.measures(*(f"store.bytes_per_row{suffix}{kind}" for suffix in TABLES for kind in ("", ".worst")))
def bytes_per_row(preset: str) -> Iterator[runner.Measure]:
    """Bytes per row beyond embedding and optimizer state, index and padding included: mean and worst of many sizes.

    The sizes are even steps of a table that grows from 1 M to 20 M rows. `resident` is the figure of the last size if
    the system counts the memory of the process.
    """
    first, last = SCALES[preset].sizes
    for suffix, settings in TABLES.items():
        sizes, resident = bytes_beyond_payload(first, last, settings)
        beyond = [each for _, each in sizes]
        points = [[rows, round(each, 1)] for rows, each in sizes[:: max(1, len(sizes) // POINTS)]]
        details = {"sizes": [first, last], "resident": resident, "by_size": points}
        name = f"store.bytes_per_row{suffix}"
        yield runner.Measure(name, statistics.fmean(beyond), "bytes", at_most=28.0, details=details)
        yield runner.Measure(f"{name}.worst", max(beyond), "bytes", at_most=40.0, details=details)
