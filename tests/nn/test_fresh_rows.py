"""`Sync` whose lookups run ahead trains to the same bits as `Sync` whose lookups wait."""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import numpy as np
import pytest
import torch

import persia
from persia.batching.batch import Batch
from persia.batching.id_column import IdColumn
from persia.modes import Sync
from persia.nn import collection, lookahead
from persia.optim import SGD, Adagrad, Adam
from persia.schema import Table, Uniform
from persia.testing import Threads
from support.waiting import wait_until

SAMPLES, HOT = 8, 5
AHEAD = 3
"""Steps by which lookups are known to have run ahead when a batch is used; at most 4."""

OPTIMIZERS = {"sgd": SGD(lr=0.1), "adagrad": Adagrad(lr=0.1), "adam": Adam(lr=0.05)}


class Case(NamedTuple):
    nn_workers: int = 1
    ps: int = 1
    accumulation: int = 1
    optimizer: str = "adagrad"
    dtype: str = "float32"
    rows: str = "all"
    on_host: bool = True

    @property
    def ahead(self):
        """Whether lookups run ahead."""
        return self.rows != "crowded"

    def tables(self, spill):
        """Tables with as few rows, or rows in memory, as lookups that run ahead allow; or too few for them."""
        in_flight = 6 * self.accumulation * self.nn_workers
        tables = []
        for name, dim in (("a", 8), ("c", 3)):
            ids = [np.concatenate([batch.id_features[f].values for f in FEATURES[name]]) for batch in self.data()]
            few = lookahead.MARGIN * in_flight * max(len(np.unique(own)) for own in ids)
            limits = {
                "all": {},
                "crowded": {"capacity": few // 4},
                "evicting": {"capacity": few},
                "on disk": {"memory_rows": few, "capacity": 1_000_000, "spill": spill},
            }[self.rows]
            options = {"dtype": self.dtype, "optimizer": OPTIMIZERS[self.optimizer], "initializer": Uniform(-0.5, 0.5)}
            tables.append(Table(name, dim, **options, **limits))
        return tables

    def schema(self, spill):
        features = [
            persia.IdFeature("a", table="a"),
            persia.IdFeature("history", table="a", pooling="mean"),
            persia.IdFeature("c", table="c"),
        ]
        return persia.Schema(features, tables=self.tables(spill), dense_features=["x"], labels=["y"])

    def data(self):
        """Returns the batches of all NN workers in order."""
        steps = 12 if self.rows == "all" else 50 * self.ps  # Capacities are those of each PS.
        return batches_of(steps * self.accumulation * self.nn_workers)


FEATURES = {"a": ["a", "history"], "c": ["c"]}
UNIVERSE = 8000


@functools.cache
def batches_of(count):
    """Two of five ids are hot, in all batches; the others return rarely."""
    random = np.random.default_rng(5)

    def ids(size):
        hot = random.random(size) < 0.4
        return IdColumn(
            np.where(hot, random.integers(0, HOT, size), random.integers(0, UNIVERSE, size)).astype(np.uint64)
        )

    def batch():
        ends = np.sort(random.integers(0, 2 * SAMPLES, SAMPLES - 1))
        history = IdColumn(ids(2 * SAMPLES).values, np.array([0, *ends, 2 * SAMPLES], np.int64))
        dense, labels = random.random((SAMPLES, 1), np.float32), random.integers(0, 2, (SAMPLES, 1))
        return Batch({"a": ids(SAMPLES), "history": history, "c": ids(SAMPLES)}, dense, labels.astype(np.float32))

    return [batch() for _ in range(count)]


class Net(torch.nn.Module):
    """A network that is not computed before the next batches are looked up."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(20, 1)
        for parameter in self.parameters():  # Threads share the random numbers of torch.
            torch.nn.init.constant_(parameter, 0.1)
        self.before = lambda: None

    def forward(self, dense, embeddings):
        self.before()
        return self.linear(torch.cat([dense, *embeddings.values()], 1))


class Outcome(NamedTuple):
    arrays: list
    staleness: int
    most_ready: int
    left: list | None


def run(case, spill, ahead):
    """Trains, and returns the rows, their state and the network."""
    schema = case.schema(str(spill))

    def work(member):
        net = Net()
        trainer = persia.Trainer(
            net,
            schema,
            optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
            embedding_optimizer=SGD(lr=0.1),
            mode=Sync(),
            cluster=member,
            options=persia.TrainerOptions(device="cpu", progress=False, accumulation_steps=case.accumulation),
        )
        embeddings = trainer.embeddings
        if not case.on_host:  # The way of a GPU.
            embeddings._expander.on_host = embeddings._transfer._on_host = False
        batches = case.data()  # `fit` takes the share of this NN worker.
        used, most_ready = itertools.count(1), [0]

        def wait_for_lookups():
            left = len(batches) // case.nn_workers - next(used)
            if ahead and case.ahead:
                least = min(left, AHEAD * case.accumulation)
                wait_until(lambda: embeddings.ready >= least, "that lookups run ahead")
            most_ready[0] = max(most_ready[0], embeddings.ready)

        net.before = wait_for_lookups
        trainer.fit(batches)
        ids = np.arange(UNIVERSE, dtype=np.uint64)
        parts = [embeddings.rows(table, ids, state=True) for table in ("a", "c")]
        arrays = [array for rows in parts for array in (rows.found, rows.values, *state_of(rows))]
        arrays += [parameter.detach().numpy().copy() for parameter in net.parameters()]
        left = {"evicting": "evicted", "crowded": "evicted", "on disk": "spilled"}.get(case.rows)
        counts = embeddings.statistics().values()
        return Outcome(arrays, embeddings.staleness.max, most_ready[0], left and [table[left] for table in counts])

    return Threads(case.nn_workers, ps=case.ps, timeout=30.0).run(work)


def state_of(rows):
    return rows.state.values, rows.state.update_count, rows.state.last_step


CASES = [
    Case(),
    Case(optimizer="adam", dtype="bfloat16"),
    Case(accumulation=3, optimizer="adam"),
    Case(ps=3, optimizer="sgd", rows="evicting"),
    Case(rows="evicting", optimizer="adam"),
    Case(rows="crowded"),
    Case(rows="on disk"),
    Case(ps=3, rows="on disk", dtype="bfloat16", optimizer="adam"),
    Case(on_host=False),
    Case(on_host=False, ps=3, dtype="bfloat16", optimizer="sgd", accumulation=3),
    Case(2),
    Case(2, 3, 3, "adam", "bfloat16"),
    Case(2, rows="on disk", optimizer="sgd"),
    Case(2, on_host=False, dtype="bfloat16"),
    Case(4, 3, optimizer="adam"),
    Case(4, accumulation=3, optimizer="sgd"),
]
"""Evictions with one NN worker: with several, it depends on the order of their lookups who is evicted, in any case."""


def named(case):
    return "-".join(str(value) for value in case)


@pytest.mark.parametrize("case", CASES, ids=named)
def test_lookups_that_run_ahead_change_no_bit(case, tmp_path, monkeypatch):
    found = run(case, tmp_path / "ahead", ahead=True)
    with monkeypatch.context() as patched:
        patched.setattr(collection, "refreshes", lambda *_: None)
        expected = run(case, tmp_path / "waiting", ahead=False)
    for mine, theirs in zip(found, expected, strict=True):
        for one, other in zip(mine.arrays, theirs.arrays, strict=True):
            np.testing.assert_array_equal(one, other)
        assert mine.staleness == theirs.staleness == 0
        assert mine.left == theirs.left
        assert theirs.most_ready < case.accumulation
        assert (mine.most_ready >= AHEAD * case.accumulation) == case.ahead
        assert mine.left is None or min(mine.left) > 0
