"""TorchRec's batches and models in persia: cost of the conversion, and training that goes on.

    python -m benchmarks 'interop.*' [--preset smoke|laptop|full] [--json FILE]

TorchRec has to be importable here, next to persia (docs/guide/from-torchrec.md has the lines); without it both measures
are skipped, and say so.
"""

from __future__ import annotations

import copy
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import runner
from benchmarks.baselines.step_torch import Samples, Workload, generate, network, network_optimizer
from benchmarks.step import FIRST, Persia
from persia import Batch, IdFeature, Schema
from persia.interop.torchrec import from_batch, import_weights, keyed_tensor, schema_of, to_batch
from persia.modes import Sync
from persia.nn import EmbeddingCollection
from persia.schema import Adagrad, RowwiseAdagrad

STEP = {"smoke": Workload(rows=2_000, batch=128, batches=2), "laptop": Workload(), "full": Workload()}
TIMED = {"smoke": 5, "laptop": 20, "full": 50}
ROUNDS = {"smoke": 1, "laptop": 9, "full": 15}
MODEL = {
    "smoke": Workload(features=4, rows=500, batch=64, batches=200),
    "laptop": Workload(rows=10_000, batch=512, batches=200),
    "full": Workload(rows=100_000, batches=200),
}
LR, EPS = 0.05, 1e-8
WITHIN = 1e-5


def torchrec_here(name: str) -> ModuleType | None:
    """TorchRec, or None and a line that says that a measure is skipped."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torchrec
            import torchrec.modules.fused_embedding_modules
    except ImportError as error:
        print(f"{name} is skipped: TorchRec cannot be imported ({error}).", file=sys.stderr)
        return None
    module: ModuleType = torchrec
    return module


def jagged(torchrec: ModuleType, samples: Samples) -> Any:
    """A KeyedJaggedTensor of one id for each feature and sample."""
    ids = torch.from_numpy(samples.ids)
    names = [f"f{i}" for i in range(len(ids))]
    return torchrec.KeyedJaggedTensor(names, ids.reshape(-1), lengths=torch.ones(ids.numel(), dtype=torch.int64))


def ragged(torchrec: ModuleType, work: Workload) -> Any:
    """A KeyedJaggedTensor of 0 to 4 ids for each feature and sample."""
    draw = np.random.default_rng(work.seed)
    lengths = torch.from_numpy(draw.integers(0, 5, work.features * work.batch))
    ids = torch.from_numpy(draw.integers(0, work.rows, int(lengths.sum())))
    return torchrec.KeyedJaggedTensor([f"f{i}" for i in range(work.features)], ids, lengths=lengths)


def seconds(work: Callable[[], object], times: int) -> float:
    """Seconds for a call, the mean of many."""
    begin = time.perf_counter()
    for _ in range(times):
        work()
    return (time.perf_counter() - begin) / times


@runner.measures("interop.kjt")
def kjt(preset: str) -> runner.Measure | None:
    """KeyedJaggedTensor to batch and back, over a training step of persia on that batch."""
    if (torchrec := torchrec_here("interop.kjt")) is None:
        return None
    work = STEP[preset]
    data = generate(work)
    dense, labels = torch.from_numpy(data[0].dense), torch.from_numpy(data[0].labels)
    schema = Schema(
        [IdFeature(f"f{i}", dim=work.dim) for i in range(work.features)], [f"d{i}" for i in range(work.dense)]
    )

    def both_ways(ids: Any) -> Callable[[], object]:
        def convert() -> object:
            ids.unsync()  # Forgets the sums that it has computed, as in a new batch.
            return from_batch(schema, to_batch(schema, ids, dense, labels))

        return convert

    single, several = both_ways(jagged(torchrec, data[0])), both_ways(ragged(torchrec, work))
    side = Persia(work, data, Adagrad(lr=LR, initial_accumulator=FIRST))
    try:
        side.time(2 * len(data))
        rounds = []
        for _ in range(ROUNDS[preset]):
            step = side.time(TIMED[preset]) / TIMED[preset]
            rounds.append((seconds(single, 100) / step, seconds(several, 100) / step, step))
    finally:
        side.close()
    ones, ragged_ones, steps = (np.array(column) for column in zip(*rounds, strict=True))
    details = {
        "of": "conversion both ways over a step",
        "features": work.features,
        "batch": work.batch,
        "step_seconds": float(np.median(steps)),
        "conversion_seconds": float(np.median(ones * steps)),
        "of_0_to_4_ids": float(np.median(ragged_ones)),
    }
    return runner.quantity("interop.kjt", ones.tolist(), "fraction", at_most=0.01, details=details)


def trained(net: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[tuple[Tensor, Samples]]) -> list[float]:
    """Trains a network on embeddings, and returns the losses."""
    losses = []
    for embeddings, samples in batches:
        dense, labels = torch.as_tensor(samples.dense), torch.as_tensor(samples.labels)
        loss = F.binary_cross_entropy_with_logits(net(torch.cat([embeddings, dense], 1)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@runner.measures("interop.torchrec")
def model(preset: str) -> runner.Measure | None:
    """Largest difference of losses: half of the steps there and half here in Sync, against all there."""
    if (torchrec := torchrec_here("interop.torchrec")) is None:
        return None
    work = MODEL[preset]
    data = generate(work)
    half = len(data) // 2
    torch.manual_seed(work.seed)
    tables = [
        torchrec.EmbeddingBagConfig(
            name=f"t{i}", embedding_dim=work.dim, num_embeddings=work.rows, feature_names=[f"f{i}"]
        )
        for i in range(work.features)
    ]
    ebc = torchrec.modules.fused_embedding_modules.FusedEmbeddingBagCollection(
        tables, torchrec.optim.RowWiseAdagrad, {"lr": LR, "eps": EPS}, device=torch.device("cpu")
    )
    net = network(work)
    optimizer = network_optimizer(net)

    def there(samples: list[Samples]) -> Iterator[tuple[Tensor, Samples]]:
        return ((ebc(jagged(torchrec, each)).values(), each) for each in samples)

    first = trained(net, optimizer, there(data[:half]))

    schema = schema_of(tables, [f"d{i}" for i in range(work.dense)])
    rule = RowwiseAdagrad(lr=LR, initial_accumulator=0.0, eps=EPS)
    collection = EmbeddingCollection(schema, optimizer=rule, mode=Sync())
    import_weights(collection, ebc.state_dict(), ebc.fused_optimizer().state_dict())
    net_here = copy.deepcopy(net)
    optimizer_here = network_optimizer(net_here)
    optimizer_here.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    def batch(samples: Samples) -> Batch:
        dense, labels = torch.from_numpy(samples.dense), torch.from_numpy(samples.labels)
        return to_batch(schema, jagged(torchrec, samples), dense, labels)

    here = collection.prefetch(map(batch, data[half:]))
    rows = (
        (keyed_tensor(collection(batch)).values(), samples) for batch, samples in zip(here, data[half:], strict=True)
    )
    ours = trained(net_here, optimizer_here, rows)
    theirs = trained(net, optimizer, there(data[half:]))
    gap = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    details = {"steps": [half, half], "first_loss": first[0], "last_loss": theirs[-1], "rows": work.rows}
    return runner.Measure("interop.torchrec", gap, "loss", at_most=WITHIN, details=details)
