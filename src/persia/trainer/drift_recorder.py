"""Records how inputs and predictions are distributed in training, for servers that compare theirs with it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from persia.batching.batch import Batch
from persia.batching.sampling import is_sampled, sampled_ids, sampled_rows
from persia.errors import DataError
from persia.metrics.answers import single_values
from persia.metrics.drift import DriftCounts, DriftReference, compared_columns, merged_drift
from persia.schema import Schema
from persia.types import Floats, RegisteredBatch

__all__ = ["DriftRecorder"]


class DriftRecorder:
    """Counts a sample of the batches that this NN worker trains. Thread-safe.

    NN workers take batches in turn, so each sees a sample of all data. `merge` adds their counts up.

    Args:
        schema: names of features and labels.
    """

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._ids = [feature.name for feature in schema.id_features]
        self._labels = schema.targets
        dense = compared_columns(schema)
        self._dense = list(dense.values())
        self._counts = DriftCounts(self._ids, list(dense), schema.label_names)
        self._lock = threading.Lock()
        self._scored = 0

    def read(self, number: int, batch: Batch | RegisteredBatch) -> None:
        """Counts a batch of a pass, if it is its turn. One that does not fit the schema is left out."""
        if isinstance(batch, RegisteredBatch):
            if batch.id_counts is None:
                return
            counts = batch.id_counts
        elif isinstance(batch, Batch) and is_sampled(number):
            try:
                batch.validate(self._schema)
            except DataError:
                return  # Raised where the batch is used.
            counts = sampled_ids(batch, self._ids)
        else:
            return
        with self._lock:
            self._counts.add_rows(sampled_rows(batch.dense)[:, self._dense], counts)

    def scored(self, logits: Floats) -> None:
        """Counts the predictions of a batch, from its logits `[batch, Schema.outputs]`, if it is its turn."""
        self._scored += 1
        if is_sampled(self._scored - 1):
            with self._lock:
                self._counts.add_logits(single_values(self._labels, sampled_rows(logits)))

    def reference(self) -> DriftReference | None:
        """Returns the distributions; None while there are too few rows."""
        with self._lock:
            return self._counts.reference()

    def merge(self, gather: Callable[[bytes], list[bytes]], *, keep: bool) -> None:
        """Adds up the counts of all NN workers, which all call it. Blocks.

        Args:
            gather: see `merged_drift`.
            keep: whether this NN worker keeps the sum; the others forget theirs, which are part of it.
        """
        with self._lock:
            own = self._counts
        total = merged_drift(own, gather)
        with self._lock:
            self._counts = total
            if not keep:
                total.clear()
