"""Importance of features: the metric lost when one is permuted among the rows, or carries nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from persia.batching.batch import Batch
from persia.batching.items import check_data, checked_items
from persia.batching.permuted_inputs import InputGroup, emptied, input_groups, permuted
from persia.errors import ConfigError, DataError
from persia.metrics import LabelFigures, LabelGroups, Metrics, MetricsResult, watched_metric
from persia.metrics.counts import label_metrics, rows_of, terms_of
from persia.nn.collection import EmbeddingCollection
from persia.nn.replicas import Replicas
from persia.schema import Schema
from persia.telemetry.importance import FeatureImportance, Importance, MetricLoss
from persia.telemetry.live import LiveLine
from persia.telemetry.terminal import UNLIMITED, fitting
from persia.trainer.evaluation import Evaluator, check_finite, check_labelled, no_rows
from persia.trainer.sample_values import single_ids
from persia.types import Floats, Ids, Int64Array

__all__ = ["ImportanceOptions", "importance"]

RESAMPLES: Final = 20
"""Number of bootstrap samples of the rows, at least one for each permutation."""

NORMAL_95: Final = 1.96
"""Standard deviations from the middle to the ends of a 95 % interval."""


class ImportanceOptions(NamedTuple):
    """Options of `importance`; see `Trainer.importance`."""

    metric: str | None
    group_by: str | None
    rows: int
    repeats: int
    seed: int
    progress: bool


def importance(
    evaluator: Evaluator,
    embeddings: EmbeddingCollection,
    replicas: Replicas,
    data: Iterable[Batch],
    options: ImportanceOptions,
) -> Importance:
    """Returns the importance of all features; see `Trainer.importance`. All NN workers call it, with the same data.

    Each NN worker keeps all rows, scores its share of them, and gets the logits of the others.

    Args:
        evaluator: scores batches, read-only.
        embeddings: has the schema, and the number of this NN worker.
        replicas: of all NN workers.
        data: batches with labels.
        options: the rest.
    """
    schema, connection = embeddings.schema, embeddings.connection
    scored = _ScoredRows(schema, data, options)
    share = _Share(connection.rank, connection.nn_workers, scored.batch_rows)
    passes = _Passes(evaluator, replicas, schema, scored.rows, share)
    groups = input_groups(schema)
    rng = np.random.default_rng([options.seed, 1])
    orders = [rng.permutation(len(scored.rows)) for _ in range(options.repeats)]
    features = []
    with (
        LiveLine(options.progress and connection.rank == 0) as line,
        contextlib.closing(passes.logits(groups, orders, line)) as logits,
    ):
        scored.begin(next(logits))
        for group in groups:
            shuffled, without = [next(logits) for _ in orders], [next(logits)]
            losses = scored.lost(shuffled), scored.lost(without)
            features.append(FeatureImportance(group.name, [*group.features], *losses))
        assert next(logits, None) is None
    features.sort(key=lambda each: -math.inf if each.permuted.loss is None else each.permuted.loss, reverse=True)
    value, step = _number(scored.value), embeddings.global_step
    return Importance(scored.metric, value, len(scored.rows), options.repeats, step, features)


class _Progress(NamedTuple):
    """Progress of the passes over the rows."""

    done: int
    total: int
    seconds: float

    def text(self, width: int = UNLIMITED) -> str:
        """Formats it for a width."""
        left = self.seconds / self.done * (self.total - self.done)
        return fitting([f"importance: {self.done:,} of {self.total:,} passes", f"about {left:.0f} s left"], width)


class _Share(NamedTuple):
    """Which batches of the rows an NN worker scores: they take them in turn.

    Attributes:
        rank: of this NN worker.
        nn_workers: number of NN workers.
        rows: of a batch.
    """

    rank: int
    nn_workers: int
    rows: int


class _Passes:
    """Scores the rows again and again, each time with another change.

    Args:
        evaluator: scores batches.
        replicas: of all NN workers.
        schema: of the batches.
        rows: all rows.
        share: what this NN worker scores.
    """

    def __init__(self, evaluator: Evaluator, replicas: Replicas, schema: Schema, rows: Batch, share: _Share) -> None:
        self._evaluator = evaluator
        self._replicas = replicas
        self._schema = schema
        self._rows = rows
        self._share = share
        self._starts = [range(0, len(rows), share.rows)[rank :: share.nn_workers] for rank in range(share.nn_workers)]
        """First row of each batch, by rank."""

    def logits(
        self, groups: Sequence[InputGroup], orders: Sequence[Int64Array], line: LiveLine
    ) -> Generator[Floats, None, None]:
        """Yields logits `[rows, outputs]` of the rows as they are, then, group after group, permuted and emptied.

        Raises:
            DivergedError: logits are not finite; the message names the group.
        """
        began, passes = time.monotonic(), ["The rows as they are"]
        for group in groups:
            passes += [f"The rows with {group.name!r} permuted"] * len(orders) + [f"The rows without {group.name!r}"]
        scored = self._evaluator.scored(self._batches(groups, orders))
        with contextlib.closing(scored):
            for done, what in enumerate(passes, 1):
                logits = self._gathered(scored)
                check_finite(what, logits)
                if line.due():
                    line.show(_Progress(done, len(passes), time.monotonic() - began))
                yield logits
            assert next(scored, None) is None  # At its end it warns of ids without rows.

    def _batches(self, groups: Sequence[InputGroup], orders: Sequence[Int64Array]) -> Iterator[Batch]:
        """Yields the batches of this NN worker, pass after pass."""
        rows, schema, most = self._rows, self._schema, self._share.rows
        means = rows.dense.mean(axis=0, dtype=np.float64).astype(np.float32)
        own = self._starts[self._share.rank]
        for start in own:
            yield rows.slice(start, start + most)
        for group in groups:
            for order in orders:
                for start in own:
                    yield permuted(schema, rows, group, start, order[start : start + most])
            for start in own:
                yield emptied(schema, rows, group, start, min(most, len(rows) - start), means)

    def _gathered(self, scored: Iterator[tuple[object, Floats]]) -> Floats:
        """Returns the logits of the next pass, of all NN workers, in the order of the rows."""
        starts, most, outputs = self._starts, self._share.rows, self._schema.outputs
        own = [logits for _, logits in itertools.islice(scored, len(starts[self._share.rank]))]
        parts = self._replicas.gather(np.concatenate(own).tobytes() if own else b"")
        logits = np.empty((len(self._rows), outputs), np.float32)
        for of_rank, part in zip(starts, parts, strict=True):
            values = np.frombuffer(part, np.float32).reshape(-1, outputs)
            for number, start in enumerate(of_rank):
                piece = values[number * most : (number + 1) * most]
                logits[start : start + len(piece)] = piece
        return logits


class _ScoredRows:
    """The rows with their metric, and bootstrap samples of them.

    The interval of a loss has the spread of its differences over bootstrap samples of the rows, each with one of the
    permutations. So it has the spread of both: that of the rows, and that of a permutation (Fisher, Rudin and Dominici,
    JMLR 2019). A sample draws each row, or each group of rows, as often as a Poisson variable of mean 1 says, which
    is a weight (Chamandy et al., Estimating Uncertainty for Massive Data Streams, 2012).

    Args:
        schema: of the batches.
        data: batches with labels.
        options: how many rows, and the metric.
    """

    def __init__(self, schema: Schema, data: Iterable[Batch], options: ImportanceOptions) -> None:
        self._schema = schema
        self.rows, self.batch_rows = _collected(schema, data, options.rows)
        self._groups = self._groups_of(options)
        self._watched = watched_metric(schema, options.metric, "metric", options.group_by)
        self.metric = self._watched.name
        if self._watched.retrieval:
            raise ConfigError(
                f"metric = {self.metric!r} ranks items of all rows, and importance scores samples; name a metric of "
                "a label.",
                field="metric",
            )
        if self._watched.grouped and self._groups is None:
            raise DataError(
                f"The rows have no groups, as {self.metric} needs; give batches with `groups`, or group_by."
            )
        self._seed = options.seed
        self._repeats = options.repeats
        self.value = math.nan
        self._samples: list[tuple[Floats, float]] = []
        """Weights of each bootstrap sample, and its metric."""

    def _groups_of(self, options: ImportanceOptions) -> Ids | None:
        if options.group_by is None or options.group_by == self._schema.group:
            return self.rows.groups
        self._schema.feature(options.group_by)
        return single_ids(options.group_by, self.rows, "group samples", "Group")

    def begin(self, logits: Floats) -> None:
        """Takes the logits of the rows as they are.

        Raises:
            DataError: a label or weight is not valid.
        """
        Metrics(self._schema.labels).update(logits, self.rows.labels, None, self.rows.weights)  # It checks them.
        self.value = self._scored(logits, self.rows.weights)
        rng = np.random.default_rng([self._seed, 2])
        units, of_unit = len(self.rows), None
        if self._groups is not None:
            distinct, of_unit = np.unique(self._groups, return_inverse=True)
            units = len(distinct)
        own = np.ones(len(self.rows), np.float32) if self.rows.weights is None else self.rows.weights
        for _ in range(max(RESAMPLES, self._repeats)):
            drawn = rng.poisson(1.0, units).astype(np.float32)
            weights = own * (drawn if of_unit is None else drawn[of_unit])
            self._samples.append((weights, self._scored(logits, weights)))

    def lost(self, changed: Sequence[Floats]) -> MetricLoss:
        """Returns the metric lost with other logits, as their mean, and its interval.

        Args:
            changed: logits of all rows, for each permutation.
        """
        losses = [self._lost(self.value, self._scored(logits, self.rows.weights)) for logits in changed]
        spread = [
            self._lost(value, self._scored(changed[number % len(changed)], weights))
            for number, (weights, value) in enumerate(self._samples)
        ]
        loss = float(np.mean(losses))
        known = [each for each in spread if math.isfinite(each)]
        wide = NORMAL_95 * float(np.std(known, ddof=1)) if len(known) > 1 else math.nan
        return MetricLoss(_number(loss), _number(loss - wide), _number(loss + wide))

    def _lost(self, value: float, changed: float) -> float:
        """Returns how much worse the second value of the metric is."""
        return self._watched.score(value) - self._watched.score(changed)

    def _scored(self, logits: Floats, weights: Floats | None) -> float:
        """Returns the metric of the rows, without the metrics that are not watched."""
        targets, labels = self._schema.targets, self.rows.labels
        figures: dict[str, LabelFigures] = {}
        for k, target in enumerate(targets):
            if self._watched.label in (None, target.name):
                counts = label_metrics(target, Metrics.TOTAL_BINS)
                rows = rows_of(targets, k, logits, labels, weights)
                counts.add(*rows, terms_of(target, *rows))
                figures[target.name] = counts.figures()
        result = MetricsResult(len(labels), math.nan, math.nan, math.nan, math.nan, figures)
        if self._watched.grouped and self._groups is not None:
            ranks = LabelGroups(targets, (self._watched.at,))
            ranks.update(self._groups, logits, labels, weights)
            result = dataclasses.replace(result, grouped=ranks.result())
        return self._watched.figure(result)


def _collected(schema: Schema, data: Iterable[Batch], most: int) -> tuple[Batch, int]:
    """Returns the first rows of the data as one batch, and the largest number of rows of a batch."""
    check_data("data", data)
    batches: list[Batch] = []
    rows = largest = 0
    for number, batch in enumerate(checked_items(iter(data))):
        if not isinstance(batch, Batch):
            raise DataError(
                f"Batch {number} was fed to embedding workers, and its features are not here; give `Batch`es.",
                batch=number,
            )
        try:
            batch.validate(schema, require_labels=False)
        except DataError as error:
            error.add_note(f"Batch {number} of the data.")
            raise
        check_labelled(batch.labels.shape[1], number)
        largest = max(largest, len(batch))
        batches.append(batch.slice(0, most - rows))
        rows += len(batches[-1])
        if rows == most:
            break
    if not batches:
        raise no_rows()
    return Batch.concat(batches), largest


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
