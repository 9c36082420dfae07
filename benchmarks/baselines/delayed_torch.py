"""Training with delayed embedding gradients in plain PyTorch, with which persia's modes are compared.

Tables are plain tensors with optimizers written out here; the network is the module that persia trains, with Adam.
Which gradients the embeddings of a batch contain is an input: a constant delay (`replay`), or the versions that a run
of persia has recorded (`delayed_sync`). A difference between the two is then an error of persia, not chance.

    python -m benchmarks.baselines.delayed_torch [--rows 3000000] [--delay 4] [--dense-delay 8] [--init-std 0.05]
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from persia.batching.batch import Batch
from persia.batching.id_column import IdColumn
from persia.data import synthetic
from persia.nn.models import DeepFM
from persia.schema import SGD, Adagrad, Adam, EmbeddingOptimizer, IdFeature, Schema

from .globo_torch import auc

InitialRows = Callable[[str, np.ndarray], np.ndarray]
"""From a table's name and ids uint64 `[n]` to rows float32 `[n, dim]`."""

ADAGRAD = Adagrad(lr=0.05, initial_accumulator=0.01)
"""Optimizer of the rows, with accumulators that begin at 0.01; persia's begin at 1e-6 by default."""


@dataclass(frozen=True)
class Replay:
    """Result of `replay`.

    Attributes:
        auc: progressive: each batch is scored before it is trained on; mean over labels.
        logits: those scores, float32 `[rows, labels]`.
        test_logits: scores of the test batches after training, float32 `[rows, labels]`; ids never trained are zeros.
        rows_per_s: speed of training.
    """

    auc: float
    logits: np.ndarray
    test_logits: np.ndarray | None
    rows_per_s: float


