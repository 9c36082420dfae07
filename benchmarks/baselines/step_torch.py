"""Whole training steps in plain PyTorch: the peers of `benchmarks/step.py`.

Workload: 26 features of dimension 16 over a million ids each (cubic skew), batches of 4096, 13 dense features, MLP
256-128, Adam on the network. `Plain` is `nn.EmbeddingBag(sparse=True)` with `torch.optim.Adagrad`; `DenseOnly` is the
network alone on constant embeddings, which get a gradient; `TorchRec` is FBGEMM's fused row-wise Adagrad in an
environment of its own (see torchrec_env.sh). Each has `time(steps) -> seconds`, so a benchmark can alternate them, and
all see the same batches, generated in advance. A clock starts after `PRIMING` steps, and stops once all updates are
applied.

    python -m benchmarks.baselines.step_torch [--rounds 5] [--steps 20] [--rows 1000000] [--threads 2]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

PRIMING = 8
"""Steps before the clock starts: a variant that works ahead is then as far ahead as when the clock stops."""


@dataclass(frozen=True)
class Workload:
    """Shape of the work; the published figures use the defaults."""

    features: int = 26
    dim: int = 16
    rows: int = 1_000_000  # ids per feature
    batch: int = 4096
    dense: int = 13
    batches: int = 64  # generated in advance, then repeated
    seed: int = 0
    device: str = "cpu"  # of the network; also of the tables of `Plain`


class Samples(NamedTuple):
    """One batch."""

    ids: np.ndarray  # int64 [features, batch]
    dense: np.ndarray  # float32 [batch, dense]
    labels: np.ndarray  # float32 [batch, 1]


def generate(work: Workload) -> list[Samples]:
    """All batches: ids are floor(rows * u^3) with u uniform."""
    rng = np.random.default_rng(work.seed)
    return [
        Samples(
            (work.rows * rng.random((work.features, work.batch)) ** 3).astype(np.int64),
            rng.standard_normal((work.batch, work.dense), dtype=np.float32),
            rng.integers(0, 2, (work.batch, 1)).astype(np.float32),
        )
        for _ in range(work.batches)
    ]


def network(work: Workload) -> nn.Sequential:
    """The MLP on embeddings and dense features side by side."""
    inputs = work.features * work.dim + work.dense
    return nn.Sequential(nn.Linear(inputs, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 1))


def network_optimizer(net: nn.Module) -> torch.optim.Optimizer:
    """Adam, fused; every variant uses this one."""
    return torch.optim.Adam(net.parameters(), 1e-3, fused=True)


class Variant:
    """Something that trains step by step on the batches, over and over."""

    def __init__(self, work: Workload, data: list[Samples] | None = None) -> None:
        torch.manual_seed(work.seed)
        self.work = work
        self.data = [Samples(*map(torch.from_numpy, s)) for s in (generate(work) if data is None else data)]
        if work.device != "cpu":  # Pinned, so that copies do not wait.
            self.data = [Samples(*(array.pin_memory() for array in s)) for s in self.data]
        self.net = network(work).to(work.device)
        self.optimizer = network_optimizer(self.net)
        self.at = 0

    def next(self) -> Samples:
        """The next batch, as tensors on the device."""
        self.at += 1
        batch = self.data[(self.at - 1) % len(self.data)]
        return Samples(*(array.to(self.work.device, non_blocking=True) for array in batch))

    def backward(self, embeddings: list[Tensor], batch: Samples) -> None:
        """Forward, loss, backward and step of the network."""
        logits = self.net(torch.cat([*embeddings, batch.dense], 1))
        loss = F.binary_cross_entropy_with_logits(logits, batch.labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def step(self) -> None:
        """One training step."""
        raise NotImplementedError

    def time(self, steps: int) -> float:
        """Seconds for `steps` steps, after `PRIMING` others."""
        for _ in range(PRIMING):
            self.step()
        self.drain()
        begin = time.perf_counter()
        for _ in range(steps):
            self.step()
        self.drain()
        return time.perf_counter() - begin

    def drain(self) -> None:
        """Waits until all updates are applied."""
        if self.work.device != "cpu":
            torch.cuda.synchronize(self.work.device)

    def close(self) -> None:
        """Ends the processes that this one has started; here there are none."""


class Plain(Variant):
    """`nn.EmbeddingBag(sparse=True)` for each feature, `torch.optim.Adagrad` on them."""

    def __init__(self, work: Workload, data: list[Samples] | None = None) -> None:
        super().__init__(work, data)
        torch.sparse.check_sparse_tensor_invariants.disable()  # said aloud, or torch warns
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(work.rows, work.dim, mode="sum", sparse=True) for _ in range(work.features)
        )
        self.bags.to(work.device)
        for bag in self.bags:
            nn.init.uniform_(bag.weight, -0.01, 0.01)
        self.adagrad = torch.optim.Adagrad(self.bags.parameters(), 0.05, initial_accumulator_value=0.01)
        self.offsets = torch.arange(work.batch, device=work.device)

    def step(self) -> None:
        """One training step."""
        batch = self.next()
        embeddings = [bag(ids, self.offsets) for bag, ids in zip(self.bags, batch.ids, strict=True)]
        self.adagrad.zero_grad()
        self.backward(embeddings, batch)
        self.adagrad.step()


class DenseOnly(Variant):
    """The network alone: constant embeddings, as one leaf for each feature, whose gradient is computed."""

    def __init__(self, work: Workload, data: list[Samples] | None = None) -> None:
        super().__init__(work, data)
        leaves = [0.01 * torch.randn(work.batch, work.dim) for _ in range(work.features)]
        self.leaves = [leaf.to(work.device).requires_grad_() for leaf in leaves]

    def step(self) -> None:
        """One training step."""
        for leaf in self.leaves:
            leaf.grad = None
        self.backward(self.leaves, self.next())


class TorchRec:
    """FBGEMM's fused row-wise Adagrad, in a separate process and environment.

    Args:
        work: the workload.
        threads: of torch, as in this process by default.
        optimizer: "rowwise_adagrad" or "adagrad".
        layer: "fbgemm", its kernel called directly, or "torchrec", TorchRec's module around it.
        dtype: of rows, "float32" or "float16"; only of layer "fbgemm". Its kernels for CPUs have no bfloat16, and round
            float16 to the nearest, whatever its `stochastic_rounding` says.

    Raises:
        FileNotFoundError: the environment has not been created.
    """

    def __init__(
        self,
        work: Workload,
        threads: int | None = None,
        optimizer: str = "rowwise_adagrad",
        layer: str = "fbgemm",
        dtype: str = "float32",
    ) -> None:
        python = self.python()
        if python is None:
            raise FileNotFoundError("build/torchrec-env is not there; create it: benchmarks/baselines/torchrec_env.sh")
        script = Path(__file__).with_name("step_torchrec.py")
        options = {"work": asdict(work), "threads": threads or torch.get_num_threads(), "optimizer": optimizer}
        self.process = subprocess.Popen(
            [python, str(script), json.dumps(options | {"layer": layer, "dtype": dtype})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._read("ready")

    @staticmethod
    def python() -> str | None:
        """The environment's Python, or None where it has not been created."""
        path = Path(__file__).resolve().parents[2] / "build" / "torchrec-env" / "bin" / "python"
        return str(path) if path.exists() else None

    def _read(self, word: str) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().split()
        if not line or line[0] != word:
            raise RuntimeError(f"step_torchrec.py answered {line}, not {word!r}; its error is printed above.")
        return line[-1]

    def time(self, steps: int) -> float:
        """Seconds for `steps` steps."""
        assert self.process.stdin is not None
        print("time", steps, file=self.process.stdin, flush=True)
        return float(self._read("seconds"))

    def close(self) -> None:
        """Ends the process."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(30)
        self.process.stdout.close()

    def __enter__(self) -> TorchRec:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Milliseconds per step of each peer; prints one JSON line.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", nargs="*", help="names of variants")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    work = Workload(rows=args.rows)
    data = generate(work)
    makers = {"plain": lambda: Plain(work, data), "dense_only": lambda: DenseOnly(work, data)}
    if TorchRec.python() is not None:
        makers["fbgemm_rowwise_adagrad"] = lambda: TorchRec(work)
        makers["fbgemm_adagrad"] = lambda: TorchRec(work, optimizer="adagrad")
        makers["torchrec_rowwise_adagrad"] = lambda: TorchRec(work, layer="torchrec")
    else:
        print("TorchRec is left out: build/torchrec-env is not there (see torchrec_env.sh).", file=sys.stderr)
    variants = {name: make() for name, make in makers.items() if not args.only or name in args.only}
    times: dict[str, list[float]] = {name: [] for name in variants}
    for round_ in range(args.rounds + 1):  # the first warms up
        for name, variant in variants.items():
            seconds = variant.time(args.steps)
            if round_:
                times[name].append(1e3 * seconds / args.steps)
    for variant in variants.values():
        variant.close()
    print(json.dumps({name: round(statistics.median(t), 2) for name, t in times.items()} | {"unit": "ms/step"}))


if __name__ == "__main__":
    main()
