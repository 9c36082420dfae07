"""Data and runs for benchmarks/zoo.py."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from msgspec import structs

from benchmarks.baselines import zoo_torch
from persia import Batch, IdFeature, Schema, Trainer, TrainerOptions, data
from persia.data.generator import expected_auc
from persia.modes import Gba, Sync
from persia.nn import models
from persia.optim import Adagrad
from persia.services import Cluster
from persia.store import NativeStore, TableConfig
from persia.testing import Threads

__all__ = [
    "LONG",
    "MODELS",
    "SEQUENCE_RATES",
    "SEQUENTIAL",
    "Clicks",
    "days_of",
    "embedding_share",
    "first_values",
    "long_sequences",
    "sequences",
    "switched",
    "train",
    "train_in_torch",
]

BATCH = 1024
RATES = (Adagrad(lr=0.05), 1e-3)
"""Of embeddings, and of Adam on the network."""
SEQUENCE_RATES = (Adagrad(lr=0.1), 3e-3)
"""Of generated sequences. A model that still learns fast pays for every delay; with these, it is soon near its best."""
LENGTH, CATEGORIES, ITEMS = 12, 10, 500
LONG, LONG_ITEMS = 1_000, 100_000
"""Events of a long history, and the items that they are of."""
SHARE_BATCHES = 20
"""Batches of which the share of embeddings in PyTorch's step is measured."""
WORKERS, LOCAL = 4, 128
SEEDING = threading.Lock()
"""NN workers that are threads share torch's random generator."""

Make = Callable[[Schema, bool], torch.nn.Module]
MODELS: Mapping[str, Make] = {
    "ffnn": lambda schema, _: models.FFNN(schema),
    "deepfm": lambda schema, _: models.DeepFM(schema),
    "dlrm": lambda schema, _: models.DLRM(schema),
    "dcn_v2": lambda schema, _: models.DCNv2(schema),
    "final_mlp": lambda schema, _: models.FinalMLP(schema),
    "mask_net": lambda schema, _: models.MaskNet(schema),
    "mmoe": lambda schema, _: models.MMoE(schema),
    "ple": lambda schema, _: models.PLE(schema),
    "youtube_dnn": lambda schema, _: models.YouTubeDNN(schema),
    "din": lambda schema, _: models.DIN(schema),
    "dien": lambda schema, newest_first: models.DIEN(schema, newest_first=newest_first),
    "sasrec": lambda schema, newest_first: models.SASRec(schema, newest_first=newest_first),
    "hstu": lambda schema, newest_first: models.HSTU(schema, newest_first=newest_first),
    "two_tower": lambda schema, _: models.TwoTower(schema, item=candidates(schema)),
}
"""By name: from a schema, and whether histories have the newest event first."""
SEQUENTIAL = ("youtube_dnn", "din", "dien", "sasrec", "hstu", "two_tower")
"""Models that are made for histories."""


def candidates(schema: Schema) -> list[str]:
    """Returns the features of the item whose click is predicted: those in the table of a history."""
    tables = {feature.table_name for feature in schema.id_features if feature.pooling is None}
    return [f.name for f in schema.id_features if f.pooling is not None and f.table_name in tables]


class Clicks(NamedTuple):
    """Batches of a data set.

    Attributes:
        schema: their schema.
        batches: in the order of training.
        rates: optimizer of the embeddings, and learning rate of the network.
        newest_first: whether histories have the newest event first.
        best: AUC of the true probabilities; None where they are not known.
    """

    schema: Schema
    batches: list[Batch]
    rates: tuple[Adagrad, float] = RATES
    newest_first: bool = False
    best: float | None = None


