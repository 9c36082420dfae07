"""Records of the importance of features, which `persia report` shows."""

from __future__ import annotations

import io

import msgspec

from persia.metrics.result import METRICS, titled
from persia.telemetry.terminal import UNLIMITED, DataConsole, Grid

__all__ = ["FeatureImportance", "Importance", "MetricLoss"]


class MetricLoss(msgspec.Struct, frozen=True):
    """How much worse a metric is without what a feature tells. None where the metric is undefined.

    Attributes:
        loss: the metric lost; below 0 if the metric is better without.
        low: lower end of the 95 % interval.
        high: upper end.
    """

    loss: float | None
    low: float | None
    high: float | None


class FeatureImportance(msgspec.Struct, frozen=True):
    """Importance of a column, or of columns that belong together.

    Attributes:
        name: the columns, or the name of a crossed feature that changes alone.
        features: names of the features of the schema that change with it, computed ones included.
        permuted: the metric lost when the values are permuted among the rows.
        emptied: the metric lost when the feature carries nothing: no ids, so that embeddings are zeros; means of the
            values of non-ID-type features.
    """

    name: str
    features: list[str]
    permuted: MetricLoss
    emptied: MetricLoss


class Importance(msgspec.Struct, frozen=True):
    """Importance of all features of a model, by a metric on some rows. `str()` is a table.

    Attributes:
        metric: name of the metric, see `MetricsResult.value`.
        value: the metric with all features as they are; None if it is undefined.
        rows: number of rows.
        repeats: permutations of each feature.
        step: global step of the model.
        features: largest loss by permutation first.
    """

    metric: str
    value: float | None
    rows: int
    repeats: int
    step: int
    features: list[FeatureImportance]

    @property
    def title(self) -> str:
        """The metric, its value, and what it was computed on."""
        form = METRICS.get(self.metric.rpartition(":")[2])
        value = "none" if self.value is None else form.text(self.value) if form is not None else f"{self.value:.4f}"
        name = titled(self.metric) if ":" in self.metric or form is None else form.title
        return f"importance: {name} {value} on {self.rows:,} rows at step {self.step:,}, and what is lost of it"

    def table(self) -> Grid:
        """Returns a table with a line for each feature."""
        title = self.title
        grid = Grid("feature", "permuted", "95 % interval", "emptied", "95 % interval ", text=["feature"], title=title)
        for each in self.features:
            grid.add_row(each.name, *_cells(each.permuted), *_cells(each.emptied))
        return grid

    def __str__(self) -> str:
        text = io.StringIO()
        DataConsole(file=text, width=UNLIMITED).print(self.table())
        return text.getvalue()


def _cells(lost: MetricLoss) -> tuple[str, str]:
    """Returns the texts of a loss and of its interval."""
    if lost.loss is None:
        return "none", ""
    between = "" if lost.low is None or lost.high is None else f"{lost.low:+.3g} to {lost.high:+.3g}"
    return f"{lost.loss:+.4g}", between
