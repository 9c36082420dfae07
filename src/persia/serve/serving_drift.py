"""Measures how far the distribution of requests has drifted from the training data."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from persia.batching.batch import Batch
from persia.batching.sampling import sampled_ids, sampled_rows
from persia.metrics.answers import single_values
from persia.metrics.drift import DriftCounts, DriftReference, compared_columns
from persia.schema import Schema
from persia.serve.ranking import expanded
from persia.types import Floats

__all__ = ["ServingDrift"]

WINDOW = 100_000
"""Number of rows of a window."""

MAX_WAITING = 64
"""Maximum number of batches that wait to be counted; the oldest ones are dropped."""


class _Recorded(NamedTuple):
    """A batch and its logits `[batch, Schema.outputs]`; `user` has the features that the batch of a ranking lacks."""

    batch: Batch
    logits: Floats
    user: Batch | None = None


class ServingDrift:
    """Counts a sample of the requests, and compares it with training. Thread-safe.

    A request only records its batch; `count` does the work, in the thread of updates. There are two windows: once the
    current one is full, it replaces the previous one.

    Args:
        schema: names of features and labels.
        window: number of rows of a window.
    """

    def __init__(self, schema: Schema, window: int = WINDOW) -> None:
        self._ids = [feature.name for feature in schema.id_features]
        dense = compared_columns(schema)
        self._dense = list(dense.values())
        self._names = self._ids, list(dense), schema.label_names
        self._schema = schema
        self._window = window
        self._recorded: deque[_Recorded] = deque(maxlen=MAX_WAITING)
        self._lock = threading.Lock()
        self._current, self._previous = DriftCounts(*self._names), DriftCounts(*self._names)
        self._reference: DriftReference | None = None
        self._result: Mapping[str, float] = {}

    @property
    def result(self) -> Mapping[str, float]:
        """PSI by feature, as of the last `count`; see `DriftCounts.compared`."""
        return self._result

    def load(self, reference: DriftReference | None) -> None:
        """Compares with these distributions from now on; None keeps the present ones."""
        if reference is not None:
            self._reference = reference

    def note(self, batch: Batch, logits: Floats) -> None:
        """Records a batch with its logits `[batch, Schema.outputs]` for `count`. Does not block."""
        self._recorded.append(_Recorded(batch, logits))

    def note_ranking(self, user: Batch, items: Batch, logits: Floats) -> None:
        """Records one row of a ranking for `count`: the user with one of the items. Does not block.

        A network is trained on such rows. All rows of a ranking have the features of one user, so counting all of them
        would look like drift.

        Args:
            user: valid user, as in `Predictor.rank`.
            items: valid items, as in `Predictor.rank`.
            logits: `[items, Schema.outputs]`.
        """
        row = random.randrange(len(items))  # Items may be sorted, for example by an earlier stage.
        self._recorded.append(_Recorded(items.slice(row, row + 1), logits[row : row + 1], user))

    def count(self) -> None:
        """Counts the recorded batches, and compares them with training."""
        with self._lock:
            while self._recorded:
                batch, logits, user = self._recorded.popleft()
                if user is not None:
                    batch = expanded(self._schema, user, batch)
                if self._current.rows >= self._window:
                    self._current, self._previous = DriftCounts(*self._names), self._current
                self._current.add_rows(sampled_rows(batch.dense)[:, self._dense], sampled_ids(batch, self._ids))
                if logits.shape[1] == self._schema.outputs and np.isfinite(logits).all():
                    self._current.add_logits(single_values(self._schema.targets, sampled_rows(logits)))
            if self._reference is None:
                return
            total = DriftCounts(*self._names)
            total.merge(self._current)
            total.merge(self._previous)
            self._result = total.compared(self._reference)
