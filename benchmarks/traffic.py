"""What crosses the wire between embedding worker and NN worker, what float16 costs, and how evenly PSs share a batch.

    python -m benchmarks 'traffic.*' [--preset smoke|laptop|full] [--json FILE]

Bytes are counted in the messages that would be sent: payload and array frames. They are compared with what pooling on
the embedding worker would send, float32 `[batch, dim]` for every feature and direction.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

import persia
from benchmarks import runner
from persia import data
from persia.batching.batch import Batch
from persia.batching.id_column import IdColumn
from persia.data.zipf import Zipf
from persia.modes import Sync
from persia.nn import transfer
from persia.nn.models import DeepFM
from persia.optim import Adagrad
from persia.ps import EmbeddingServer
from persia.rpc.array_encoding import encode
from persia.rpc.limits import Limits
from persia.services import Connection
from persia.types import Contribution, FreshRows, LookedUp, Moment, Packed, PushHeader
from persia.worker import Worker, WorkerOptions

BATCH = 4096
DIM = 16
BATCHES = {"smoke": 5, "laptop": 60, "full": 300}
SERVERS = 4


def message_bytes(value: Any) -> int:
    """Of the payload and the array frames that carry a value."""
    payload, arrays = encode(value, Limits().arrays)
    return len(payload) + sum(array.nbytes for array in arrays)


def clicks(preset: str) -> tuple[persia.Schema, Iterator[Batch], str]:
    """Batches of the news portal from the middle of its days, or generated ones that look like it."""
    if data.find("globo_ctr") is not None:
        reader = data.globo(batch_size=BATCH, dim=DIM)
        return reader.schema, reader.batches(start=200), "globo_ctr"
    made = data.synthetic(BATCH * BATCHES[preset], id_features=9, ids_per_feature=100_000, batch_size=BATCH, dim=DIM)
    return made.schema, made.batches(), "synthetic: 9 features of Zipf(1.05) ids, as globo_ctr was not found"


@runner.measures("traffic.forward", "traffic.backward")
def traffic(preset: str):
    """Forward: the answer of a lookup. Backward: a push with a gradient for every row."""
    schema, batches, source = clicks(preset)
    server = EmbeddingServer(schema.resolved_tables(), Adagrad(lr=0.05), Sync(), 0, 1)
    worker = Worker(schema, [server], options=WorkerOptions(compression="fp16"))
    pooled = 4 * DIM * len(schema.id_features)
    forward, backward, rows = [], [], []
    for number, batch in zip(range(BATCHES[preset]), batches, strict=False):
        batch_id = worker.register(batch.id_features)
        looked_up = worker.lookup(batch_id)
        gradients, scales = transfer.encode(transfer.decode(looked_up.rows, looked_up.scales))
        pushed = (PushHeader(1, 0, number + 1, number, len(batch)), [Contribution(batch_id, gradients, scales)])
        forward.append(message_bytes(looked_up) / len(batch) / pooled)
        backward.append(message_bytes(pushed) / len(batch) / pooled)
        rows.append(sum(map(len, looked_up.rows.values())) / len(batch))
        worker.push(*pushed)
    facts = {"data": source, "pooled_bytes_per_sample": pooled, "unique_rows_per_sample": statistics.mean(rows)}
    for name, values, target in (("forward", forward, 0.12), ("backward", backward, 0.06)):
        details = {"of": "bytes of pooled float32", **facts, "bytes_per_sample": statistics.mean(values) * pooled}
        yield runner.quantity(f"traffic.{name}", values, "ratio", at_most=target, details=details)


# --- what float16 costs ------------------------------------------------------------------------------------------


class Wire:
    """An embedding worker behind a compressed wire: what an NN worker sees that decodes and encodes."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.register, self.release, self.statistics = worker.register, worker.release, worker.statistics

    def lookup(self, batch_id: int, train: bool = True) -> LookedUp:
        return self._decoded(self._worker.lookup(batch_id, train))

    def lookup_ahead(self, batch_id: int) -> LookedUp:
        return self._decoded(self._worker.lookup_ahead(batch_id))

    def refresh(self, batch_id: int, seen: list[Moment]) -> FreshRows:
        fresh = self._worker.refresh(batch_id, seen)
        return fresh._replace(rows=transfer.decode(fresh.rows, fresh.scales), scales=None)

    def evaluate(self, id_features: Mapping[str, IdColumn]) -> LookedUp:
        return self._decoded(self._worker.evaluate(id_features))

    def push(self, header: PushHeader, contributions: Sequence[Contribution]):
        return self._worker.push(
            header, [Contribution(c.batch_id, *transfer.encode(c.gradients)) for c in contributions]
        )

    @staticmethod
    def _decoded(looked_up: LookedUp) -> LookedUp:
        return looked_up._replace(rows=transfer.decode(looked_up.rows, looked_up.scales), scales=None)


