"""Plain PyTorch with `nn.Embedding` around any network of `persia.nn.models`: the peer of `benchmarks/zoo.py`.

Ids are numbered and sequences padded in advance, outside of the time that is measured. Embeddings have sparse gradients
and torch's Adagrad, the network Adam; loss, network and the first values of rows are persia's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from persia.batching.batch import Batch
from persia.batching.id_column import IdColumn
from persia.nn.objective import Objective
from persia.nn.pooling import SequenceEmbedding
from persia.schema import Adagrad, Schema

from .globo_torch import auc


class Input(NamedTuple):
    """A batch as tensors: by feature, what its embedding is looked up by."""

    dense: Tensor
    labels: Tensor
    single: dict[str, Tensor]  # [batch]
    bags: dict[str, tuple[Tensor, Tensor]]  # ids, offsets [batch + 1]
    sequences: dict[str, tuple[Tensor, Tensor]]  # [batch, length], mask


class Result(NamedTuple):
    """Progressive AUC (mean over labels) and speed."""

    auc: float
    rows_per_s: float


class Embeddings(nn.Module):
    """One `nn.Embedding` for each table, with these first values, which are copied."""

    def __init__(self, schema: Schema, values: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.schema = schema
        self.tables = nn.ModuleDict(
            {name: nn.Embedding.from_pretrained(first.clone(), False, sparse=True) for name, first in values.items()}
        )

    def forward(self, batch: Input) -> dict[str, Tensor | SequenceEmbedding]:
        inputs: dict[str, Tensor | SequenceEmbedding] = {}
        for feature in self.schema.id_features:
            name, table = feature.name, self.tables[feature.table_name]
            if feature.pooling is None:
                index, mask = batch.sequences[name]
                inputs[name] = SequenceEmbedding(table(index) * mask.unsqueeze(2), mask)
            elif name in batch.single:
                inputs[name] = table(batch.single[name])
            else:
                ids, offsets = batch.bags[name]
                assert feature.pooling != "sqrtn"
                inputs[name] = F.embedding_bag(
                    ids, table.weight, offsets, mode=feature.pooling, sparse=True, include_last_offset=True
                )
        return inputs


def prepared(schema: Schema, batches: Sequence[Batch]) -> tuple[list[Input], dict[str, np.ndarray]]:
    """Numbers the ids of each table, pads sequences, and returns the ids in the order of their numbers."""
    known: dict[str, np.ndarray] = {}
    for table in schema.resolved_tables():
        names = [f.name for f in schema.id_features if f.table_name == table]
        known[table] = np.unique(np.concatenate([b.id_features[name].values for b in batches for name in names]))
    inputs = []
    for batch in batches:
        one = Input(torch.from_numpy(batch.dense), torch.from_numpy(batch.labels), {}, {}, {})
        for feature in schema.id_features:
            column = batch.id_features[feature.name]
            index = np.searchsorted(known[feature.table_name], column.values).astype(np.int64)
            if feature.pooling is None:
                one.sequences[feature.name] = _padded(index, column, len(batch), feature.max_length or 0)
            elif column.offsets is None:
                one.single[feature.name] = torch.from_numpy(index)
            else:
                one.bags[feature.name] = torch.from_numpy(index), torch.from_numpy(column.offsets)
        inputs.append(one)
    return inputs, known


def _padded(index: np.ndarray, column: IdColumn, rows: int, length: int) -> tuple[Tensor, Tensor]:
    offsets = np.arange(rows + 1) if column.offsets is None else column.offsets
    mask = np.arange(length) < np.diff(offsets)[:, None]
    where = np.where(mask, offsets[:-1, None] + np.arange(length), 0)
    padded = index[where] if len(index) else np.zeros(where.shape, np.int64)
    return torch.from_numpy(padded), torch.from_numpy(mask)


def embedding_share(
    model: nn.Module, schema: Schema, inputs: Sequence[Input], values: Mapping[str, Tensor], rows: Adagrad, lr: float
) -> float:
    """Returns the share of a training step that embeddings take: lookup, backward, and update of their rows.

    The median over batches, after a first one. Arguments as for `run`, whose clock these stops would disturb.
    """
    torch.sparse.check_sparse_tensor_invariants.disable()
    embeddings, network, tables = _made(model, schema, values, rows, lr)
    model.train()
    objective = Objective(model, schema)
    shares = []
    for batch in inputs:
        times = [time.perf_counter()]
        looked_up = embeddings(batch)
        outputs = [each.values if isinstance(each, SequenceEmbedding) else each for each in looked_up.values()]
        times.append(time.perf_counter())
        leaves = {
            name: SequenceEmbedding(each.values.detach().requires_grad_(), each.mask)
            if isinstance(each, SequenceEmbedding)
            else each.detach().requires_grad_()
            for name, each in looked_up.items()
        }
        _, loss = objective(model(batch.dense, leaves), batch.labels)
        network.zero_grad()
        loss.backward()
        network.step()
        times.append(time.perf_counter())
        tensors = [each.values if isinstance(each, SequenceEmbedding) else each for each in leaves.values()]
        reached = [(output, leaf.grad) for output, leaf in zip(outputs, tensors, strict=True) if leaf.grad is not None]
        tables.zero_grad()
        torch.autograd.backward([output for output, _ in reached], [gradient for _, gradient in reached])
        tables.step()
        times.append(time.perf_counter())
        shares.append(1 - (times[2] - times[1]) / (times[3] - times[0]))
    return statistics.median(shares[1:] or shares)


def _made(
    model: nn.Module, schema: Schema, values: Mapping[str, Tensor], rows: Adagrad, lr: float
) -> tuple[Embeddings, torch.optim.Optimizer, torch.optim.Optimizer]:
    """Returns the tables, and the optimizers of the network and of the tables."""
    embeddings = Embeddings(schema, values)
    network = torch.optim.Adam(model.parameters(), lr)
    tables = torch.optim.Adagrad(
        embeddings.parameters(), rows.lr, initial_accumulator_value=rows.initial_accumulator, eps=rows.eps
    )
    return embeddings, network, tables


def run(
    model: nn.Module, schema: Schema, inputs: Sequence[Input], values: Mapping[str, Tensor], rows: Adagrad, lr: float
) -> Result:
    """Trains for one pass and scores each batch before training on it.

    Arguments as for `trained`.
    """
    _, scores, seconds = trained(model, schema, inputs, values, rows, lr)
    labels = np.concatenate([batch.labels.numpy() for batch in inputs])
    predictions = torch.cat(scores).numpy()
    areas = [auc(labels[:, i], predictions[:, i]) for i in range(labels.shape[1])]
    return Result(float(np.mean(areas)), len(labels) / seconds)


def trained(
    model: nn.Module, schema: Schema, inputs: Sequence[Input], values: Mapping[str, Tensor], rows: Adagrad, lr: float
) -> tuple[Embeddings, list[Tensor], float]:
    """Trains for one pass; returns the tables, the logits of each batch before training on it, and the seconds.

    Args:
        model: a network of persia.
        schema: of the batches.
        inputs: the batches.
        values: first values of each table's rows, by the number of the id.
        rows: optimizer of the embeddings.
        lr: of Adam, on the network.
    """
    torch.sparse.check_sparse_tensor_invariants.disable()  # said aloud, or torch warns
    embeddings, network, tables = _made(model, schema, values, rows, lr)
    model.train()
    objective = Objective(model, schema)
    scores = []
    begin = time.perf_counter()
    for batch in inputs:
        logits, loss = objective(model(batch.dense, embeddings(batch)), batch.labels)
        network.zero_grad()
        tables.zero_grad()
        loss.backward()
        network.step()
        tables.step()
        scores.append(logits.detach())
    return embeddings, scores, time.perf_counter() - begin
