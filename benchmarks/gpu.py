"""A whole training step with the network on a GPU: persia, whose rows are in host memory, against plain PyTorch.

    python -m benchmarks 'gpu.*' [--preset smoke|laptop|full] [--json FILE]

Needs a CUDA device; without one each measure is skipped, and says so. The work is that of `benchmarks/step.py`. The
tables of plain PyTorch are in the memory of the GPU, so `gpu.step_vs_torch` says what it costs to keep rows where
there is room for any number of them; `gpu.step_vs_dense_only` says how much of that the prefetching hides.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import torch

from benchmarks import runner
from benchmarks.baselines.step_torch import DenseOnly, Plain
from benchmarks.step import FIRST, compare
from persia.schema import Adagrad


def on_gpu(preset: str, peer_of, name: str) -> runner.Measure | None:
    """Compares on the first CUDA device; None without one."""
    if not torch.cuda.is_available():
        print(f"{name} is skipped: torch {torch.__version__} sees no CUDA device.", file=sys.stderr)
        return None
    found = compare(preset, peer_of, Adagrad(lr=0.05, initial_accumulator=FIRST), name, None, device="cuda")
    return replace(found, details={**found.details, "device": torch.cuda.get_device_name(0)})


@runner.measures("gpu.step_vs_torch")
def step_vs_torch(preset: str) -> runner.Measure | None:
    return on_gpu(preset, Plain, "gpu.step_vs_torch")


@runner.measures("gpu.step_vs_dense_only")
def step_vs_dense_only(preset: str) -> runner.Measure | None:
    return on_gpu(preset, DenseOnly, "gpu.step_vs_dense_only")
