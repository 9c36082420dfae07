"""Batches, networks and trainers for tests of modes and switches."""

import threading
import time
from collections import Counter

import numpy as np
import torch

import persia
from persia import Batch, IdColumn, IdFeature, Schema
from persia.coordinator import TokenScheduler
from persia.optim import Adagrad
from persia.types.half_floats import from_halves
from support.listed import Listed

DEADLINE = 30.0
ROWS = 16
ONE_AT_A_TIME = threading.Lock()
"""NN workers that are threads share torch's random generator."""
SCHEMA = Schema([IdFeature("user", dim=4), IdFeature("item", dim=4)], dense_features=["x", "y"], labels=["click"])


def batches(count, rows=ROWS, ids=40, seed=0):
    random = np.random.default_rng(seed)
    return Listed(
        Batch(
            {name: IdColumn(random.integers(0, ids, rows, dtype=np.uint64)) for name in ("user", "item")},
            random.normal(size=(rows, 2)).astype(np.float32),
            random.integers(0, 2, (rows, 1)).astype(np.float32),
        )
        for _ in range(count)
    )


class Net(torch.nn.Module):
    def __init__(self, dtype):
        super().__init__()
        with ONE_AT_A_TIME:
            torch.manual_seed(1)
            self.layers = torch.nn.Sequential(torch.nn.Linear(10, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).to(dtype)
        self.dtype = dtype

    def forward(self, dense, embeddings):
        return self.layers(torch.cat([dense, embeddings["user"], embeddings["item"]], 1).to(self.dtype))


class CrashingNet(Net):
    """A network that ends its NN worker in a given step."""

    def __init__(self, left, error=KeyboardInterrupt):
        super().__init__(torch.float32)
        self.left, self.error = left, error

    def forward(self, dense, embeddings):
        self.left -= self.training  # A checkpoint looks at the last batch once more.
        if self.left == 0:
            raise self.error("killed")
        return super().forward(dense, embeddings)


def adam(parameters):
    return torch.optim.Adam(parameters, 1e-2)


def trainer(mode, cluster=None, dtype=torch.float32, optimizer=None, embedding_optimizer=None, model=None, **options):
    options = {"progress": False, "timeout": DEADLINE} | options
    return persia.Trainer(
        model or Net(dtype),
        SCHEMA,
        optimizer=optimizer or adam,
        embedding_optimizer=embedding_optimizer or Adagrad(lr=0.05),
        mode=mode,
        cluster=cluster,
        options=persia.TrainerOptions(**options),
    )


def leave_batches_to(victim, monkeypatch):
    """Lets the other NN workers get ahead of one that is to die by some batches, so that there are enough for it.

    In modes with tokens; else all make equal steps.
    """
    take, cancel = TokenScheduler.take, TokenScheduler.cancel
    taken, dead = Counter(), set()

    def patient(self, caller, request):
        taken[caller.rank] += 1
        end = time.monotonic() + 5.0  # It may wait for them: for others to complete its step.
        while taken[caller.rank] > 4 + 2 * taken[victim] and not dead and time.monotonic() < end:
            time.sleep(0.001)
        return take(self, caller, request)

    def noted(self, generation, rank, *arguments):
        dead.add(rank)
        return cancel(self, generation, rank, *arguments)

    monkeypatch.setattr(TokenScheduler, "take", patient)
    monkeypatch.setattr(TokenScheduler, "cancel", noted)


def rows_of(t):
    rows = {}
    for server in t.embeddings.connection.servers:
        for chunk in server.export_rows():
            ids, values = chunk.arrays["ids"], from_halves(chunk.arrays["embeddings"])
            rows.update({(chunk.table, int(i)): v for i, v in zip(ids, values, strict=True)})
    return rows


def assert_same(a, b, tolerance):
    for p, q in zip(a.model.parameters(), b.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=tolerance)
    mine, theirs = rows_of(a), rows_of(b)
    assert mine.keys() == theirs.keys()
    for key in mine:
        np.testing.assert_allclose(mine[key], theirs[key], rtol=0, atol=tolerance)
