"""Metrics by the values of a column, such as the country: where a model is good, and where it is not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import safetensors.numpy

from persia.metrics.answers import ranking_scores
from persia.metrics.checks import State
from persia.metrics.grouped import GroupedFigures, GroupedMetrics
from persia.metrics.result import MetricsResult
from persia.metrics.streaming import Metrics
from persia.schema import Label
from persia.types import Floats, Ids, Int64Array

__all__ = ["OTHER", "LabelGroups", "MetricsByValue"]

OTHER: Final = "(other)"
"""Name of the values that are not among the most frequent ones."""


class LabelGroups:
    """Metrics within groups, by label: see `GroupedMetrics`. Multiclass labels rank nothing, and have none.

    Args:
        labels: the labels, in the order of their logits.
        at: values of k.
    """

    def __init__(self, labels: Sequence[Label], at: Sequence[int] = (10,)) -> None:
        self._labels = tuple(labels)
        self._at = at
        self._metrics = {
            each.name: GroupedMetrics(at, binary=each.kind == "binary")
            for each in self._labels
            if each.kind != "multiclass"
        }

    def update(self, groups: Ids, logits: Floats, labels: Floats, weights: Floats | None = None) -> None:
        """Adds rows, without those whose label is missing.

        Args:
            groups: uint64 `[rows]`.
            logits: `[rows, outputs]`.
            labels: `[rows, labels]`.
            weights: `[rows]`; None weighs each row 1.
        """
        for k, label in enumerate(self._labels):
            if label.name in self._metrics:
                scores, y = ranking_scores(self._labels, label, logits), labels[:, k]
                known = ~np.isnan(y)
                if known.all():
                    self._metrics[label.name].update(groups, scores, y, weights)
                else:
                    w = None if weights is None else weights[known]
                    self._metrics[label.name].update(groups[known], scores[known], y[known], w)

    def result(self, gather: Callable[[bytes], list[bytes]] | None = None) -> dict[str, GroupedFigures]:
        """Returns the metrics by label.

        Args:
            gather: of all NN workers, see `merged_grouped`; None for the rows of this one.
        """
        from persia.metrics.merging import merged_grouped

        if gather is None:
            return {name: metrics.result() for name, metrics in self._metrics.items()}
        return {name: merged_grouped(metrics, gather).result() for name, metrics in self._metrics.items()}


class MetricsByValue:
    """Metrics of the rows of each value of a column, exact.

    The most frequent values have metrics of their own; the others together are `OTHER`. Memory: the logits, labels and
    weight of each row, as it is known at the end which values are frequent. Use it for evaluations. Not thread-safe.

    Args:
        labels: the labels, in the order of their logits.
        most: number of values with metrics of their own.
        at: values of k of metrics within groups.
    """

    def __init__(self, labels: Sequence[Label], most: int = 20, at: Sequence[int] = (10,)) -> None:
        self._labels = tuple(labels)
        self._most = most
        self._at = at
        self._names: dict[str, int] = {}
        self._parts: list[tuple[Int64Array, Floats, Floats, Floats | None, Ids | None]] = []

    def update(
        self,
        names: Sequence[str],
        places: Int64Array,
        logits: Floats,
        labels: Floats,
        weights: Floats | None = None,
        groups: Ids | None = None,
    ) -> None:
        """Adds rows.

        Args:
            names: values of the column.
            places: `[rows]`, the place of each row's value in `names`.
            logits: `[rows, outputs]`.
            labels: `[rows, labels]`; NaN where one is missing.
            weights: `[rows]`; None weighs each row 1.
            groups: `[rows]`, within which rows are ranked; None for no such metrics.
        """
        numbers = np.array([self._names.setdefault(name, len(self._names)) for name in names], np.int64)
        self._parts.append((numbers[places], logits.copy(), labels.copy(), weights, groups))

    def result(self) -> dict[str, MetricsResult]:
        """Returns the metrics by value, most frequent first, and last those of `OTHER`, if there are others."""
        values, logits, labels, weights, groups = self._joined()
        counts = np.bincount(values, minlength=len(self._names))
        names = sorted(self._names, key=lambda name: (-int(counts[self._names[name]]), name))
        own = {name: values == self._names[name] for name in names[: self._most]}
        if len(names) > self._most:
            own[OTHER] = ~np.logical_or.reduce(list(own.values()))
        results = {}
        for name, rows in own.items():
            metrics = Metrics(self._labels)
            w = None if weights is None else weights[rows]
            metrics.update(logits[rows], labels[rows], None, w)
            results[name] = metrics.result()
            if groups is not None:
                ranks = LabelGroups(self._labels, self._at)
                ranks.update(groups[rows], logits[rows], labels[rows], w)
                results[name] = dataclasses.replace(results[name], grouped=ranks.result())
        return results

    def merged(self, gather: Callable[[bytes], list[bytes]]) -> MetricsByValue:
        """Returns the rows of all NN workers, the same on each. Blocks until all have called it.

        Args:
            gather: `AllReduce.gather`, or `SingleReplica.gather`.
        """
        payloads = gather(safetensors.numpy.save(self.state_dict()))
        if len(payloads) == 1:
            return self
        total = MetricsByValue(self._labels, self._most, self._at)
        for payload in payloads:
            total._add(safetensors.numpy.load(payload))
        return total

    def state_dict(self) -> State:
        """Returns all rows."""
        values, logits, labels, weights, groups = self._joined()
        state = {
            "names": np.frombuffer(msgspec.json.encode(list(self._names)), np.uint8),
            "values": values,
            "logits": logits,
            "labels": labels,
        }
        state |= {} if weights is None else {"weights": weights}
        return state if groups is None else {**state, "groups": groups}

    def _add(self, state: Mapping[str, Any]) -> None:
        names = msgspec.json.decode(state["names"].tobytes(), type=list[str])
        if names:
            rows = state["values"], state["logits"], state["labels"], state.get("weights"), state.get("groups")
            self.update(names, *rows)

    def _joined(self) -> tuple[Int64Array, Floats, Floats, Floats | None, Ids | None]:
        """Joins the rows so far."""
        if not self._parts:
            width = sum(each.outputs for each in self._labels)
            empty = np.empty((0, width), np.float32), np.empty((0, len(self._labels)), np.float32)
            return np.empty(0, np.int64), *empty, None, None
        if len(self._parts) > 1:
            values, logits, labels, weights, groups = zip(*self._parts, strict=True)
            w = None
            if any(part is not None for part in weights):
                ones = (np.ones(len(rows), np.float32) for rows in values)
                w = np.concatenate([part if part is not None else one for part, one in zip(weights, ones, strict=True)])
            g = None if any(part is None for part in groups) else np.concatenate(groups)
            self._parts = [(np.concatenate(values), np.concatenate(logits), np.concatenate(labels), w, g)]
        return self._parts[0]
