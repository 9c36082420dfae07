"""Metrics of all labels, overall and per day, over a stream of batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike

from persia.errors import ConfigError, DataError
from persia.metrics.auc import AUC, BLOCK
from persia.metrics.calibration_by_bucket import calibration_buckets
from persia.metrics.checks import State, check, check_logits, check_weights
from persia.metrics.counts import LabelCounts, LabelMetrics, label_metrics, rows_of, terms_of
from persia.metrics.result import LabelFigures, MetricsResult, headlines, mean, mean_of
from persia.schema import Label
from persia.schema.labels import label as plain_label
from persia.types import Floats, Int64Array

__all__ = ["Metrics"]

NO_DAY: Final = np.int64(np.iinfo(np.int64).min)
LARGEST: Final = float(np.finfo(np.float32).max)


class Metrics:
    """Metrics of each label by its kind, overall and per day.

    - binary: AUC, log-loss, normalized entropy and calibration; the AUC alone, if the loss of the label only ranks;
    - regression and count: RMSE, MAE, and the sum of predictions over the sum of labels;
    - multiclass and ordinal: accuracy, top-5 accuracy and log-loss.

    A row of weight 2 counts as two rows. Rows whose label is missing (NaN) count for the other labels.

    Days may come in any order. Rows are buffered and counted in blocks of 16,384, so an update is cheap. Calling
    `result` or `state_dict` does not change later results. Not thread-safe.

    Memory per label: up to 11 MiB for an `AUC` of 2^17 bins over all rows, 1.5 to 3 MiB per complete day for an `AUC`
    of 2^16 bins, and a buffer of 128 KiB.

    Args:
        labels: the labels, in the order of the columns; a string is a binary label.
        max_days: maximum number of distinct days.

    Raises:
        ConfigError: `labels` is empty.
    """

    TOTAL_BINS: Final = 1 << 17
    DAY_BINS: Final = 1 << 16

    def __init__(self, labels: Sequence[str | Label] = ("label",), *, max_days: int = 1000) -> None:
        if isinstance(labels, str) or not labels:
            raise ConfigError(
                f"Invalid Metrics.labels = {labels!r}; expected a list of at least one name.", field="labels"
            )
        self.targets = tuple(plain_label(each) if isinstance(each, str) else each for each in labels)
        self.labels = tuple(each.name for each in self.targets)
        self.max_days = max_days
        self._width = sum(each.outputs for each in self.targets)
        self._plain = all(each == plain_label(each.name) for each in self.targets)
        self._clear()

    def _clear(self) -> None:
        self._total = self._tallies(self.TOTAL_BINS)
        self._days: dict[int, list[LabelCounts]] = {}
        self._figures: dict[int, dict[str, LabelFigures]] = {}  # Cached results of days without new rows.
        self._rows = 0
        """Number of counted rows."""
        self._weights: Floats | None = None
        """Weights of the buffered rows; None until a row has one other than 1."""
        self._logits = np.empty((BLOCK, self._width), np.float32)
        self._targets = np.empty((BLOCK, len(self.labels)), np.float32)
        self._when = np.empty(BLOCK, np.int64)
        self._filled = 0

    def _tallies(self, bins: int) -> list[LabelCounts]:
        return [label_metrics(each, bins) for each in self.targets]

    @property
    def rows(self) -> int:
        """The number of rows so far."""
        return self._rows + self._filled

    def update(
        self,
        logits: ArrayLike,
        labels: ArrayLike,
        day: ArrayLike | None = None,
        weights: ArrayLike | None = None,
    ) -> None:
        """Adds a batch.

        Args:
            logits: `[rows, outputs]`, a column for each label, or more for those with classes (see `Label.outputs`);
                `[rows]` with one; finite.
            labels: `[rows, labels]`, valid for their kinds; NaN where one that may be missing is.
            day: integers `[rows]`, or one for all rows; None: the rows belong to no day.
            weights: `[rows]`, from 0 on; None weighs each row 1.

        Raises:
            DataError: an argument is invalid, and nothing has been added; or there are more than `max_days` days,
                which is checked when a block is full.
        """
        x, y = self._matrix(logits, "logits", self._width), self._matrix(labels, "labels", len(self.labels))
        if self._plain:
            check(x, y)
        else:
            self._check(x, y)
        w = check_weights(weights, len(x))
        if w is not None and self._weights is None:
            self._weights = np.ones(BLOCK, np.float32)
        when: Any = NO_DAY
        if day is not None:
            when = np.asarray(day)
            if when.dtype.kind not in "iu" or when.shape not in ((), (len(x),)):
                raise DataError(
                    f"day has dtype {when.dtype} and shape {when.shape}; pass one integer for each of {len(x)} rows.",
                    field="day",
                )
        start = 0
        while start < len(x):
            take = min(BLOCK - self._filled, len(x) - start)
            target, source = slice(self._filled, self._filled + take), slice(start, start + take)
            self._logits[target], self._targets[target] = x[source], y[source]
            self._when[target] = when[source] if np.ndim(when) else when
            if self._weights is not None:
                self._weights[target] = 1 if w is None else w[source]
            self._filled += take
            start += take
            if self._filled == BLOCK:
                self._count(self._total, self._days, BLOCK)
                self._rows += BLOCK
                self._filled = 0

    def _check(self, logits: Floats, labels: Floats) -> None:
        """Raises DataError unless logits are finite, and labels are valid or may be missing."""
        if len(logits) != len(labels):
            raise DataError(
                f"There are {len(logits)} rows of logits and {len(labels)} of labels; they must agree.", field="labels"
            )
        check_logits(logits)
        for k, each in enumerate(self.targets):
            values = labels[:, k]
            missing = np.isnan(values)
            if missing.any() and each.missing == "error":
                raise DataError(
                    f"Label {each.name!r} is nan at row {int(missing.argmax())}; leave the row out, or declare the "
                    "label with missing='mask'.",
                    field="labels",
                )
            valid = np.where(missing, np.float32(0), values)
            largest = len(each.class_names) - 1 if each.class_names else 1 if each.kind == "binary" else LARGEST
            least = -LARGEST if each.kind == "regression" else 0
            wrong = ~((valid >= least) & (valid <= largest)) | (bool(each.class_names) & (valid != np.floor(valid)))
            if wrong.any():
                row = int(wrong.argmax())
                raise DataError(
                    f"Label {each.name!r} is {values[row]} at row {row}, which is not valid for its kind "
                    f"{each.kind!r}; correct the data.",
                    field="labels",
                )

    def _matrix(self, values: ArrayLike, name: str, width: int) -> Floats:
        array = np.asarray(values, dtype=np.float32)
        if array.ndim == 1:
            array = array[:, None]
        if array.ndim != 2 or array.shape[1] != width:
            raise DataError(
                f"{name} have shape {array.shape}; pass [rows, {width}], a column for each of "
                f"{', '.join(self.labels)}.",
                field=name,
            )
        return array

    def _count(self, total: list[LabelCounts], days: dict[int, list[LabelCounts]], filled: int) -> None:
        """Adds the first `filled` rows of the buffer to the given metrics."""
        when = self._when[:filled]
        present = [int(when[0])] if when[0] == when[-1] and np.all(when == when[0]) else np.unique(when).tolist()
        if len(days.keys() | {d for d in present if d != NO_DAY}) > self.max_days:
            raise DataError(
                f"There are more than {self.max_days} different days; pass days, not timestamps.", field="day"
            )
        for day in days.keys() - set(present):  # Data in order of time do not return to this day.
            for tally in days[day]:
                tally.settle()
        for day in present:
            rows = slice(0, filled) if len(present) == 1 else np.flatnonzero(when == day)
            if day != NO_DAY:
                self._figures.pop(day, None)
            tallies = None if day == NO_DAY else days.setdefault(day, self._tallies(self.DAY_BINS))
            for k, label in enumerate(self.targets):
                x, y, w = self._of_label(k, rows)
                terms = terms_of(label, x, y, w)
                total[k].add(x, y, w, terms)
                if tallies is not None:
                    tallies[k].add(x, y, w, terms)

    def _of_label(self, k: int, rows: slice | Int64Array) -> tuple[Floats, Floats, Floats | None]:
        """Returns logits, labels and weights of the buffered rows in which a label is known."""
        weights = None if self._weights is None else self._weights[rows]
        if self._plain:
            return self._logits[rows, k], self._targets[rows, k], weights
        return rows_of(self.targets, k, self._logits[rows], self._targets[rows], weights)

    def _complete(self) -> tuple[list[LabelCounts], dict[int, list[LabelCounts]]]:
        """Returns copies of the metrics that include the buffered rows."""
        if not self._filled:
            return self._total, self._days
        total = [tally.copy() for tally in self._total]
        touched = {int(d) for d in np.unique(self._when[: self._filled])}
        days = {d: [tally.copy() for tally in t] if d in touched else t for d, t in self._days.items()}
        self._count(total, days, self._filled)
        return total, days

    def result(self) -> MetricsResult:
        """Returns the metrics so far. Takes up to 80 ms per label, and again per day with new rows."""
        total, days = self._complete()
        figures = dict(zip(self.labels, (t.figures() for t in total), strict=True))
        per_day: dict[int, dict[str, LabelFigures]] = {}
        for day in sorted(days):
            if day not in self._figures:
                self._figures[day] = dict(zip(self.labels, (t.figures() for t in days[day]), strict=True))
            per_day[day] = self._figures[day]
        buffered = {int(d) for d in np.unique(self._when[: self._filled])}
        self._figures = {d: f for d, f in self._figures.items() if d not in buffered}
        return MetricsResult(
            rows=self.rows,
            auc=mean_of("auc", figures),
            log_loss=mean_of("log_loss", figures),
            calibration=mean_of("calibration", figures),
            normalized_entropy=mean_of("normalized_entropy", figures),
            labels=figures,
            per_day=per_day,
            buckets={name: calibration_buckets(auc) for name, auc in self._probabilities(total).items()},
        )

    def auc(self) -> float:
        """Returns the mean AUC over the binary labels that have both classes, without the other metrics."""
        total, _ = self._complete()
        return mean(tally.auc.result() for tally in total if isinstance(tally, LabelMetrics))

    def headlines(self) -> dict[str, float]:
        """Returns the metric to watch of each label that is not binary; see `headlines`."""
        if self._plain:
            return {}
        total, _ = self._complete()
        pairs = zip(self.labels, total, strict=True)
        return headlines({name: tally.figures() for name, tally in pairs if not isinstance(tally, LabelMetrics)})

    def reliability(self) -> dict[str, list[tuple[float, float, float]]]:
        """Returns, by label, mean prediction, mean label and rows of groups of rows; see `AUC.reliability`."""
        total, _ = self._complete()
        return {name: auc.reliability() for name, auc in self._probabilities(total).items()}

    def _probabilities(self, total: list[LabelCounts]) -> dict[str, AUC]:
        """Returns the histograms of the labels that have probabilities."""
        pairs = zip(self.labels, total, strict=True)
        return {name: tally.auc for name, tally in pairs if isinstance(tally, LabelMetrics) and not tally.ranks}

    def merge(self, other: Metrics) -> None:
        """Adds the rows of another Metrics with the same labels, which is not modified."""
        if other.targets != self.targets:
            raise ConfigError(
                f"Cannot merge metrics of labels {other.labels} into metrics of {self.labels}; use the same labels.",
                field="labels",
            )
        total, days = other._complete()
        if len(self._days.keys() | days.keys()) > self.max_days:
            raise DataError(
                f"Both metrics together have more than {self.max_days} different days; raise max_days.", field="day"
            )
        for own_tally, other_tally in zip(self._total, total, strict=True):
            own_tally.merge(other_tally)
        self._rows += other.rows
        for day, tallies in days.items():
            self._figures.pop(day, None)
            for own_tally, other_tally in zip(
                self._days.setdefault(day, self._tallies(self.DAY_BINS)), tallies, strict=True
            ):
                own_tally.merge(other_tally)

    def state_dict(self) -> State:
        """Returns counts and buffered rows as numpy arrays, numbers and names under flat keys."""
        state: State = {
            "labels": list(self.labels),
            "days": np.array(sorted(self._days), np.int64),
            "buffer.logits": self._logits[: self._filled].copy(),
            "buffer.labels": self._targets[: self._filled].copy(),
            "buffer.day": self._when[: self._filled].copy(),
        }
        if self._weights is not None:
            state["buffer.weights"] = self._weights[: self._filled].copy()
        if not self._plain:
            state["rows"] = self._rows
        for period, tallies in [("total", self._total), *((f"day.{d}", t) for d, t in self._days.items())]:
            for k, tally in enumerate(tallies):
                state |= {f"{period}.{k}.{name}": value for name, value in tally.state_dict().items()}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replaces counts and buffered rows by the contents of a state with the same labels.

        Raises:
            ConfigError: the labels differ.
        """
        if list(state["labels"]) != list(self.labels):
            raise ConfigError(f"The state has the labels {state['labels']}; expected {self.labels}.", field="labels")
        self._clear()
        self._days = {int(d): self._tallies(self.DAY_BINS) for d in state["days"]}
        parts: dict[str, State] = {}
        for name, value in state.items():
            prefix, _, field = name.rpartition(".")
            parts.setdefault(prefix, {})[field] = value
        for period, tallies in [("total", self._total), *((f"day.{d}", t) for d, t in self._days.items())]:
            for k, tally in enumerate(tallies):
                tally.load_state_dict(parts[f"{period}.{k}"])
        self._rows = int(state.get("rows", self._total[0].rows))
        self._filled = len(state["buffer.logits"])
        if "buffer.weights" in state:
            self._weights = np.ones(BLOCK, np.float32)
            self._weights[: self._filled] = state["buffer.weights"]
        self._logits[: self._filled] = state["buffer.logits"]
        self._targets[: self._filled] = state["buffer.labels"]
        self._when[: self._filled] = state["buffer.day"]
