"""Whether training in one thread has the bits of lookups ahead, in `Sync`.

    python -m benchmarks sync.bits [--preset smoke|laptop|full] [--json FILE]

sync.bits   Share of cases in which a row, its optimizer state, or the network differs after training. Cases: optimizers
            of rows, their dtypes, tables that evict, accumulation.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch

from benchmarks import runner
from persia import Batch, IdFeature, Schema, Table, Trainer, TrainerOptions, data
from persia.cluster import Embedded
from persia.modes import Mode, Sync
from persia.nn.models import FFNN
from persia.optim import SGD, Adagrad, Adam, Ftrl, RowwiseAdagrad
from persia.schema import EmbeddingOptimizer
from persia.services import Connection
from persia.types.half_floats import Dtype

OPTIMIZERS: tuple[EmbeddingOptimizer, ...] = (
    SGD(lr=0.1),
    Adagrad(lr=0.1),
    RowwiseAdagrad(lr=0.1),
    Adam(lr=0.01),
    Ftrl(lr=0.1),
)
DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16", "float16")
BATCHES = {"smoke": 4, "laptop": 60, "full": 300}
IDS = 500


class Elsewhere(Embedded):
    """As if rows were not in memory of this process: lookups run in threads of their own."""

    def connect(self, schema: Schema, optimizer: EmbeddingOptimizer, mode: Mode, seed: int) -> Connection:
        """See `Embedded.connect`."""
        return super().connect(schema, optimizer, mode, seed)._replace(near=False)


def trained(
    cluster: Embedded, optimizer: EmbeddingOptimizer, dtype: Dtype, capacity: int | None, accumulation: int, count: int
) -> list[np.ndarray[Any, Any]]:
    """Returns what training has made: rows, their state, and the network."""
    names = ["a", "b", "c"]
    tables = [Table(name, dim=8, dtype=dtype, capacity=capacity) for name in names]
    schema = Schema([IdFeature(name, table=name) for name in names], tables=tables, dense_features=["x"])
    generated = data.synthetic(count * 64, id_features=3, ids_per_feature=IDS, dense_features=1, batch_size=64)
    batches = [
        Batch(dict(zip(names, b.id_features.values(), strict=True)), b.dense, b.labels) for b in generated.batches()
    ]
    torch.manual_seed(0)
    trainer = Trainer(
        FFNN(schema, hidden=(16,)),
        schema,
        optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-2),
        embedding_optimizer=optimizer,
        mode=Sync(),
        cluster=cluster,
        options=TrainerOptions(device="cpu", progress=False, accumulation_steps=accumulation),
    )
    trainer.fit(batches)
    ids = np.unique(np.concatenate([b.id_features[name].values for b in batches for name in names]))
    parts = [trainer.embeddings.rows(name, ids, state=True) for name in names]
    rows = [array for part in parts for array in (part.found, part.values, part.state.values if part.state else None)]
    network = [parameter.detach().numpy() for parameter in trainer.model.parameters()]
    return [array for array in (*rows, *network) if array is not None]


@runner.measures("sync.bits")
def bits(preset: str) -> runner.Measure:
    cases = list(itertools.product(OPTIMIZERS, DTYPES, (None, IDS // 4), (1, 3)))
    different = 0
    for case in cases:
        here, ahead = (trained(cluster, *case, BATCHES[preset]) for cluster in (Embedded(), Elsewhere()))
        different += not all(map(np.array_equal, here, ahead))
    return runner.Measure("sync.bits", different / len(cases), "fraction", at_most=0, details={"cases": len(cases)})
