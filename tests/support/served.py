"""A predictor without a log of changes, whose answers can be checked by hand."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

import persia
from persia.errors import ClosedError
from persia.metrics import answers_of
from persia.schema import NO_RULES
from persia.serve.http.codecs.choice import CODECS
from persia.serve.table_embeddings import TableEmbeddings

CODEC = {codec.media_type: codec for codec in CODECS}

SCHEMA = persia.Schema(
    [
        persia.IdFeature("user", dim=4),
        persia.IdFeature("tags", dim=4),
        persia.IdFeature("code", dim=2, kind="number"),
        persia.IdFeature("user_code", dim=2, cross=("user", "code")),
        persia.IdFeature("user_b", dim=2, of="user", mapping=persia.Remainder(10)),
    ],
    dense_features=["price", "age"],
    labels=["click", "buy"],
)


class Scored(NamedTuple):
    """Its scores are what it says they are: probabilities of log-odds, or scores."""

    scores: np.ndarray
    step: int
    epoch: int
    are_log_odds: bool = True

    @property
    def answers(self):
        return answers_of(SCHEMA, log_odds=self.are_log_odds)

    @property
    def values(self):
        return self.scores

    @property
    def ranking(self):
        return self._replace(are_log_odds=False)


class State(NamedTuple):
    epoch: int = 3
    network_step: int = 12
    row_steps: Mapping[int, int] = MappingProxyType({0: 14, 1: 13})
    rows_age_seconds: float = 0.5
    network_age_seconds: float = 0.25
    rows: int = 26
    problem: str = ""
    drift: Mapping[str, float] = MappingProxyType({})
    inputs: Mapping[str, Mapping[str, float]] = MappingProxyType({})


def expected(users, prices):
    """Probabilities that a `FakePredictor` returns."""
    users = np.asarray(users, np.uint64)
    click = (users % np.uint64(100)).astype(np.float32) / 100
    return np.stack([click, np.tanh(np.abs(np.asarray(prices, np.float32)))], axis=1)


def first_users(batch):
    """The first user of each sample; 0 for a sample without."""
    column = batch.id_features["user"]
    if column.offsets is None:
        return column.values
    found = np.zeros(len(batch), np.uint64)
    some = np.diff(column.offsets) > 0
    found[some] = column.values[column.offsets[:-1][some]]
    return found


class Features(NamedTuple):
    ids: tuple[str, ...] = ("user", "user_b")
    dense: tuple[str, ...] = ("age",)


class Nearest(NamedTuple):
    ids: np.ndarray
    scores: np.ndarray
    step: int


class IndexState(NamedTuple):
    step: int = 11
    items: int = 6
    waiting: int = 1
    problem: str = ""


class FakeRetriever:
    """Finds the items from 2^63 on, whose scores are the age of the user minus their place.

    Attributes:
        go: cleared, `start` waits.
        fails: what `start` raises; None if it succeeds.
    """

    user_features = Features()

    def __init__(self):
        self.go, self.fails = threading.Event(), None
        self.go.set()
        self.current = None
        self.stopped, self.closed = threading.Event(), False

    def start(self):
        assert self.go.wait(60)
        if self.stopped.is_set():
            raise ClosedError("stopped")
        if self.fails is not None:
            raise self.fails
        self.current = IndexState()

    def stop(self):
        self.stopped.set()
        self.go.set()

    def close(self):
        self.closed = True

    def state(self):
        return self.current

    def search(self, users, k):
        assert {"user", "user_b"} <= set(users.id_features)
        count = min(k, self.current.items)
        places = np.arange(count)
        ids = np.broadcast_to(2**63 + places.astype(np.uint64), (len(users), count))
        return Nearest(ids, (users.dense[:, 1:] - places).astype(np.float32), self.current.step)


class FakePredictor:
    """Returns `expected`, once it is let to.

    Attributes:
        go: cleared, computations wait.
        computing: set while one runs or waits.
        sizes: samples of each computation.
        stopped: set by `stop`.
        may_start: `start` raises this, one after another, before it succeeds.
        are_log_odds: whether its scores have probabilities.
    """

    schema = SCHEMA
    input_rules = NO_RULES

    def __init__(self):
        self.go = threading.Event()
        self.go.set()
        self.computing = threading.Event()
        self.sizes = []
        self.may_start = []
        self.stopped = threading.Event()
        self.closed = False
        self.current = State()
        self.are_log_odds = True

    def note_columns(self, columns):
        """Does not count."""

    def start(self, timeout):
        if self.may_start:
            raise self.may_start.pop(0)

    def stop(self):
        self.stopped.set()

    def close(self):
        self.closed = True

    def predict(self, batch):
        self.computing.set()
        assert self.go.wait(60)
        self.computing.clear()
        self.sizes.append(len(batch))
        batch.validate(SCHEMA, require_labels=False)
        return Scored(expected(first_users(batch), batch.dense[:, 0]), 12, 3, self.are_log_odds)

    def rank(self, user, items):
        assert len(user) == 1
        ids = np.repeat(first_users(user), len(items))
        assert {*user.id_features, *items.id_features} == {feature.name for feature in SCHEMA.id_features}
        dense = np.where(np.isnan(items.dense), user.dense, items.dense)
        assert np.isfinite(dense).all()
        return Scored(expected(ids, dense[:, 0]), 12, 3, self.are_log_odds)

    def table_rows(self, table, ids):
        dim = self.schema.resolved_tables()[table].dim
        found = ids % np.uint64(2) == 0
        rows = np.where(found[:, None], ids[:, None].astype(np.float32), 0) * np.ones((1, dim), np.float32)
        return TableEmbeddings(found, rows, 13, 3)

    def state(self):
        return self.current
