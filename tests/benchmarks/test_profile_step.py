"""The profile of a step times what training computes: the same calls, in the threads that its docstring names."""

import functools
import itertools
import threading
from dataclasses import replace

import numpy as np
import pytest
from benchmarks.profile_step import OPTIMIZERS, PARTS, WORK, Parts

from persia import Batch
from persia.cluster import Embedded
from persia.modes import Hybrid
from persia.nn import EmbeddingCollection
from persia.nn.pooling import Expander, PooledAhead
from persia.nn.prepared import PreparedBatch
from persia.nn.transfer import Transfer
from persia.worker import Worker

SMALL = replace(WORK["smoke"], rows=500, batch=64, features=3, batches=3)
CALLS = [
    ("persia-lookup", [(Batch, "validate"), (Worker, "register"), (Worker, "lookup"), (Transfer, "rows")]),
    ("persia-lookup", [(Expander, "ahead"), (PooledAhead, "pool"), (PreparedBatch, "await_gradient")]),
    ("MainThread", [(PooledAhead, "embeddings"), (Transfer, "gradients_of"), (PooledAhead, "gradients")]),
    ("persia-push", [(Expander, "sum_rows"), (Worker, "push")]),
]
"""Calls for a batch in training, by thread."""

MODE = Hybrid(1, warmup=0, refresh=False)
"""In which rows are pooled as they are looked up, and never again."""


class Elsewhere(Embedded):
    """As if rows were in another process, so that lookups run in a thread."""

    def connect(self, *arguments):
        return super().connect(*arguments)._replace(near=False)


def train(parts, batches):
    """Trains on batches as `Parts.step` does, but through `prefetch`; returns the collection."""
    optimizer = parts.collection.optimizer
    collection = EmbeddingCollection(parts.schema, optimizer=optimizer, mode=MODE, cluster=Elsewhere(threads=1))
    for batch in collection.prefetch(batches):
        sum(values.sum() for values in collection(batch).values()).backward()
    return collection


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=list(OPTIMIZERS))
def test_rows_are_those_of_training_bit_for_bit(optimizer):
    parts = Parts(SMALL, 1, optimizer)
    for batch in itertools.chain(parts.batches, parts.batches):
        parts.step(batch)
    trained = train(parts, parts.batches * 2)
    ids = np.arange(SMALL.rows, dtype=np.uint64)
    for table in parts.schema.resolved_tables():
        ours, theirs = (collection.rows(table, ids, state=True) for collection in (parts.collection, trained))
        assert ours.found.any()
        for mine, other in zip(ours, theirs, strict=True):
            np.testing.assert_equal(mine, other)


def test_calls_are_those_of_training_in_the_same_order(monkeypatch):
    parts = Parts(SMALL, 1, OPTIMIZERS["adagrad"])
    called = []

    def record(kind, name):
        method = getattr(kind, name)

        @functools.wraps(method)
        def recorded(*args, **kwargs):
            called.append((threading.current_thread().name, f"{kind.__name__}.{name}"))
            return method(*args, **kwargs)

        monkeypatch.setattr(kind, name, recorded)

    record(Expander, "__call__")  # Pools in the training thread: neither may.
    for _, methods in CALLS:
        for kind, name in methods:
            record(kind, name)
    expected = [(thread, f"{kind.__name__}.{name}") for thread, methods in CALLS for kind, name in methods]
    train(parts, parts.batches[:1])
    assert called == expected
    called.clear()
    parts.step(parts.batches[0])
    assert called == [("MainThread", name) for _, name in expected]


def test_every_part_is_timed_once_a_step():
    parts = Parts(SMALL, 1, OPTIMIZERS["adagrad"])
    parts.step(parts.batches[0])
    assert list(parts.times) == list(PARTS)
    assert all(len(times) == 1 for times in parts.times.values())
