"""A whole training step: persia against plain PyTorch, TorchRec's fused kernels, and the network alone.

    python -m benchmarks 'step.*' [--preset smoke|laptop|full] [--json FILE]

Persia is in its default mode, `Hybrid("auto")`, and in `Sync()` for names that end with `.sync`. Each peer runs in a
separate process. TorchRec also has its own environment: create it with benchmarks/baselines/torchrec_env.sh; without it
its measures are skipped, and say so.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from benchmarks import runner
from benchmarks.baselines.step_torch import DenseOnly, Plain, Samples, TorchRec, Variant, Workload, generate
from benchmarks.elsewhere import AS_A_PROGRAM, started
from persia import Batch, IdColumn, IdFeature, Schema
from persia.modes import Hybrid, Mode, Sync
from persia.nn import CollectionOptions, EmbeddingCollection
from persia.schema import Adagrad, EmbeddingOptimizer, RowwiseAdagrad
from persia.services import Cluster
from persia.types.half_floats import Dtype

WORK = {"smoke": Workload(rows=2_000, batch=128, batches=2), "laptop": Workload(), "full": Workload()}
STEPS = {"smoke": 5, "laptop": 20, "full": 50}
BESIDE_STEPS = 5
"""At most so many steps a round beside other processes."""
ROUNDS = {"smoke": 1, "laptop": 9, "full": 15}
MODES: Mapping[str, tuple[Mode, str]] = {"": (Hybrid(), 'Hybrid("auto")'), ".sync": (Sync(), "Sync()")}
"""The default mode and the exact one, by the end of a name, with their names in a line of a benchmark."""

FIRST = 0.01
"""Initial accumulator of Adagrad here and in `step_torch.Plain`, so that both make the same steps."""


class Persia(Variant):
    """The same network and data with `EmbeddingCollection`, in Hybrid(4) or another mode."""

    def __init__(
        self,
        work: Workload,
        data: list[Samples],
        optimizer: EmbeddingOptimizer,
        cluster: Cluster | None = None,
        dtype: Dtype = "float32",
        mode: Mode = Hybrid(4, warmup=0),  # noqa: B008 - frozen
        one_thread: bool | None = None,
    ) -> None:
        super().__init__(work, data)
        names = [f"f{i}" for i in range(work.features)]
        features = [IdFeature(name, dim=work.dim, dtype=dtype) for name in names]
        schema = Schema(features, [f"d{i}" for i in range(work.dense)])
        self.embeddings = EmbeddingCollection(
            schema,
            optimizer=optimizer,
            mode=mode,
            cluster=cluster,
            options=CollectionOptions(work.device, one_thread=one_thread),
        )
        batches = [
            Batch({n: IdColumn(ids.astype(np.uint64)) for n, ids in zip(names, s.ids, strict=True)}, s.dense, s.labels)
            for s in data
        ]
        self.prefetched: Iterator = self.embeddings.prefetch(itertools.cycle(batches))

    def step(self) -> None:
        """One training step."""
        batch = next(self.prefetched)
        self.backward(list(self.embeddings(batch).values()), batch)

    def drain(self) -> None:
        """Waits until the gradient of each step is applied. Later batches are looked up meanwhile, as far as may be."""
        super().drain()
        self.embeddings.await_pushes()

    def close(self) -> None:
        """Ends the background threads."""
        self.prefetched.close()


class Apart:
    """A variant in a separate process.

    Args:
        kind: of the variant.
        work: the workload, which is generated there.
    """

    def __init__(self, kind: type[Variant], work: Workload) -> None:
        self._pipe, self._process = started(_serve, AS_A_PROGRAM, kind, work, torch.get_num_threads())

    def time(self, steps: int) -> float:
        """Seconds for `steps` steps."""
        self._pipe.send(steps)
        return float(self._pipe.recv())

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _serve(pipe: Connection, kind: type[Variant], work: Workload, threads: int) -> None:
    torch.set_num_threads(threads)
    variant = kind(work)
    while True:
        pipe.send(variant.time(pipe.recv()))


Make = Callable[[Workload, list[Samples]], Any]
"""Makes one side of a comparison, which has `time` and `close` as a `Variant` has."""


def compared(
    name: str,
    preset: str,
    work: Workload,
    ours_of: Make,
    theirs_of: Make,
    target: float | None = None,
    details: Mapping[str, Any] | None = None,
    beside: int = 0,
    data: list[Samples] | None = None,
) -> runner.Measure:
    """Samples/s of two variants, alternating; in short rounds beside other processes."""
    data = generate(work) if data is None else data
    theirs = theirs_of(work, data)
    ours = ours_of(work, data)
    try:
        steps = min(STEPS[preset], BESIDE_STEPS) if beside else STEPS[preset]
        # The first rounds fill the tables: every id of the batches gets its row.
        for variant in (ours, theirs):
            variant.time(2 * len(data))
        return runner.ratio(
            name,
            ours=lambda: work.batch * steps / ours.time(steps),
            theirs=lambda: work.batch * steps / theirs.time(steps),
            of="rows/s",
            rounds=ROUNDS[preset],
            at_least=target,
            details=details,
        )
    finally:
        ours.close()
        theirs.close()


def compare_to(
    kind: type[Variant], preset: str, name: str, target: float, end: str = "", beside: int = 0
) -> runner.Measure:
    """Samples/s of persia over samples/s of a variant in a separate process; `end` selects one of `MODES`."""
    adagrad = Adagrad(lr=0.05, initial_accumulator=FIRST)
    mode, called = MODES[end]
    return compared(
        name + end,
        preset,
        WORK[preset],
        lambda work, data: Persia(work, data, adagrad, mode=mode),
        lambda work, _: Apart(kind, work),
        target,
        {"mode": called},
        beside,
    )


def compare_to_torchrec(
    preset: str,
    name: str,
    target: float | None,
    ours: Dtype = "float32",
    theirs: Dtype = "float32",
    end: str = "",
    beside: int = 0,
    **shape: Any,
) -> runner.Measure | None:
    """Samples/s of persia over FBGEMM's with fused row-wise Adagrad; None without its environment.

    `ours` and `theirs` are dtypes of rows; `end` selects one of `MODES`; `shape` replaces fields of the workload.
    """
    mode, called = MODES[end]
    if TorchRec.python() is None:
        print("TorchRec's environment is missing; create it: benchmarks/baselines/torchrec_env.sh", file=sys.stderr)
        return None
    return compared(
        name + end,
        preset,
        replace(WORK[preset], **shape),
        lambda work, data: Persia(work, data, RowwiseAdagrad(lr=0.05), dtype=ours, mode=mode),
        lambda work, _: TorchRec(work, dtype=theirs),
        target,
        {"mode": called},
        beside,
    )


@runner.measures("step.vs_torch")
def vs_torch(preset: str, beside: int = 0) -> runner.Measure:
    return compare_to(Plain, preset, "step.vs_torch", 1.9, beside=beside)


@runner.measures("step.vs_torch.sync")
def vs_torch_sync(preset: str, beside: int = 0) -> runner.Measure:
    return compare_to(Plain, preset, "step.vs_torch", 1.9, ".sync", beside)


@runner.measures("step.vs_torchrec")
def vs_torchrec(preset: str, beside: int = 0) -> runner.Measure | None:
    return compare_to_torchrec(preset, "step.vs_torchrec", 2.8, beside=beside)


@runner.measures("step.vs_torchrec.sync")
def vs_torchrec_sync(preset: str, beside: int = 0) -> runner.Measure | None:
    return compare_to_torchrec(preset, "step.vs_torchrec", 2.8, end=".sync", beside=beside)


@runner.measures("step.vs_torchrec_bf16")
def vs_torchrec_bf16(preset: str) -> runner.Measure | None:
    """16-bit rows on both sides: ours of bfloat16, rounded stochastically; FBGEMM's of float16, rounded to the nearest.

    FBGEMM has no bfloat16 on CPUs.
    """
    return compare_to_torchrec(preset, "step.vs_torchrec_bf16", 1.25, "bfloat16", "float16")


@runner.measures("step.bf16_vs_torchrec")
def bf16_vs_torchrec(preset: str) -> runner.Measure | None:
    """Rows of bfloat16 against FBGEMM's of float32, which its kernels for CPUs are faster with than with float16."""
    return compare_to_torchrec(preset, "step.bf16_vs_torchrec", None, "bfloat16")


@runner.measures("step.wide")
def wide(preset: str) -> runner.Measure | None:
    """Rows of 64 values; the tables of TorchRec take 6.7 GB."""
    return compare_to_torchrec(preset, "step.wide", 1.0, dim=64)


@runner.measures("step.vs_dense_only")
def vs_dense_only(preset: str, beside: int = 0) -> runner.Measure:
    return compare_to(DenseOnly, preset, "step.vs_dense_only", 0.55, beside=beside)


@runner.measures("step.vs_dense_only.sync")
def vs_dense_only_sync(preset: str, beside: int = 0) -> runner.Measure:
    return compare_to(DenseOnly, preset, "step.vs_dense_only", 0.55, ".sync", beside)
