"""A predictor without a log of changes, whose answers can be checked by hand."""

from __future__ import annotations

import threading
from typing import NamedTuple

import numpy as np

import persia

SCHEMA = persia.Schema(
    [
        persia.IdFeature("user", dim=4),
        persia.IdFeature("tags", dim=4),
        persia.IdFeature("code", dim=2, kind="number"),
        persia.IdFeature("user_b", dim=2, of="user", mapping=persia.Remainder(10)),
    ],
    dense_features=["price", "age"],
    labels=["click", "buy"],
)


class Scored(NamedTuple):
    probabilities: np.ndarray
    step: int
    epoch: int


class State(NamedTuple):
    epoch: int = 3
    network_step: int = 12
    row_steps: dict = {0: 14, 1: 13}  # noqa: RUF012
    age_seconds: float = 0.5
    rows: dict = {"user": 5, "tags": 6, "code": 7, "user_b": 8}  # noqa: RUF012
    problem: str = ""


def expected(users, prices):
    """Probabilities that a `FakePredictor` returns."""
    users = np.asarray(users, np.uint64)
    click = (users % np.uint64(100)).astype(np.float32) / 100
    return np.stack([click, np.tanh(np.abs(np.asarray(prices, np.float32)))], axis=1)


class FakePredictor:
    """Returns `expected`, once it is let to.

    Attributes:
        go: cleared, computations wait.
        computing: set while one runs or waits.
        sizes: samples of each computation.
        may_start: `start` raises this, one after another, before it succeeds.
    """

    schema = SCHEMA

    def __init__(self):
        self.go = threading.Event()
        self.go.set()
        self.computing = threading.Event()
        self.sizes = []
        self.may_start = []
        self.closed = False
        self.current = State()

    def start(self):
        if self.may_start:
            raise self.may_start.pop(0)

    def close(self):
        self.closed = True

    def predict(self, batch):
        self.computing.set()
        assert self.go.wait(60)
        self.computing.clear()
        self.sizes.append(len(batch))
        batch.validate(SCHEMA, require_labels=False)
        return Scored(expected(batch.id_features["user"].values, batch.dense[:, 0]), 12, 3)

    def rank(self, user, items):
        assert len(user) == 1
        ids = np.repeat(user.id_features["user"].values, len(items))
        return Scored(expected(ids, items.dense[:, 0]), 12, 3)

    def embeddings(self, table, ids):
        dim = self.schema.resolved_tables()[table].dim
        found = ids % np.uint64(2) == 0
        return found, np.where(found[:, None], ids[:, None].astype(np.float32), 0) * np.ones((1, dim), np.float32)

    def state(self):
        return self.current
