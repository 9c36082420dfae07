"""Scoring of data without training: `Trainer.evaluate` and `Trainer.predict`."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from persia.batching.batch import Batch
from persia.batching.validation import check_data, checked_items
from persia.errors import DataError
from persia.metrics import Metrics, MetricsResult, merged_metrics
from persia.nn.collection import EmbeddingCollection
from persia.nn.dense_step import DenseStep
from persia.nn.prepared import PreparedBatch
from persia.trainer.progress import check_finite
from persia.types import FedBatch

__all__ = ["Evaluator"]


class Evaluator:
    """Scores data, read-only: the store and the model stay as they are. Used by the training thread.

    Args:
        network: computes logits; its replicas merge metrics.
        embeddings: looks up rows.
    """

    def __init__(self, network: DenseStep, embeddings: EmbeddingCollection) -> None:
        self._network = network
        self._embeddings = embeddings

    def evaluate(self, data: Iterable[Batch]) -> MetricsResult:
        """Returns metrics on data; see `Trainer.evaluate`. All NN workers call it, and score the batches in turn."""
        check_data("data", data)
        connection = self._embeddings.connection
        rank, nn_workers = connection.rank, connection.nn_workers
        metrics = Metrics(list(self._embeddings.schema.labels))
        mine = itertools.islice(checked_items(iter(data)), rank, None, nn_workers) if nn_workers > 1 else data
        for number, (batch, logits) in enumerate(self.scored(mine)):
            number = rank + number * nn_workers
            if not batch.labels.shape[1]:
                raise DataError(
                    f"Batch {number} of the data to evaluate has no labels. Use `predict` for data without labels; or, "
                    "if the source has some, leave `require_labels=False` out.",
                    batch=number,
                )
            check_finite(f"Batch {number} of the data to evaluate", logits, batch=number)
            metrics.update(logits, batch.labels.cpu().numpy(), batch.day)
        return merged_metrics(metrics, self._network.replicas.gather).result()

    def scored(self, data: Iterable[Batch | FedBatch]) -> Iterator[tuple[PreparedBatch, NDArray[np.float32]]]:
        """Yields batches and their logits. In between, model and collection are back in the mode that they had."""
        check_data("data", data)
        with self._evaluation_mode():
            batches = self._embeddings.prefetch(data)
        with contextlib.closing(batches):
            for batch in batches:
                with self._evaluation_mode():
                    logits = self._network.logits(batch, self._embeddings(batch)).cpu().numpy()
                yield batch, logits

    @contextlib.contextmanager
    def _evaluation_mode(self) -> Iterator[None]:
        """Puts model and collection into evaluation mode, for the time of the block."""
        modes = [(module, module.training) for module in (self._network.model, self._embeddings)]
        for module, _ in modes:
            module.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for module, training in modes:
                module.train(training)
