"""Sessions of items, and runs of `NextItem` on them here and in plain PyTorch, for benchmarks/seq.py.

Few items are popular, and each has three that often follow it. All positions of a session are predicted, against items
that are drawn by popularity and shared by the batch. Here the reader draws them while it trains; plain PyTorch gets the
same batches, drawn and numbered in advance, outside of the time that is measured.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.baselines import zoo_torch
from benchmarks.zoo_runs import first_values
from persia import Batch, IdFeature, Schema, Trainer, TrainerOptions, data
from persia.modes import Sync
from persia.nn import SequenceEmbedding
from persia.nn.models import NextItem
from persia.optim import Adagrad

__all__ = ["Amount", "Outcome", "Sessions", "batches_of", "train", "train_in_torch"]

LENGTH, DIM, BATCH, FOLLOWERS = 20, 32, 128, 3
KEPT = 0.8
"""Part of the events that follow the one before."""
RATES = (Adagrad(lr=0.1), 3e-3)
"""Of rows, and of Adam on the network."""
NEAREST = 10
SCHEMA = Schema([IdFeature("item", dim=DIM), IdFeature("history", table="item", pooling=None, max_length=LENGTH)])


class Amount(NamedTuple):
    """Amount of data.

    Attributes:
        items: number of items.
        steps: batches of the pass.
        tested: number of sessions whose next item is ranked among all items.
    """

    items: int
    steps: int
    tested: int


class Outcome(NamedTuple):
    """HR@10 among all items after the pass, and the speed of it."""

    hit_rate: float
    rows_per_s: float


@dataclass(frozen=True)
class Sessions:
    """A reader of sessions, which are in memory."""

    items: NDArray[np.int64]
    schema: Schema = SCHEMA

    def batches(self, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        """See `persia.data.Reader`."""
        for begin in range(start * BATCH, len(self.items), BATCH):
            part = self.items[begin : begin + BATCH]
            columns = {"item": part[:, -1], "history": part[:, :-1], "label": np.ones(len(part))}
            yield Batch.from_columns(SCHEMA, columns)

    def __iter__(self) -> Iterator[Batch]:
        return self.batches()


@functools.cache
def _sessions(amount: Amount, seed: int) -> tuple[Sessions, Sessions]:
    """Returns sessions to train on, and others."""
    rng = np.random.default_rng(seed)
    follows = _popular(amount.items, (amount.items, FOLLOWERS), rng)
    rows = amount.steps * BATCH + amount.tested
    seen = [_popular(amount.items, (rows,), rng)]
    for _ in range(LENGTH):
        linked = follows[seen[-1], rng.integers(0, FOLLOWERS, rows)]
        seen.append(np.where(rng.random(rows) < KEPT, linked, _popular(amount.items, (rows,), rng)))
    items = np.stack(seen, 1)
    return Sessions(items[: -amount.tested]), Sessions(items[-amount.tested :])


def _popular(items: int, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[np.int64]:
    return (items * rng.random(shape) ** 2).astype(np.int64)


@functools.cache
def batches_of(amount: Amount, seed: int) -> data.SharedNegatives:
    """Returns the reader that is trained on."""
    train, _ = _sessions(amount, seed)
    catalog = data.item_catalog(train, ["item"], history=["history"])
    options = {"by": "popularity", "catalog": catalog, "history": ["history"], "seed": seed}
    reader = data.shared_negatives(train, ["item"], BATCH, **options)  # type: ignore[arg-type]
    assert isinstance(reader, data.SharedNegatives)
    return reader


def _network(schema: Schema, seed: int) -> NextItem:
    torch.manual_seed(seed)
    return NextItem(
        schema,
        history=[("history", "item")],
        negatives=["negative_item"],
        log_q="log_q",
        history_log_q="history_log_q",
        negatives_log_q="negative_log_q",
    )


def train(amount: Amount, seed: int) -> Outcome:
    """Trains one pass here."""
    reader = batches_of(amount, seed)
    model = _network(reader.schema, seed)
    trainer = Trainer(
        model,
        reader.schema,
        optimizer=lambda parameters: torch.optim.Adam(parameters, RATES[1]),
        embedding_optimizer=RATES[0],
        mode=Sync(),
        options=TrainerOptions(seed=seed, device="cpu", progress=False),
    )
    result = trainer.fit(reader)
    rows = trainer.embeddings.rows("item", np.arange(amount.items, dtype=np.uint64)).values
    return Outcome(_hit_rate(model, torch.from_numpy(rows), amount, seed), result.rows_per_second)


def train_in_torch(amount: Amount, seed: int) -> Outcome:
    """Trains the same in plain PyTorch."""
    reader = batches_of(amount, seed)
    model = _network(reader.schema, seed)
    batches = list(reader)
    inputs, ids = zoo_torch.prepared(reader.schema, batches)
    first = first_values(reader.schema, ids, seed)
    embeddings, _, seconds = zoo_torch.trained(model, reader.schema, inputs, first, *RATES)
    rows = torch.zeros(amount.items, DIM)
    table = embeddings.tables["item"].weight
    assert isinstance(table, torch.Tensor)
    rows[torch.from_numpy(ids["item"].astype(np.int64))] = table.detach()
    return Outcome(_hit_rate(model, rows, amount, seed), sum(map(len, batches)) / seconds)


def _hit_rate(model: NextItem, rows: torch.Tensor, amount: Amount, seed: int) -> float:
    """Returns the part of sessions whose next item is among the ten with the highest scores of all items."""
    _, test = _sessions(amount, seed)
    items = torch.from_numpy(test.items)
    past = items[:, :-1]
    history = SequenceEmbedding(rows[past], torch.ones(past.shape, dtype=torch.bool))
    with torch.no_grad():
        users = model.eval().users(torch.zeros(len(items), 0), {"history": history})
        nearest = (users @ rows.T).topk(NEAREST).indices
    return float((nearest == items[:, -1:]).any(1).float().mean())