@functools.cache
def globo(rows: int, sequence: bool) -> Clicks | None:
    """The first clicks of globo_ctr, the history as a mean or as a sequence; None without the data."""
    path = data.find("globo_ctr")
    if path is None:
        return None
    schema = data.globo(path).schema
    if sequence:
        features = [
            structs.replace(feature, pooling=None) if feature.name == "history" else feature
            for feature in schema.id_features
        ]
        schema = structs.replace(schema, id_features=features)
    reader = data.parquet(path, schema, BATCH, day="day")
    return Clicks(schema, list(itertools.islice(reader, rows // BATCH)), newest_first=True)


@functools.cache
def adult(rows: int) -> Clicks | None:
    """The training part of adult, in batches of 128; None without the data."""
    if data.find("adult") is None:
        return None
    reader = data.adult(batch_size=128)
    return Clicks(reader.schema, list(itertools.islice(reader, max(1, rows // 128))))


@functools.cache
def sequences(rows: int, batch_size: int = BATCH, seed: int = 0) -> Clicks:
    """Clicks on items like the newest of a history whose interests change, with the best possible AUC.

    A user is interested in one of ten categories of items for some events, then in another one. The candidate is
    clicked with probability 0.7 if it is of the newest event's category, else 0.1.
    """
    schema = Schema([IdFeature("item", dim=16), IdFeature("history", table="item", pooling=None, max_length=LENGTH)])
    rng = np.random.default_rng(seed)
    batches, probabilities = [], []
    for _ in range(rows // batch_size):
        changes = np.cumsum(rng.random((batch_size, LENGTH)) < 0.3, axis=1)
        interest = rng.integers(0, CATEGORIES, (batch_size, LENGTH + 1))[np.arange(batch_size)[:, None], changes]
        events = interest + CATEGORIES * rng.integers(0, ITEMS // CATEGORIES, interest.shape)
        category = np.where(rng.random(batch_size) < 0.5, interest[:, -1], rng.integers(0, CATEGORIES, batch_size))
        item = category + CATEGORIES * rng.integers(0, ITEMS // CATEGORIES, batch_size)
        probability = np.where(category == interest[:, -1], 0.7, 0.1).astype(np.float32)
        columns = {"item": item, "history": events, "label": rng.random(batch_size) < probability}
        batches.append(Batch.from_columns(schema, columns))
        probabilities.append(probability)
    return Clicks(schema, batches, SEQUENCE_RATES, best=expected_auc(np.concatenate(probabilities)))


@functools.cache
def long_sequences(rows: int, batch_size: int) -> Clicks:
    """Clicks at random on items, with histories of 1,000 events each: for rates, as there is nothing to learn."""
    features = [IdFeature("item", dim=16), IdFeature("history", table="item", pooling=None, max_length=LONG)]
    schema = Schema(features)
    rng = np.random.default_rng(0)
    batches = []
    for _ in range(rows // batch_size):
        events = np.minimum(rng.zipf(1.2, (batch_size, LONG + 1)), LONG_ITEMS)
        columns = {"item": events[:, 0], "history": events[:, 1:], "label": np.arange(batch_size) % 2}
        batches.append(Batch.from_columns(schema, columns))
    return Clicks(schema, batches)


def embedding_share(clicks: Clicks, make: Make) -> float:
    """Returns the share of PyTorch's step that embeddings take."""
    torch.manual_seed(0)
    batches = clicks.batches[:SHARE_BATCHES]
    inputs, ids = zoo_torch.prepared(clicks.schema, batches)
    model = make(clicks.schema, clicks.newest_first)
    return zoo_torch.embedding_share(model, clicks.schema, inputs, first_values(clicks.schema, ids, 0), *clicks.rates)


def first_values(schema: Schema, ids: Mapping[str, np.ndarray], seed: int) -> dict[str, torch.Tensor]:
    """Returns the values with which the rows of ids start here, float32 [ids, dim] by table."""
    store, tensors = NativeStore(), {}
    for name, table in schema.resolved_tables().items():
        number = store.create_table(TableConfig(name, table.dim, seed=seed))
        (values,) = store.lookup([number], [ids[name]], True)
        tensors[name] = torch.from_numpy(values)
    return tensors


def train(clicks: Clicks, make: Make, seed: int) -> zoo_torch.Result:
    """Trains one pass.

    Args:
        clicks: what is trained.
        make: makes the network.
        seed: of the network and of rows.
    """
    result = _trainer(clicks, make, seed, None).fit(clicks.batches)
    areas = [figures.auc for figures in result.progressive.labels.values()]
    return zoo_torch.Result(float(np.mean(areas)), result.rows_per_second)


def train_in_torch(clicks: Clicks, make: Make, seed: int) -> zoo_torch.Result:
    """Trains the same in plain PyTorch."""
    torch.manual_seed(seed)
    model = make(clicks.schema, clicks.newest_first)
    inputs, ids = zoo_torch.prepared(clicks.schema, clicks.batches)
    return zoo_torch.run(model, clicks.schema, inputs, first_values(clicks.schema, ids, seed), *clicks.rates)


def days_of(rows: int, seed: int) -> tuple[list[Clicks], list[Batch]]:
    """Returns five days of clicks in local batches, and a test set."""
    whole = sequences(5 * rows, LOCAL, seed)
    test = sequences(max(LOCAL, min(rows, 65_536)), LOCAL, 1_000 + seed)
    size = rows // LOCAL
    days = [whole._replace(batches=whole.batches[at : at + size]) for at in range(0, 5 * size, size)]
    return days, [Batch.concat(test.batches)]


def switched(days: Sequence[Clicks], test: list[Batch], make: Make, modes: Sequence[str], seed: int) -> list[float]:
    """Trains day by day, each in a mode ("sync" or "gba"), with 4 NN workers; returns the test AUC after each day."""

    def work(member: Any) -> list[float]:
        trainer = _trainer(days[0], make, seed, member)
        scores = []
        before = "sync"
        for day, kind in zip(days, modes, strict=True):
            if kind != before and member.rank == 0:
                trainer.switch(Sync() if kind == "sync" else Gba(WORKERS * LOCAL))
            before = kind
            trainer.fit(day.batches)
            scores.append(trainer.evaluate(test).auc)
        return scores

    scores: list[float] = Threads(WORKERS).run(work)[0]
    return scores


def _trainer(clicks: Clicks, make: Make, seed: int, cluster: Cluster | None) -> Trainer:
    rows, network_lr = clicks.rates
    with SEEDING:
        torch.manual_seed(seed)
        model = make(clicks.schema, clicks.newest_first)
    return Trainer(
        model,
        clicks.schema,
        optimizer=lambda parameters: torch.optim.Adam(parameters, network_lr),
        embedding_optimizer=rows,
        mode=Sync(),
        cluster=cluster,
        options=TrainerOptions(seed=seed, device="cpu", progress=False),
    )