class Tables:
    """All tables (of one dim), one below the other; the last row is zero and stands for unknown ids.

    Args:
        batches: have all ids.
        schema: of the batches.
        seed: of the rows unless they are given.
        initial_rows: first value of the rows; by default uniform in +-0.01.
        optimizer: SGD, Adagrad or Adam, with no more than their rates and what their formulas need.

    Raises:
        ValueError: the schema or the optimizer has what this class does not know.
    """

    def __init__(
        self,
        batches: Sequence[Batch],
        schema: Schema,
        seed: int,
        initial_rows: InitialRows | None,
        optimizer: EmbeddingOptimizer,
    ) -> None:
        declared = schema.resolved_tables()
        dims = {table.dim for table in declared.values()}
        if len(dims) != 1 or any(f.pooling is None or f.max_length or f.cross for f in schema.id_features):
            raise ValueError("The replay knows one dim for all tables, and neither sequences nor lengths nor crosses.")
        if (
            not isinstance(optimizer, SGD | Adagrad | Adam)
            or optimizer.schedule is not None
            or optimizer.weight_decay
            or getattr(optimizer, "momentum", 0.0)
        ):
            raise ValueError(f"The replay knows SGD, Adagrad and Adam, without decay, momentum, schedule: {optimizer}.")
        self.dim = dims.pop()
        self.optimizer = optimizer
        self.ids: dict[str, np.ndarray] = {}  # sorted, by table
        self.starts: dict[str, int] = {}
        generator = torch.Generator().manual_seed(seed)
        parts: list[Tensor] = []
        at = 0
        for name in declared:
            readers = [f.name for f in schema.id_features if f.table_name == name]
            self.ids[name] = np.unique(np.concatenate([b.id_features[f].values for f in readers for b in batches]))
            self.starts[name] = at
            count = len(self.ids[name])
            at += count
            if initial_rows is not None:
                parts.append(torch.from_numpy(np.array(initial_rows(name, self.ids[name]), np.float32)))
            else:
                parts.append(torch.empty(count, self.dim).uniform_(-0.01, 0.01, generator=generator))
        self.rows = nn.Parameter(torch.cat([*parts, torch.zeros(1, self.dim)]), requires_grad=False)
        self.first = torch.zeros_like(self.rows)
        self.second = torch.full_like(self.rows, getattr(optimizer, "initial_accumulator", 0.0))
        self.updates = torch.zeros(len(self.rows), 1, dtype=torch.float64)

    def positions(self, table: str, ids: np.ndarray) -> np.ndarray:
        """Row of each id; the last one where it is unknown."""
        known = self.ids[table]
        at = np.minimum(np.searchsorted(known, ids), len(known) - 1)
        return np.where(known[at] == ids, at + self.starts[table], len(self.rows) - 1)

    def lookup(self, batch: Batch, schema: Schema) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Pooled features, and the distinct rows behind them: their positions, and the leaf that gets the gradient."""
        columns = [batch.id_features[f.name] for f in schema.id_features]
        flat = [self.positions(f.table_name, c.values) for f, c in zip(schema.id_features, columns, strict=True)]
        unique, inverse = torch.unique(torch.from_numpy(np.concatenate(flat)), return_inverse=True)
        leaf = self.rows[unique].requires_grad_()
        features = {}
        indices = inverse.split([len(f) for f in flat])
        for feature, column, index in zip(schema.id_features, columns, indices, strict=True):
            if column.offsets is None:
                features[feature.name] = leaf[index]
                continue
            offsets = torch.from_numpy(column.offsets)
            total = F.embedding_bag(index, leaf, offsets, mode="sum", include_last_offset=True)
            counts = offsets.diff().clamp(min=1).unsqueeze(1)
            power = {"sum": 0.0, "mean": 1.0, "sqrtn": 0.5}[str(feature.pooling)]
            features[feature.name] = total / counts**power
        return features, unique, leaf

    def apply(self, unique: Tensor, gradient: Tensor) -> None:
        """One update of each distinct row. Adam is lazy: its bias correction counts the updates of each row."""
        rule = self.optimizer
        if isinstance(rule, SGD):
            change = gradient
        elif isinstance(rule, Adagrad):
            self.second[unique] += gradient**2
            change = gradient / (self.second[unique].sqrt() + rule.eps)
        else:
            self.updates[unique] += 1
            self.first[unique] = rule.beta1 * self.first[unique] + (1 - rule.beta1) * gradient
            self.second[unique] = rule.beta2 * self.second[unique] + (1 - rule.beta2) * gradient**2
            mean = self.first[unique] / (1 - rule.beta1 ** self.updates[unique]).float()
            square = self.second[unique] / (1 - rule.beta2 ** self.updates[unique]).float()
            change = mean / (square.sqrt() + rule.eps)
        self.rows[unique] -= rule.lr * change


def replay(
    batches: Sequence[Batch],
    schema: Schema,
    seed: int = 0,
    delay: int = 0,
    dense_delay: int = 0,
    initial_rows: InitialRows | None = None,
    *,
    network: Callable[[Schema], nn.Module] = DeepFM,
    test: Sequence[Batch] | None = None,
    embedding_optimizer: EmbeddingOptimizer = ADAGRAD,
    network_lr: float = 1e-3,
) -> Replay:
    """Trains once over the batches, with gradients applied late by a constant number of batches.

    Args:
        batches: the data, in order.
        schema: of the batches.
        seed: of the network (built right after `torch.manual_seed(seed)`), and of the rows unless they are given.
        delay: batch i sees the embeddings after the gradients of batches 0 to i - delay - 1.
        dense_delay: the number of batches by which the network's gradient is late.
        initial_rows: first value of the rows; by default uniform in +-0.01.
        network: builds the network.
        test: batches to score after training, when all gradients have been applied.
        embedding_optimizer: of the rows.
        network_lr: of Adam on the network.

    Raises:
        ValueError: the schema or the optimizer has what the replay does not know.
    """
    tables = Tables(batches, schema, seed, initial_rows, embedding_optimizer)
    torch.manual_seed(seed)
    model = network(schema)
    optimizer = torch.optim.Adam(model.parameters(), network_lr, fused=True)
    waiting: deque[tuple[Tensor, Tensor]] = deque()  # embedding gradients not yet applied, oldest first
    dense_waiting: deque[list[Tensor | None]] = deque()
    scores: list[Tensor] = []

    def apply_until(left: int) -> None:
        while len(waiting) > left:
            tables.apply(*waiting.popleft())

    def step_until(left: int) -> None:
        while len(dense_waiting) > left:
            for parameter, gradient in zip(model.parameters(), dense_waiting.popleft(), strict=True):
                parameter.grad = gradient
            optimizer.step()

    begin = time.perf_counter()
    for batch in batches:
        apply_until(delay)
        features, unique, leaf = tables.lookup(batch, schema)
        logits = model(torch.from_numpy(batch.dense), features)
        loss = F.binary_cross_entropy_with_logits(logits, torch.from_numpy(batch.labels))
        optimizer.zero_grad()
        loss.backward()
        assert leaf.grad is not None
        waiting.append((unique, leaf.grad))
        dense_waiting.append([parameter.grad for parameter in model.parameters()])
        step_until(dense_delay)
        scores.append(logits.detach())
    apply_until(0)
    step_until(0)
    logits_seen = torch.cat(scores).numpy()
    seconds = time.perf_counter() - begin
    labels = np.concatenate([b.labels for b in batches])
    areas = [auc(labels[:, k], logits_seen[:, k]) for k in range(labels.shape[1])]
    test_logits = None
    if test is not None:
        model.eval()
        with torch.no_grad():
            scored = [model(torch.from_numpy(b.dense), tables.lookup(b, schema)[0]) for b in test]
        test_logits = torch.cat(scored).numpy()
    return Replay(float(np.mean(areas)), logits_seen, test_logits, len(labels) / seconds)


class DelayedSync(NamedTuple):
    """Result of `delayed_sync`.

    Attributes:
        auc: progressive, mean over labels.
        network: trained.
        tables: trained.
    """

    auc: float
    network: nn.Module
    tables: Tables


def delayed_sync(
    batches: Sequence[Batch],
    schema: Schema,
    seed: int,
    versions: Sequence[int],
    nn_workers: int,
    initial_rows: InitialRows,
    *,
    network: Callable[[Schema], nn.Module] = DeepFM,
    embedding_optimizer: EmbeddingOptimizer = ADAGRAD,
    network_lr: float = 1e-3,
) -> DelayedSync:
    """Trains once over the batches: Sync with rows of earlier steps, to which Hybrid has to be equal.

    Batch `i` belongs to step `i // nn_workers`. The network and the rows get the gradient of the mean loss over all
    rows of a step, as one update.

    Args:
        batches: the data, in order.
        schema: of the batches.
        seed: of the network, built right after `torch.manual_seed(seed)`.
        versions: number of steps that the rows of each batch contain.
        nn_workers: how many batches make a step; the last one may have fewer.
        initial_rows: first value of the rows.
        network: builds the network.
        embedding_optimizer: of the rows.
        network_lr: of Adam on the network.

    Raises:
        ValueError: a batch has no version, or sees its own step or a later one.
    """
    tables = Tables(batches, schema, seed, initial_rows, embedding_optimizer)
    torch.manual_seed(seed)
    model = network(schema)
    optimizer = torch.optim.Adam(model.parameters(), network_lr, fused=True)
    readers: dict[int, list[int]] = defaultdict(list)
    for i, version in enumerate(versions):
        readers[version].append(i)
    seen: dict[int, tuple[dict[str, Tensor], Tensor, Tensor]] = {}
    scores: list[Tensor] = []
    for step, start in enumerate(range(0, len(batches), nn_workers)):
        seen.update((i, tables.lookup(batches[i], schema)) for i in readers[step])
        numbers = range(start, min(start + nn_workers, len(batches)))
        rows = sum(len(batches[i].labels) for i in numbers)
        optimizer.zero_grad()
        positions, gradients = [], []
        for i in numbers:
            if i not in seen:
                raise ValueError(f"Batch {i} of step {step} has no version, or one after {step}.")
            features, unique, leaf = seen.pop(i)
            logits = model(torch.from_numpy(batches[i].dense), features)
            loss = F.binary_cross_entropy_with_logits(logits, torch.from_numpy(batches[i].labels))
            (loss * (len(batches[i].labels) / rows)).backward()
            assert leaf.grad is not None
            positions.append(unique)
            gradients.append(leaf.grad)
            scores.append(logits.detach())
        optimizer.step()
        merged, inverse = torch.unique(torch.cat(positions), return_inverse=True)
        tables.apply(merged, torch.zeros(len(merged), tables.dim).index_add_(0, inverse, torch.cat(gradients)))
    labels = np.concatenate([b.labels for b in batches])
    logits_seen = torch.cat(scores).numpy()
    area = float(np.mean([auc(labels[:, k], logits_seen[:, k]) for k in range(labels.shape[1])]))
    return DelayedSync(area, model, tables)


def example(
    rows: int, seed: int = 0, features: int = 12, vocabulary: int = 100_000, batch: int = 1024
) -> tuple[Schema, list[Batch]]:
    """Stationary data: Zipf(1.05) ids; logits are effects of each id and of each pair of neighbouring features."""
    rng = np.random.default_rng(seed)
    schema = Schema([IdFeature(f"f{i}", dim=16) for i in range(features)])
    weight = np.cumsum(np.arange(1, vocabulary + 1) ** -1.05)
    latent = rng.normal(size=(features, vocabulary, 3)).astype(np.float32)  # an effect of its own, two of pairs
    batches = []
    for _ in range(rows // batch):
        ids = np.searchsorted(weight, rng.random((features, batch)) * weight[-1])
        vectors = np.stack([latent[f, ids[f]] for f in range(features)])
        own = vectors[:, :, 0].sum(0) / np.sqrt(features)
        pairs = (vectors[0::2, :, 1:] * vectors[1::2, :, 1:]).sum((0, 2)) / np.sqrt(features)
        logits = own + pairs
        labels = (rng.random(batch) < 1 / (1 + np.exp(-logits))).astype(np.float32)[:, None]
        columns = {f"f{f}": IdColumn(ids[f].astype(np.uint64)) for f in range(features)}
        batches.append(Batch(columns, np.zeros((batch, 0), np.float32), labels))
    return schema, batches


def normal_rows(std: float, seed: int, dim: int = 16) -> InitialRows:
    """Rows that begin with normal values."""
    rng = np.random.default_rng(seed)
    return lambda table, ids: rng.normal(0.0, std, (len(ids), dim)).astype(np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description="Progressive AUC with delayed gradients; prints one JSON line.")
    parser.add_argument(
        "--data", choices=["quality", "example"], default="quality", help="of quality.py, or simpler ones"
    )
    parser.add_argument("--rows", type=int, default=3_000_000)
    parser.add_argument("--delay", type=int, default=0, help="of embedding gradients, in batches")
    parser.add_argument("--dense-delay", type=int, default=0, help="of the network's gradients")
    parser.add_argument(
        "--init-std", type=float, help="rows begin normal with this deviation; uniform in +-0.01 without"
    )
    parser.add_argument("--initial-accumulator", type=float, default=0.01, help="of Adagrad on the rows")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.data == "example":
        schema, batches = example(args.rows, args.seed)
    else:
        reader = synthetic(args.rows, pairs=12, latent_dim=4, seed=args.seed, batch_size=1024)
        schema, batches = reader.schema, list(reader)
    rows = None if args.init_std is None else normal_rows(args.init_std, args.seed)
    result = replay(
        batches,
        schema,
        args.seed,
        delay=args.delay,
        dense_delay=args.dense_delay,
        initial_rows=rows,
        embedding_optimizer=Adagrad(lr=0.05, initial_accumulator=args.initial_accumulator),
    )
    print(json.dumps({"auc": result.auc, "rows_per_s": result.rows_per_s, **vars(args)}))


if __name__ == "__main__":
    main()
