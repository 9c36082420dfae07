"""A whole training step whose network is compiled, against the same step whose network is not.

    python -m benchmarks compile.cpu [--preset smoke|laptop|full] [--json FILE]

The work is that of `benchmarks/step.py`, on the CPU, in `Hybrid(4)`. The first batch compiles, and is not measured; how
long it took is in the details. A smoke run only traces the network, as a compiler of C++ takes a minute.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import runner
from benchmarks.baselines.step_torch import Samples, Workload
from benchmarks.step import FIRST, WORK, Persia, compared
from persia.nn import compiled_training
from persia.nn.compiled_training import CompiledTraining, CompileMode
from persia.nn.pooling import Embeddings
from persia.schema import Adagrad

ADAGRAD = Adagrad(lr=0.05, initial_accumulator=FIRST)


class Joined(nn.Module):
    """The network of `step.py`, called as the models of `persia.nn.models` are."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, dense: Tensor, embeddings: Embeddings) -> Tensor:
        """Returns logits `[batch, 1]`."""
        values = [embedding for embedding in embeddings.values() if isinstance(embedding, Tensor)]
        logits: Tensor = self.net(torch.cat([*values, dense], 1))
        return logits


class Compiled(Persia):
    """The step of `benchmarks/step.py` with a compiled network."""

    def __init__(self, work: Workload, data: list[Samples], mode: CompileMode = "default") -> None:
        super().__init__(work, data, ADAGRAD)
        self.compiled = CompiledTraining(Joined(self.net), mode, torch.device(work.device))
        self.seconds = 0.0
        """Time of the first step, which compiles."""

    def step(self) -> None:
        """One training step."""
        began = time.perf_counter()
        batch = next(self.prefetched)
        logits = self.compiled(self.compiled.module, batch.dense, self.embeddings(batch), eager=False)
        loss = F.binary_cross_entropy_with_logits(logits, batch.labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.seconds = self.seconds or time.perf_counter() - began


def tracing_only(only: bool) -> contextlib.AbstractContextManager[object]:
    """Returns a context in which networks are traced, but not compiled, if it is `only` that: a compiler takes long."""
    return mock.patch.object(compiled_training, "BACKEND", "eager" if only else compiled_training.BACKEND)


@runner.measures("compile.cpu")
def cpu(preset: str) -> runner.Measure:
    """Samples/s with a compiled network over samples/s without."""
    made: list[Compiled] = []

    def compiled(work: Workload, data: list[Samples]) -> Compiled:
        made.append(Compiled(work, data))
        return made[-1]

    with tracing_only(preset == "smoke"):
        backend = compiled_training.BACKEND
        measure = compared(
            "compile.cpu", preset, WORK[preset], compiled, lambda work, data: Persia(work, data, ADAGRAD)
        )
    return replace(measure, details={**measure.details, "first_step_s": made[0].seconds, "backend": backend})
