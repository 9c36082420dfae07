"""`WatchedMetric`: the held-out metric that decides which state of a run is the best."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from persia.errors import ConfigError
from persia.metrics.answers import only_ranks
from persia.metrics.result import METRICS, MetricsResult, mean
from persia.schema import Label, Schema

__all__ = ["WatchedMetric", "check_metric_name", "figure", "metrics_of", "watched_metric"]

_BINARY = ("auc", "log_loss", "normalized_entropy", "calibration")
_VALUE = ("rmse", "mae", "mean_ratio")
_CLASSES = ("log_loss", "accuracy", "top_5_accuracy")
_OF_KIND: Final[Mapping[str, Sequence[str]]] = {
    "binary": _BINARY, "regression": _VALUE, "count": _VALUE, "multiclass": _CLASSES, "ordinal": _CLASSES,
}  # fmt: skip
"""Metrics by kind of label, the default first."""

_GROUPED: Final[Mapping[str, str]] = {"gauc": "GAUC", "ndcg": "NDCG", "recall": "recall"}
"""Titles of the metrics within the groups of `Schema.group`, of which higher is better."""

_RETRIEVAL: Final[Mapping[str, str]] = {"retrieval_hr": "HR", "retrieval_ndcg": "NDCG", "retrieval_mrr": "MRR"}
"""Titles of the metrics among all items, of which higher is better."""

_AT = 10
"""k without "@k"."""

_WITH_K = ("ndcg", "recall", "retrieval_hr", "retrieval_ndcg")

_FORM = re.compile(r"(?:(?P<label>.+):)?(?P<metric>[a-z_0-9]+)(?:@(?P<at>[1-9][0-9]{0,3}))?", re.DOTALL)


class WatchedMetric(NamedTuple):
    """A metric of held-out data by name.

    Attributes:
        name: as it was declared: "auc", "LABEL:auc", "ndcg@10", "retrieval_hr@10".
        label: the label; None for the mean over all labels that have the metric.
        metric: a name in `METRICS`, "gauc", "ndcg", "recall", "retrieval_hr", "retrieval_ndcg" or "retrieval_mrr".
        at: k of metrics that have one.
    """

    name: str
    label: str | None
    metric: str
    at: int

    @property
    def grouped(self) -> bool:
        """Whether it needs groups."""
        return self.metric in _GROUPED

    @property
    def retrieval(self) -> bool:
        """Whether it is of retrieval: each sample's item is ranked among all items, instead of scored."""
        return self.metric in _RETRIEVAL

    @property
    def title(self) -> str:
        """Its name in messages."""
        titles = {**_GROUPED, **_RETRIEVAL}
        title = titles[self.metric] if self.metric in titles else METRICS[self.metric].title
        title += f"@{self.at}" if self.metric in _WITH_K else ""
        title += " of retrieval" if self.retrieval else ""
        return title if self.label is None else f"{title} of {self.label}"

    def figure(self, result: MetricsResult) -> float:
        """Returns its value; nan if the result has none."""
        if self.retrieval:
            name = self.metric.removeprefix("retrieval_") + (f"@{self.at}" if self.metric in _WITH_K else "")
            return math.nan if result.retrieval is None else result.retrieval.value(name)
        labels = result.labels if self.label is None else [self.label]
        return mean(float(value) for label in labels if (value := self._of_label(result, label)) is not None)

    def _of_label(self, result: MetricsResult, label: str) -> float | None:
        if not self.grouped:
            return getattr(result.labels.get(label), self.metric, None)
        grouped = result.grouped.get(label)
        if grouped is None or self.metric == "gauc":
            return getattr(grouped, "auc", None)
        ranks: Mapping[int, float] = getattr(grouped, self.metric)
        return ranks.get(self.at)

    def score(self, value: float) -> float:
        """Returns a number that is higher for a better value."""
        better = 1 if self.grouped or self.retrieval else METRICS[self.metric].better
        return better * value if better else -abs(value - 1)


def figure(result: MetricsResult, name: str) -> float:
    """Returns a metric of a result by name, such as "auc" or "LABEL:rmse"; nan if the result has none."""
    return _parsed(name).figure(result)


def check_metric_name(field: str, name: Any) -> None:
    """Checks the form of a metric's name, without a schema.

    Raises:
        ConfigError: it is no name of a metric.
    """
    if not isinstance(name, str):
        raise ConfigError(f'Invalid {field} = {name!r}; expected the name of a metric, such as "auc".', field=field)
    _parsed(name, field)


def watched_metric(
    schema: Schema, name: str | None = None, field: str = "keep_best", group: str | None = None
) -> WatchedMetric:
    """Returns the metric of a name, or the default for the kind of the first label.

    Args:
        schema: has the labels.
        name: None for "auc" of binary labels, "rmse" of regressions and counts, "log_loss" of classes, and "ndcg" of
            values whose loss only ranks.
        field: option that has the name, for the error.
        group: what groups the rows; None for `Schema.group`.

    Raises:
        ConfigError: no label has it; the message lists what the labels have.
    """
    labels = {label.name: metrics_of(label, group or schema.group) for label in schema.targets}
    if name is None:
        first = schema.targets[0]
        name = next(iter(labels[first.name]), _OF_KIND[first.kind][0])
    watched = _parsed(name, field)
    if watched.retrieval:
        return watched
    of = labels if watched.label is None else {watched.label: labels.get(watched.label, [])}
    if not any(watched.metric in metrics for metrics in of.values()):
        known = "; ".join(f"{label} has {', '.join(metrics)}" for label, metrics in labels.items())
        grouped = watched.grouped and not (group or schema.group)
        needs = " gauc, ndcg@k and recall@k need Schema(group=...)." if grouped else ""
        raise ConfigError(
            f"Invalid {field} = {name!r}: {known}. Name one of these, or LABEL:METRIC for one label.{needs}",
            field=field,
        )
    return watched


def metrics_of(label: Label, group: str | None) -> list[str]:
    """Returns the names of the metrics that a label has, the default first.

    Args:
        label: the label.
        group: column of the groups; None without groups.
    """
    names = [name for name in _OF_KIND[label.kind] if name != "top_5_accuracy" or len(label.class_names) > 5]
    if only_ranks(label):  # Its scores have no scale.
        names = ["auc"] if label.kind == "binary" else []
    if group is not None and label.kind != "multiclass":
        names += _GROUPED if label.kind == "binary" else ["ndcg"]  # Only classes have an AUC, and positives.
    return names


def _parsed(name: str, field: str = "name") -> WatchedMetric:
    match = _FORM.fullmatch(name)
    metric = match["metric"] if match else None
    known = match is not None and metric in (*METRICS, *_GROUPED, *_RETRIEVAL)
    if (
        match is None
        or not known
        or (match["at"] is not None and metric not in _WITH_K)
        or (match["label"] is not None and metric in _RETRIEVAL)
    ):
        raise ConfigError(
            f"Invalid {field} = {name!r}; expected one of: {', '.join([*METRICS, *_GROUPED, *_RETRIEVAL])}; or "
            f"LABEL:METRIC for one label (not for retrieval metrics); {', '.join(_WITH_K)} take @k.",
            field=field,
        )
    assert metric is not None
    return WatchedMetric(name, match["label"], metric, int(match["at"] or _AT))
