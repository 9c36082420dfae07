"""Scoring of data without training: `Trainer.evaluate` and `Trainer.predict`."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from persia.batching.batch import Batch
from persia.batching.items import check_data, checked_items
from persia.errors import ConfigError, DataError, DivergedError
from persia.metrics import GroupedFigures, GroupedMetrics, Metrics, MetricsResult, merged_grouped, merged_metrics
from persia.nn.collection import EmbeddingCollection
from persia.nn.dense_step import DenseStep
from persia.nn.prepared import PreparedBatch
from persia.schema import Schema
from persia.types import Floats, Ids, RegisteredBatch

__all__ = ["Evaluator", "check_finite", "no_rows"]


def check_finite(where: str, logits: Floats, loss: float = 0.0, **fields: int) -> None:
    """Raises DivergedError, which begins with `where`, unless all logits and the loss are finite."""
    bad = logits.size - int(np.count_nonzero(np.isfinite(logits)))
    if bad or not math.isfinite(loss):
        what = f"{bad} of {logits.size} logits are not finite" if bad else f"the loss is {loss}, all logits are finite"
        raise DivergedError(
            f"{where}: {what}. The model has diverged: go back to a checkpoint; lower the learning rates, set "
            "clip_norm, or look at what the model computes.",
            **fields,
        )


class Evaluator:
    """Scores data, read-only: the store and the model stay as they are. Used by the training thread.

    Args:
        network: computes logits; its replicas merge metrics.
        embeddings: looks up rows.
    """

    def __init__(self, network: DenseStep, embeddings: EmbeddingCollection) -> None:
        self._network = network
        self._embeddings = embeddings

    def evaluate(
        self,
        data: Iterable[Batch],
        group_by: str | None = None,
        at: Sequence[int] = (10,),
        *,
        may_be_empty: bool = False,
    ) -> MetricsResult:
        """Returns metrics on data; see `Trainer.evaluate`. All NN workers call it, and score the batches in turn."""
        check_data("data", data)
        connection = self._embeddings.connection
        rank, nn_workers = connection.rank, connection.nn_workers
        schema = self._embeddings.schema
        metrics = Metrics(schema.label_names)
        groups = _Groups(schema, group_by, at) if group_by is not None else None
        own_batches = itertools.islice(checked_items(iter(data)), rank, None, nn_workers) if nn_workers > 1 else data
        for number, (batch, logits) in enumerate(self.scored(groups.of(own_batches) if groups else own_batches)):
            number = rank + number * nn_workers
            if not batch.labels.shape[1]:
                raise DataError(
                    f"Batch {number} of the data to evaluate has no labels. Use `predict` for data without labels; or, "
                    "if the source has some, leave `require_labels=False` out.",
                    batch=number,
                )
            check_finite(f"Batch {number} of the data to evaluate", logits, batch=number)
            labels = batch.labels.cpu().numpy()
            metrics.update(logits, labels, batch.day)
            if groups is not None:
                groups.update(logits, labels)
        gather = self._network.replicas.gather
        result = merged_metrics(metrics, gather).result()
        if not result.rows and not may_be_empty:
            raise no_rows()
        return result if groups is None else dataclasses.replace(result, grouped=groups.result(gather))

    def scored(self, data: Iterable[Batch | RegisteredBatch]) -> Iterator[tuple[PreparedBatch, NDArray[np.float32]]]:
        """Yields batches and their logits. In between, model and collection are back in the mode that they had."""
        check_data("data", data)
        with self._evaluation_mode():
            batches = self._embeddings.prefetch(data)
        with contextlib.closing(batches):
            for batch in batches:
                with self._evaluation_mode():
                    logits = self._network.logits(batch, self._embeddings(batch)).cpu().numpy()
                yield batch, logits

    def again(self, batch: PreparedBatch) -> NDArray[np.float32]:
        """Returns the logits of the batch that was trained last, with network and rows as they are now."""
        with self._evaluation_mode():
            now = self._embeddings.looked_up_again(batch)
            return self._network.logits(now, self._embeddings(now)).cpu().numpy()

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


def no_rows() -> DataError:
    """Returns the error for data to evaluate that have no batch."""
    return DataError(
        "The data to evaluate are empty: no batch was scored. Check the path and the filter of the reader; an iterator "
        "that was read before has no batch left, so give a reader or a list."
    )


class _Groups:
    """Metrics within groups of samples, by label.

    Args:
        schema: of the batches.
        feature: ID-type feature whose ids are the groups.
        at: see `GroupedMetrics`.
    """

    def __init__(self, schema: Schema, feature: str, at: Sequence[int]) -> None:
        names = [each.name for each in schema.id_features]
        if feature not in names:
            raise ConfigError(
                f"There is no ID-type feature {feature!r} to group by; the schema has {', '.join(names)}.",
                field="group_by",
            )
        self._feature = feature
        self._metrics = {label: GroupedMetrics(at) for label in schema.label_names}
        self._waiting: collections.deque[Ids] = collections.deque()

    def of(self, data: Iterable[Batch | RegisteredBatch]) -> Iterator[Batch]:
        """Yields the batches, and keeps the groups of each until its `update`. Another thread may draw them."""
        for position, batch in enumerate(checked_items(iter(data))):
            if not isinstance(batch, Batch):
                raise DataError(
                    f"Batch {position} was fed to embedding workers, and its ids are not here; evaluate `Batch`es, or "
                    "leave `group_by` out.",
                    batch=position,
                )
            column = batch.id_features[self._feature]
            lengths = np.diff(column.offsets) if column.offsets is not None else np.ones(len(batch))
            if (lengths != 1).any():
                raise DataError(
                    f"Feature {self._feature!r} cannot group samples: some have no id, or several. Group by a feature "
                    "that has one id for each sample.",
                    feature=self._feature,
                )
            self._waiting.append(column.values)
            yield batch

    def update(self, logits: Floats, labels: Floats) -> None:
        """Adds the scores of the oldest batch of `of` that has none yet: `[batch, labels]`."""
        ids = self._waiting.popleft()
        for k, metrics in enumerate(self._metrics.values()):
            metrics.update(ids, logits[:, k], labels[:, k])

    def result(self, gather: Callable[[bytes], list[bytes]]) -> dict[str, GroupedFigures]:
        """Returns the metrics of all NN workers, by label."""
        return {label: merged_grouped(metrics, gather).result() for label, metrics in self._metrics.items()}
