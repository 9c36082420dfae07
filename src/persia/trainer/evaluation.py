"""Scoring of data without training: `Trainer.evaluate` and `Trainer.predict`."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from persia.batching.batch import Batch
from persia.batching.items import check_data, checked_items
from persia.errors import ConfigError, DataError, DivergedError
from persia.metrics import GroupedFigures, LabelGroups, Metrics, MetricsByValue, MetricsResult, merged_metrics
from persia.nn.collection import EmbeddingCollection
from persia.nn.dense_step import DenseStep
from persia.nn.non_finite import extreme_inputs
from persia.nn.prepared import PreparedBatch
from persia.schema import Schema
from persia.trainer.sample_values import SampleValues, single_ids
from persia.types import Floats, Ids, RegisteredBatch

__all__ = ["Evaluator", "check_finite", "check_labelled", "no_rows"]


def check_finite(
    where: str, logits: Floats, loss: float = 0.0, explain: Callable[[], str] = str, **fields: int
) -> None:
    """Raises DivergedError, which begins with `where`, unless all logits and the loss are finite.

    Args:
        where: what was scored.
        logits: of any shape.
        loss: the loss.
        explain: returns what may be the reason, as a sentence, or an empty text; called for the error.
        **fields: of the error.
    """
    bad = logits.size - int(np.count_nonzero(np.isfinite(logits)))
    if bad or not math.isfinite(loss):
        what = f"{bad} of {logits.size} logits are not finite" if bad else f"the loss is {loss}, all logits are finite"
        why = explain()
        raise DivergedError(
            f"{where}: {what}. {why}{' ' if why else ''}The model has diverged: go back to a checkpoint; lower the "
            "learning rates, set clip_norm, or look at what the model computes.",
            **fields,
        )


def check_labelled(labels: int, number: int) -> None:
    """Raises DataError if batch `number` of the data to evaluate has no labels."""
    if not labels:
        raise DataError(
            f"Batch {number} of the data to evaluate has no labels. Use `predict` for data without labels; or, "
            "if the source has some, leave `require_labels=False` out.",
            batch=number,
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
        metrics_by: str | None = None,
        max_values: int = 20,
        *,
        may_be_empty: bool = False,
    ) -> MetricsResult:
        """Returns metrics on data; see `Trainer.evaluate`. All NN workers call it, and score the batches in turn."""
        check_data("data", data)
        connection = self._embeddings.connection
        rank, nn_workers = connection.rank, connection.nn_workers
        schema = self._embeddings.schema
        metrics = Metrics(schema.labels)
        ids = _GroupIds(schema, group_by) if group_by not in (None, schema.group) else None
        groups = LabelGroups(schema.targets, at) if ids or schema.group is not None else None
        by = SampleValues(schema, metrics_by, data) if metrics_by is not None else None
        by_value = MetricsByValue(schema.targets, max_values, at)
        own_batches: Iterable[Batch | RegisteredBatch] = data
        if by is not None:
            own_batches = by.of(data, rank, nn_workers)
        elif nn_workers > 1:
            own_batches = itertools.islice(checked_items(iter(data)), rank, None, nn_workers)
        for number, (batch, logits) in enumerate(self.scored(ids.of(own_batches) if ids else own_batches)):
            number = rank + number * nn_workers
            check_labelled(batch.labels.shape[1], number)
            labels = batch.labels.cpu().numpy()
            weights = None if batch.weights is None else batch.weights.cpu().numpy()
            explain = functools.partial(extreme_inputs, schema, batch.dense, labels, weights)
            check_finite(f"Batch {number} of the data to evaluate", logits, explain=explain, batch=number)
            metrics.update(logits, labels, batch.day, weights)
            own_groups = ids.next() if ids is not None else batch.host_groups()
            if groups is not None and own_groups is not None:
                groups.update(own_groups, logits, labels, weights)
            if by is not None:
                by_value.update(*by.next(), logits, labels, weights, own_groups)
        gather = self._network.replicas.gather
        result = merged_metrics(metrics, gather).result()
        if not result.rows and not may_be_empty:
            raise no_rows()
        if groups is not None:
            result = dataclasses.replace(result, grouped=_of_groups(groups.result(gather)))
        return result if by is None else dataclasses.replace(result, by=by_value.merged(gather).result())

    def scored(
        self, data: Iterable[Batch | RegisteredBatch]
    ) -> Generator[tuple[PreparedBatch, NDArray[np.float32]], None, None]:
        """Yields batches and their logits. In between, model and collection are back in the mode that they had."""
        check_data("data", data)
        with self.evaluation_mode():
            batches = self._embeddings.prefetch(data)
        with contextlib.closing(batches):
            for batch in batches:
                with self.evaluation_mode():
                    logits = self._network.logits(batch, self._embeddings(batch)).cpu().numpy()
                yield batch, logits

    def again(self, batch: PreparedBatch) -> NDArray[np.float32]:
        """Returns the logits of the batch that was trained last, with network and rows as they are now."""
        with self.evaluation_mode():
            now = self._embeddings.looked_up_again(batch)
            return self._network.logits(now, self._embeddings(now)).cpu().numpy()

    @contextlib.contextmanager
    def evaluation_mode(self) -> Iterator[None]:
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


def _of_groups(grouped: dict[str, GroupedFigures]) -> dict[str, GroupedFigures]:
    """Returns the metrics of labels with rows in groups; batches that were built by hand may have no groups."""
    return {label: figures for label, figures in grouped.items() if figures.groups}


class _GroupIds:
    """Groups of samples by the ids of a feature.

    Args:
        schema: of the batches.
        feature: ID-type feature whose ids are the groups.
    """

    def __init__(self, schema: Schema, feature: str) -> None:
        names = [each.name for each in schema.id_features]
        if feature not in names:
            raise ConfigError(
                f"There is no ID-type feature {feature!r} to group by; the schema has {', '.join(names)}.",
                field="group_by",
            )
        self._feature = feature
        self._waiting: collections.deque[Ids] = collections.deque()

    def of(self, data: Iterable[Batch | RegisteredBatch]) -> Iterator[Batch]:
        """Yields the batches, and keeps the groups of each until its `next`. Another thread may draw them."""
        for position, batch in enumerate(checked_items(iter(data))):
            if not isinstance(batch, Batch):
                raise DataError(
                    f"Batch {position} was fed to embedding workers, and its ids are not here; evaluate `Batch`es, or "
                    "leave `group_by` out.",
                    batch=position,
                )
            self._waiting.append(single_ids(self._feature, batch, "group samples", "Group"))
            yield batch

    def next(self) -> Ids:
        """Returns the groups of the oldest batch of `of` whose groups were not returned yet."""
        return self._waiting.popleft()
