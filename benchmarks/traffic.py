"""What crosses the wire between embedding worker and NN worker, what float16 costs, and how evenly PSs share a batch.

    python -m benchmarks 'traffic.*' [--preset smoke|laptop|full] [--json FILE]

Bytes are counted in the messages that would be sent: payload and array frames. They are compared with what pooling on
the embedding worker would send, float32 `[batch, dim]` for every feature and direction.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

import persia
from benchmarks import runner
from benchmarks.globo import persia_run
from benchmarks.public_data import is_here
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
from persia.types import BucketMap, Contribution, FreshRows, LookedUp, Moment, Packed, PushHeader
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


# --- lists of ids, which an embedding worker may pool ---------------------------------------------------------------


LENGTHS = (1, 5, 20, 50, 100)
"""Ids of a sample."""


@runner.measures("traffic.lists")
def lists(preset: str) -> runner.Measure:
    """Bytes of a lookup and a push of 20 of 100,000 ids for each sample with `pool_at="auto"`, over those of rows."""
    batch = {"smoke": 512, "laptop": BATCH, "full": BATCH}[preset]
    found = {
        f"{length} of {ids:,} ids": {place: list_bytes(batch, length, ids, place) for place in ("nn_worker", "auto")}
        for ids in (100_000, 10_000_000)
        for length in LENGTHS
    }
    shown = found[f"20 of {100_000:,} ids"]
    details = {"of": "bytes of rows, and of their gradients", "bytes_per_sample": found}
    return runner.Measure("traffic.lists", shown["auto"] / shown["nn_worker"], "ratio", at_most=0.25, details=details)


def list_bytes(samples: int, length: int, ids: int, pool_at: Any) -> float:
    """Bytes of the answer to a lookup and of a push, for each sample, with fp16."""
    schema = persia.Schema([persia.IdFeature("list", dim=DIM, pooling="mean")])
    server = EmbeddingServer(schema.resolved_tables(), Adagrad(lr=0.05), Sync(), 0, 1)
    worker = Worker(schema, [server], options=WorkerOptions("fp16", pool_at))
    drawn = Zipf(ids, 1.05).sample(np.random.default_rng(0), samples * length).view(np.uint64)
    ends = np.arange(0, samples * length + 1, length, dtype=np.int64)
    batch_id = worker.register({"list": IdColumn(drawn, ends)})
    found = worker.lookup(batch_id, pool=True)
    gradients = transfer.encode(transfer.decode(found.rows, found.scales))
    pushed = (PushHeader(1, 0, 1, 0, samples), [Contribution(batch_id, *gradients)])
    return (message_bytes(found) + message_bytes(pushed)) / samples


# --- what float16 costs ------------------------------------------------------------------------------------------


class Wire:
    """An embedding worker behind a compressed wire: what an NN worker sees that decodes and encodes."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.register, self.release, self.statistics = worker.register, worker.release, worker.statistics

    def lookup(self, batch_id: int, train: bool = True, pool: bool = False) -> LookedUp:
        return self._decoded(self._worker.lookup(batch_id, train, pool))

    def lookup_ahead(self, batch_id: int, pool: bool = False, recent: int = 0) -> LookedUp:
        return self._decoded(self._worker.lookup_ahead(batch_id, pool, recent))

    def refresh(self, batch_id: int, seen: list[Moment], left_out: Packed[np.bool_] | None = None) -> FreshRows:
        fresh = self._worker.refresh(batch_id, seen, left_out)
        return fresh._replace(rows=transfer.decode(fresh.rows, fresh.scales), scales=None)

    def evaluate(self, id_features: Mapping[str, IdColumn], pool: bool = False) -> LookedUp:
        return self._decoded(self._worker.evaluate(id_features, pool))

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


@runner.measures("traffic.auc", "traffic.auc_globo")
def auc(preset: str, selected: Collection[str]) -> Iterator[runner.Measure]:
    """AUC with compression less AUC without it, same data and initial values: of another pass, and progressive."""
    rows, seeds = {"smoke": (20_000, 2), "laptop": (500_000, 5), "full": (3_000_000, 5)}[preset]

    def compared(name: str, trained: Callable[[int, Any], float], **bounds: float) -> runner.Measure:
        ours = [trained(seed, Compressed()) for seed in range(seeds)]
        theirs = [trained(seed, persia.cluster.Embedded()) for seed in range(seeds)]
        return runner.paired(name, ours, theirs, "AUC", **bounds, details={"rows": rows})  # type: ignore[arg-type]

    if "traffic.auc" in selected:
        yield compared("traffic.auc", functools.partial(trained_auc, rows), **runner.within(0.0003))
    if "traffic.auc_globo" in selected and is_here("globo_ctr"):
        yield compared("traffic.auc_globo", functools.partial(globo_auc, rows), at_least=-0.001)


def globo_auc(rows: int, seed: int, cluster: Any) -> float:
    """Progressive AUC, the mean of the days."""
    return persia_run(Sync(), seed, rows, cluster=cluster).auc


# --- how evenly PSs share a batch ----------------------------------------------------------------------------------


class CountingServer:
    """A PS that counts what it is asked for."""

    def __init__(self) -> None:
        self.rows = 0

    def buckets(self) -> BucketMap:
        return BucketMap.even(SERVERS)

    def lookup(self, ids: Packed, train: bool, map_version: int = 0) -> Packed:
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
