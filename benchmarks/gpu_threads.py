"""What threads give on the host of a GPU: rows/s of a PS, and the parts of a step, by the number of threads.

    python -m benchmarks 'gpu.threads*' [--preset smoke|laptop|full] [--json FILE]

gpu.threads        Rows/s that an embedding worker and a PS in this process look up and update, with as many threads as
                   there are processors, up to 16, over those with one.
gpu.threads.step   Samples/s of the step of `benchmarks/gpu.py`, with as many threads of both, over those with one.

The details have the profile by number of threads: seconds of each part of a batch, alone in the process, with the
processors that were busy in it, and the same next to a thread that trains the network on the GPU and holds the
interpreter at times. A part that is not faster with more threads has no more than one processor busy (its work is not
divided, or it is Python), or all of them (it is bound by the memory, as `select` is: plain `torch.index_select`).
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from benchmarks import runner
from benchmarks.baselines.step_torch import DenseOnly, Workload, generate
from benchmarks.gpu import ADAGRAD
from benchmarks.step import WORK, Persia
from persia import IdColumn, IdFeature, Schema, batching
from persia.cluster import Embedded
from persia.modes import Hybrid
from persia.nn.staging import array_block
from persia.ps import EmbeddingServer
from persia.types import Contribution, Packed, PushHeader
from persia.worker import Worker

THREADS = (1, 2, 4, 8, 16)
PARTS = ("register", "lookup", "block", "push", "select")
TARGET = 6.0
"""Rows/s at 16 threads over those at one."""


@dataclass(frozen=True)
class Scale:
    """How much of everything a preset does."""

    work: Workload
    batches: int  # of each number of threads, and as many before
    steps: int  # of `gpu.threads.step` in each round


SCALES = {
    "smoke": Scale(WORK["smoke"], 2, 2),
    "laptop": Scale(Workload(batches=16), 32, 20),
    "full": Scale(Workload(batches=16), 100, 100),
}


class Host:
    """An embedding worker and a PS in this process, and what an NN worker does with their rows before a copy.

    Args:
        work: shape of the batches.
        threads: of each role, and of `torch.index_select`.
        pin_memory: whether rows are copied to pinned memory, which needs a CUDA device.
    """

    def __init__(self, work: Workload, threads: int, *, pin_memory: bool) -> None:
        names = [f"f{i}" for i in range(work.features)]
        schema = Schema([IdFeature(name, dim=work.dim) for name in names])
        server = EmbeddingServer(schema.resolved_tables(), ADAGRAD, Hybrid(1, warmup=0), 0, threads)
        self.threads = threads
        self._worker = Worker(schema, [server], threads)
        self._batches = [
            {name: IdColumn(ids.astype(np.uint64)) for name, ids in zip(names, samples.ids, strict=True)}
            for samples in generate(work)
        ]
        self._copying = batching.ThreadPool(threads)
        self._pinned = pin_memory
        self._table = torch.zeros(work.rows, work.dim)
        self._rows = work.batch
        self._steps = 0

    def step(self, parts: dict[str, list[tuple[float, float]]]) -> int:
        """Looks up and updates the rows of a batch, with gradients of 1. Returns the number of its distinct rows.

        Args:
            parts: gets the seconds of each part, and the processor seconds of the process in it.
        """
        batch = self._batches[self._steps % len(self._batches)]
        self._steps += 1

        def timed(part: str, work: Callable[[], Any]) -> Any:
            began, used = time.perf_counter(), time.process_time()
            result = work()
            parts.setdefault(part, []).append((time.perf_counter() - began, time.process_time() - used))
            return result

        batch_id = timed("register", lambda: self._worker.register(batch))
        rows = timed("lookup", lambda: self._worker.lookup(batch_id)).rows
        timed("block", lambda: array_block({"rows": rows.buffer}, self._copying, pin_memory=self._pinned))
        gradients = Packed(rows.names, rows.counts, np.ones_like(rows.buffer), rows.widths)
        header = PushHeader(1, 0, self._steps, self._steps, self._rows)
        timed("push", lambda: self._worker.push(header, [Contribution(batch_id, gradients)]))
        count = sum(rows.counts)
        ids = torch.arange(count) * 7919 % len(self._table)
        timed("select", lambda: self._table.index_select(0, ids))
        return count

    def profile(self, batches: int) -> dict[str, Any]:
        """Returns rows/s, and by part the milliseconds of a batch and the processors that were busy: medians."""
        torch.set_num_threads(self.threads)
        parts: dict[str, list[tuple[float, float]]] = {}
        rows = [self.step(parts) for _ in range(batches)]
        both = [sum(part) for part in zip(*([t for t, _ in parts[n]] for n in ("lookup", "push")), strict=True)]
        found: dict[str, Any] = {"rows_per_s": statistics.median(n / s for n, s in zip(rows, both, strict=True))}
        for part in PARTS:
            seconds = [t for t, _ in parts[part]]
            found[f"{part}_ms"] = round(1e3 * statistics.median(seconds), 3)
            found[f"{part}_processors"] = round(sum(used for _, used in parts[part]) / sum(seconds), 2)
        return found


@contextlib.contextmanager
def training(work: Workload) -> Iterator[None]:
    """A thread that trains the network alone, meanwhile."""
    dense, ended = DenseOnly(work, generate(work)), threading.Event()
    dense.step()

    def train() -> None:
        while not ended.is_set():
            dense.step()
            dense.drain()

    thread = threading.Thread(target=train)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def numbers() -> list[int]:
    """Numbers of threads that this machine can run at the same time."""
    return [n for n in THREADS if n <= len(os.sched_getaffinity(0))]


def gpu_of(device: str) -> str | None:
    """Returns the name of the device; None of the CPU."""
    return torch.cuda.get_device_name(0) if device == "cuda" else None


def by_threads(preset: str, device: str) -> runner.Measure:
    """Rows/s with the most threads over those with one, with the profile of all numbers."""
    scale, before = SCALES[preset], torch.get_num_threads()
    profiles: dict[int, dict[str, Any]] = {}
    try:
        for threads in numbers():
            host = Host(scale.work, threads, pin_memory=device != "cpu")
            host.profile(max(scale.batches, len(host._batches)))  # Every id gets its row.
            profiles[threads] = host.profile(scale.batches)
            with training(replace(scale.work, batches=2, device=device)):
                profiles[threads]["beside_training"] = host.profile(scale.batches)
    finally:
        torch.set_num_threads(before)
    most = max(profiles)
    ratio = profiles[most]["rows_per_s"] / profiles[1]["rows_per_s"]
    details = {
        "gpu": torch.cuda.get_device_name(0) if device == "cuda" else None,
        "of": "rows/s",
        "threads": most,
        "by_threads": profiles,
    }
    return runner.Measure(
        "gpu.threads", ratio, "ratio", at_least=TARGET if most == max(THREADS) else None, details=details
    )


def steps_by_threads(preset: str, device: str) -> runner.Measure:
    """Samples/s of whole steps with the most threads over those with one; in Hybrid(4), in threads of persia."""
    scale, rates = SCALES[preset], dict[int, float]()
    work = replace(scale.work, device=device)
    data = generate(work)
    for threads in numbers():
        variant = Persia(work, data, ADAGRAD, Embedded(threads))
        try:
            variant.time(2 * len(data))
            seconds = [variant.time(scale.steps) for _ in range(runner.rounds_of(preset))]
            rates[threads] = work.batch * scale.steps / statistics.median(seconds)
        finally:
            variant.close()
    most = max(rates)
    rates_of = {n: round(rate) for n, rate in rates.items()}
    details = {
        "gpu": torch.cuda.get_device_name(0) if device == "cuda" else None,
        "of": "rows/s",
        "threads": most,
        "by_threads": rates_of,
    }
    return runner.Measure("gpu.threads.step", rates[most] / rates[1], "ratio", details=details)


@runner.measures("gpu.threads", "gpu.threads.step")
def threads(preset: str, selected: set[str]) -> Iterator[runner.Measure]:
    """Both, on the host of a CUDA device."""
    if not torch.cuda.is_available():
        print(f"gpu.threads is skipped: torch {torch.__version__} sees no CUDA device.", file=sys.stderr)
        return
    if "gpu.threads" in selected:
        yield by_threads(preset, "cuda")
    if "gpu.threads.step" in selected:
        yield steps_by_threads(preset, "cuda")
