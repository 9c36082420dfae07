"""Results of metrics, as plain records."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

from persia.errors import ConfigError
from persia.metrics.calibration_by_bucket import CalibrationBucket
from persia.metrics.grouped import GroupedFigures
from persia.metrics.retrieval import RetrievalFigures

__all__ = [
    "METRICS",
    "ClassFigures",
    "Figures",
    "LabelFigures",
    "MetricFormat",
    "MetricsResult",
    "ValueFigures",
    "headlines",
    "known",
    "mean",
    "mean_of",
    "titled",
]


@dataclass(frozen=True, slots=True)
class Figures:
    """Metrics of a binary label over some rows; nan where undefined (see the classes of these names).

    Attributes:
        rows: number of rows.
        auc: area under the ROC curve.
        log_loss: mean log-loss.
        calibration: mean prediction over mean label.
        normalized_entropy: log-loss divided by the log-loss of always predicting the mean label: below 1 the model has
            learnt something (He et al., Practical Lessons from Predicting Clicks on Ads at Facebook, ADKDD'14, section
            2.1).
    """

    rows: int
    auc: float
    log_loss: float
    calibration: float
    normalized_entropy: float


@dataclass(frozen=True, slots=True)
class ValueFigures:
    """Metrics of a regression or count over some rows, in its unit; nan without rows, or if its loss only ranks.

    Attributes:
        rows: number of rows.
        rmse: root of the mean squared error.
        mae: mean absolute error.
        mean_ratio: sum of predictions over sum of labels: 1 is ideal.
    """

    rows: int
    rmse: float
    mae: float
    mean_ratio: float


@dataclass(frozen=True, slots=True)
class ClassFigures:
    """Metrics of a label with classes over some rows; nan without rows.

    Attributes:
        rows: number of rows.
        accuracy: share of rows whose class has the highest probability.
        top_5_accuracy: share of rows whose class is among the five with the highest probability; nan with five classes
            or fewer.
        log_loss: mean negative logarithm of the probability of the right class.
    """

    rows: int
    accuracy: float
    top_5_accuracy: float
    log_loss: float


LabelFigures: TypeAlias = Figures | ValueFigures | ClassFigures


class MetricFormat(NamedTuple):
    """How a metric is shown.

    Attributes:
        title: name in tables.
        form: format of the value.
        better: 1 if higher is better, -1 if lower is, 0 if 1 is ideal.
    """

    title: str
    form: str
    better: int

    def text(self, value: float) -> str:
        """Formats a value."""
        return format(value, self.form)


METRICS: Final[Mapping[str, MetricFormat]] = {
    "auc": MetricFormat("AUC", ".4f", 1),
    "log_loss": MetricFormat("log-loss", ".4f", -1),
    "normalized_entropy": MetricFormat("NE", ".4f", -1),
    "calibration": MetricFormat("calibration", ".3f", 0),
    "rmse": MetricFormat("RMSE", ".5g", -1),
    "mae": MetricFormat("MAE", ".5g", -1),
    "mean_ratio": MetricFormat("mean ratio", ".3f", 0),
    "accuracy": MetricFormat("accuracy", ".4f", 1),
    "top_5_accuracy": MetricFormat("top-5 accuracy", ".4f", 1),
}
"""All metrics by name, in the order of tables."""


@dataclass(frozen=True, slots=True)
class MetricsResult:
    """Metrics of a model.

    Attributes:
        rows: number of rows.
        auc: mean AUC over the labels that have both classes.
        log_loss: mean log-loss over the labels.
        calibration: mean calibration over the labels.
        normalized_entropy: mean normalized entropy over the labels.
        labels: metrics of each label over all rows: `Figures` of a binary one, `ValueFigures` or `ClassFigures`.
        per_day: metrics of each label by day, in ascending order of days. Excludes rows without a day.
        buckets: calibration of each binary label in ten buckets of equal size, lowest predictions first.
        grouped: by label, ranking quality within groups, if an evaluation requested groups.
        by: metrics by the values of a column, most frequent first, if an evaluation requested them.
        retrieval: metrics among all items, if these were watched; the result then has no others.
    """

    rows: int
    auc: float
    log_loss: float
    calibration: float
    normalized_entropy: float
    labels: Mapping[str, LabelFigures]
    per_day: Mapping[int, Mapping[str, LabelFigures]] = field(default_factory=dict)
    buckets: Mapping[str, tuple[CalibrationBucket, ...]] = field(default_factory=dict)
    grouped: Mapping[str, GroupedFigures] = field(default_factory=dict)
    by: Mapping[str, MetricsResult] = field(default_factory=dict)
    retrieval: RetrievalFigures | None = None

    @classmethod
    def of_retrieval(cls, figures: RetrievalFigures) -> MetricsResult:
        """Returns a result that has metrics of retrieval only."""
        return cls(figures.rows, math.nan, math.nan, math.nan, math.nan, {}, retrieval=figures)

    @property
    def binary(self) -> bool:
        """Whether all labels are binary."""
        return all(isinstance(figures, Figures) for figures in self.labels.values())

    def summary(self) -> str:
        """Returns the metrics to watch, on one line: means if all labels are binary, else by label.

        Without those that are undefined, such as the AUC of labels of one class.
        """
        if self.retrieval is not None:
            return self.retrieval.summary()
        if self.binary:
            means = {"AUC": self.auc, "log loss": self.log_loss}
            return ", ".join(f"{name} {v:.4f}" for name, v in means.items() if not math.isnan(v)) or "no metrics"
        aucs = {f"{name}:auc": each.auc for name, each in self.labels.items() if isinstance(each, Figures)}
        values = {name: v for name, v in {**aucs, **headlines(self.labels)}.items() if not math.isnan(v)}
        return ", ".join(f"{titled(name)} {METRICS[name.rpartition(':')[2]].text(v)}" for name, v in values.items())

    @property
    def auc_per_day(self) -> dict[int, float]:
        """The AUC by day, as the mean over labels."""
        return {day: mean_of("auc", figures) for day, figures in self.per_day.items()}

    @property
    def auc_mean_of_days(self) -> float:
        """The mean of the AUCs of all days; nan without days."""
        return mean(self.auc_per_day.values())

    def value(self, metric: str) -> float:
        """Returns a metric by name.

        Args:
            metric: one of `METRICS`, "gauc", "recall@K" or "ndcg@K", as the mean over the labels that have it; or of
                one label, "LABEL:METRIC".

        Raises:
            ConfigError: no label has it.
        """
        label, _, name = metric.rpartition(":")
        values = {each: known(figures) | _ranking(self.grouped.get(each)) for each, figures in self.labels.items()}
        matching = [of[name] for each, of in values.items() if name in of and label in ("", each)]
        if not matching:
            names = [f"{each}:{name}" for each, of in values.items() for name in of]
            raise ConfigError(f"There is no metric {metric!r}; there are {', '.join(names)}.", field="metric")
        return mean(matching)


def known(figures: LabelFigures) -> dict[str, float]:
    """Returns the metrics that a label has, by name: undefined ones of too few rows included, as nan.

    A label whose loss only ranks has no log-loss or error, and one with few classes no top-5 accuracy.
    """
    values = {name: float(value) for name, value in dataclasses.asdict(figures).items() if name != "rows"}
    main = "rmse" if isinstance(figures, ValueFigures) else "log_loss"
    if figures.rows and math.isnan(values[main]):
        return {"auc": values["auc"]} if "auc" in values else {}
    if isinstance(figures, ClassFigures) and math.isnan(figures.top_5_accuracy):
        del values["top_5_accuracy"]
    return values


def headlines(labels: Mapping[str, LabelFigures]) -> dict[str, float]:
    """Returns the metric to watch of each label that is not binary, by "LABEL:METRIC": its RMSE, or its accuracy."""
    metrics = {}
    for label, figures in labels.items():
        of = known(figures)
        name = next((each for each in ("rmse", "accuracy") if each in of), None)
        if name is not None:
            metrics[f"{label}:{name}"] = of[name]
    return metrics


def titled(metric: str) -> str:
    """Returns the title of "LABEL:METRIC": "LABEL RMSE"."""
    label, _, name = metric.rpartition(":")
    return f"{label} {METRICS[name].title if name in METRICS else name}"


def mean_of(metric: str, figures: Mapping[str, LabelFigures]) -> float:
    """Returns the mean of a metric over the labels that have it; nan if none has."""
    return mean(getattr(each, metric) for each in figures.values() if hasattr(each, metric))


def mean(values: Any) -> float:
    """Returns the mean of the values that are not nan; nan if there are none."""
    numbers = [v for v in values if not math.isnan(v)]
    return math.fsum(numbers) / len(numbers) if numbers else math.nan


def _ranking(figures: GroupedFigures | None) -> dict[str, float]:
    if figures is None:
        return {}
    ranks = {f"recall@{k}": share for k, share in figures.recall.items()}
    return {"gauc": figures.auc, **ranks, **{f"ndcg@{k}": gain for k, gain in figures.ndcg.items()}}