class Compressed:
    """All roles in this process, rows and gradients through float16."""

    def connect(self, schema, optimizer, mode, seed) -> Connection:
        server = EmbeddingServer(schema.resolved_tables(), optimizer, mode, seed, 2)
        return Connection(Wire(Worker(schema, [server], 2, options=WorkerOptions(compression="fp16"))), [server])


def trained_auc(rows: int, seed: int, cluster: Any) -> float:
    """AUC on another pass, after one of training."""
    made = data.synthetic(rows, ids_per_feature=1_000, batch_size=1024, seed=seed)
    torch.manual_seed(seed)
    trainer = persia.Trainer(
        DeepFM(made.schema, hidden=(64, 32)),
        made.schema,
        optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-3),
        embedding_optimizer=Adagrad(lr=0.05),
        mode=Sync(),
        cluster=cluster,
        options=persia.TrainerOptions(device="cpu", progress=False, seed=seed),
    )
    trainer.fit(made)
    return trainer.evaluate(made.batches(epoch=1)).auc


@runner.measures("traffic.auc")
def auc(preset: str):
    """AUC with compression less AUC without it, same data and initial values; mean over seeds."""
    rows, seeds = {"smoke": (20_000, 2), "laptop": (500_000, 5), "full": (3_000_000, 5)}[preset]
    plain = [trained_auc(rows, seed, persia.cluster.Embedded()) for seed in range(seeds)]
    through = [trained_auc(rows, seed, Compressed()) for seed in range(seeds)]
    gaps = [b - a for a, b in zip(plain, through, strict=True)]
    details = {
        "rows": rows,
        "seeds": seeds,
        "auc_none": statistics.mean(plain),
        "auc_fp16": statistics.mean(through),
        "standard_error": statistics.stdev(gaps) / seeds**0.5,
        "largest": max(gaps, key=abs),
    }
    return runner.Measure("traffic.auc", statistics.mean(gaps), "AUC", **runner.within(0.0003), details=details)


# --- how evenly PSs share a batch ----------------------------------------------------------------------------------


class CountingServer:
    """A PS that counts what it is asked for."""

    def __init__(self) -> None:
        self.rows = 0

    def lookup(self, ids: Packed, train: bool) -> Packed:
        self.rows = sum(ids.counts)
        return Packed(ids.names, ids.counts, np.zeros(2 * self.rows, np.float32), [2] * len(ids))


@runner.measures("ps.imbalance")
def imbalance(preset: str):
    """99th percentile over batches of (most unique rows of a PS) / (mean of a PS): 26 features, Zipf(1.05)."""
    batches, features, ids = {"smoke": 10, "laptop": 300, "full": 2000}[preset], 26, 1_000_000
    schema = persia.Schema([persia.IdFeature(f"f{n}", dim=2) for n in range(features)])
    servers = [CountingServer() for _ in range(SERVERS)]
    worker = Worker(schema, servers)
    zipf, rng = Zipf(ids, 1.05), np.random.default_rng(0)
    ratios, unique = [], []
    for _ in range(batches):
        drawn = zipf.sample(rng, features * BATCH).view(np.uint64).reshape(features, BATCH)
        worker.evaluate({f"f{n}": IdColumn(drawn[n]) for n in range(features)})
        rows = [server.rows for server in servers]
        ratios.append(max(rows) / statistics.mean(rows))
        unique.append(sum(rows))
    details = {
        "of": "unique rows of a PS, the largest and the mean",
        "servers": SERVERS,
        "batches": batches,
        "unique_rows": statistics.mean(unique),
        "median": statistics.median(ratios),
    }
    value = float(np.percentile(ratios, 99))
    return runner.Measure("ps.imbalance", value, "ratio", at_most=1.06, details=details)
