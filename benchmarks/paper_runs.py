"""Runs of benchmarks/paper.py: where the rows come from, how they are split, and a run in virtual time."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from benchmarks import public_files, shapes
from benchmarks.modes_runs import Rates, area
from benchmarks.public_files import Source
from persia import Batch, Schema, data
from persia.modes import Mode
from persia.nn.models import FFNN, DeepFM
from persia.optim import Adagrad
from persia.replay import Setting, Summary, Timeline, phases, simulate
from persia.replay.virtual import VirtualTraining
from persia.schema import EmbeddingOptimizer
from persia.types import Int64Array
from persia.types.half_floats import Dtype

__all__ = [
    "FILES", "LATENCY", "LOCAL", "NETWORKS", "SOURCES", "WORKERS", "Dataset", "Outcome", "Run", "dataset", "setting",
    "train_along", "train_and_test",
]  # fmt: skip

WORKERS, LOCAL = 4, 256
LATENCY = 0.25
"""Of a lookup, and of a push, in compute times of a batch."""
READ = 8_192
"""Rows that are read, or evaluated, together."""


class Run(NamedTuple):
    """One pass over the training rows of a data set."""

    source: str
    network: str
    mode: Mode
    rates: Rates
    seed: int
    rows: int


class Outcome(NamedTuple):
    """Result of a run: AUC on the test rows after the pass, rows of both parts."""

    auc: float
    summary: Summary
    train_rows: int
    test_rows: int


class Dataset(NamedTuple):
    """Rows of a source, and the row numbers of each part; the training rows in the order of training."""

    schema: Schema
    rows: Batch
    train: Int64Array
    test: Int64Array

    def batch(self, number: int) -> Batch:
        """Returns a training batch."""
        return self.rows.take(self.train[number * LOCAL : (number + 1) * LOCAL])


# --- sources ----------------------------------------------------------------------------------------------------------


def _globo(_rows: int, _seed: int) -> Source:
    reader = data.globo(batch_size=READ)
    return reader.schema, reader


def _shape(name: str) -> Callable[[int, int], Source]:
    def source(rows: int, seed: int) -> Source:
        reader = shapes.SHAPES[name].reader(rows, seed=seed, batch_size=READ)
        return reader.schema, reader

    return source


FILES = {"globo": "globo_ctr", **public_files.DIRECTORIES}
"""Directory in PERSIA_DATA of each source that reads one."""
SOURCES: Mapping[str, Callable[[int, int], Source]] = {
    "globo": _globo,
    **{name: _shape(name) for name in ("taobao", "avazu", "criteo")},
    "taobao_file": lambda _rows, _seed: public_files.taobao(READ),
    "avazu_file": lambda _rows, _seed: public_files.avazu(READ),
    "criteo_file": lambda _rows, _seed: public_files.criteo(READ),
}
"""Schema and rows by name, from a number of rows and a seed; sources that read files ignore both."""


# --- what runs in a process of its own --------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def dataset(source: str, rows: int, seed: int) -> Dataset:
    """Returns the first rows of a source, split at random by a hash of (seed, number of the row): a fifth is for tests.

    The training rows are shuffled by the seed and cut to whole global batches, so all modes train on the same ones.
    """
    schema, batches = SOURCES[source](rows, seed)
    whole = Batch.concat(list(_up_to(batches, rows)))
    test = data.Split("test", seed=seed).rows({}, 0, len(whole))
    train = np.random.default_rng(seed).permutation(np.flatnonzero(~test))
    return Dataset(schema, whole, train[: len(train) // (WORKERS * LOCAL) * WORKERS * LOCAL], np.flatnonzero(test))


def _up_to(batches: Iterable[Batch], rows: int) -> Iterator[Batch]:
    """Yields batches of `rows` rows in all, or of all rows if there are fewer."""
    for batch in batches:
        yield batch.slice(0, rows)
        rows -= len(batch)
        if rows <= 0:
            return


def _ffnn(schema: Schema) -> torch.nn.Module:
    names = {feature.name for feature in schema.id_features}
    products = [("article_id", "history")] if "history" in names else []
    return FFNN(schema, hidden=(256, 128), products=products)


NETWORKS: Mapping[str, Callable[[Schema], torch.nn.Module]] = {"ffnn": _ffnn, "deepfm": DeepFM}


def setting(seed: int, latency: float = LATENCY) -> Setting:
    """Returns the cluster: each NN worker takes half as long again for a quarter of its batches, at random."""
    trace = phases(WORKERS, length=1.0, factor=1.5, count=256, seed=seed)
    return Setting(trace, local_batch=LOCAL, lookup=latency, push=latency)


def train_and_test(run: Run, dtype: Dtype = "float32", optimizer: EmbeddingOptimizer | None = None) -> Outcome:
    """Trains one pass over the training rows, and evaluates the test rows.

    Args:
        run: the run.
        dtype: of all tables.
        optimizer: of rows; None for Adagrad with the rate of the run.
    """
    rows = dataset(run.source, run.rows, run.seed)
    return train_along(run, simulate(run.mode, setting(run.seed), len(rows.train) // LOCAL), dtype, optimizer)


def train_along(
    run: Run, timeline: Timeline, dtype: Dtype = "float32", optimizer: EmbeddingOptimizer | None = None
) -> Outcome:
    """Trains and tests as `train_and_test`, along a timeline."""
    torch.set_num_threads(1)
    rows = dataset(run.source, run.rows, run.seed)
    torch.manual_seed(run.seed)
    tables = [msgspec.structs.replace(table, dtype=dtype) for table in rows.schema.resolved_tables().values()]
    schema = msgspec.structs.replace(rows.schema, tables=tables)
    training = VirtualTraining(
        NETWORKS[run.network](schema),
        schema,
        rows.batch,
        lambda parameters: torch.optim.Adam(parameters, run.rates.dense, fused=True),
        optimizer or Adagrad(lr=run.rates.rows),
        seed=run.seed,
    )
    training.run(timeline)
    test = [rows.rows.take(rows.test[at : at + READ]) for at in range(0, len(rows.test), READ)]
    auc = area(test, training.evaluate(test))
    del training
    gc.collect()  # Servers refer to the training that made them: without this, the tables of several runs add up.
    return Outcome(auc, timeline.summary(), len(rows.train), len(rows.test))
