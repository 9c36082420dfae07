"""Metrics of all labels, overall and per day, over a stream of batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike

from persia.errors import ConfigError, DataError
from persia.metrics.auc import BLOCK
from persia.metrics.calibration_by_bucket import calibration_buckets
from persia.metrics.checks import State, check, loss_terms
from persia.metrics.counts import LabelMetrics
from persia.metrics.result import Figures, MetricsResult, mean
from persia.types import Floats

__all__ = ["Metrics"]

NO_DAY: Final = np.int64(np.iinfo(np.int64).min)


class Metrics:
    """AUC, log-loss and calibration of each label, overall and per day.

    Days may come in any order. Rows are buffered and counted in blocks of 16,384, so an update is cheap. Calling
    `result` or `state_dict` does not change later results. Not thread-safe.

    Memory per label: up to 11 MiB for an `AUC` of 2^17 bins over all rows, 1.5 to 3 MiB per complete day for an `AUC`
    of 2^16 bins, and a buffer of 128 KiB.

    Args:
        labels: names of the labels, in the order of the columns.
        max_days: maximum number of distinct days.

    Raises:
        ConfigError: `labels` is empty.
    """

    TOTAL_BINS: Final = 1 << 17
    DAY_BINS: Final = 1 << 16

    def __init__(self, labels: Sequence[str] = ("label",), *, max_days: int = 1000) -> None:
        if isinstance(labels, str) or not labels:
            raise ConfigError(
                f"Invalid Metrics.labels = {labels!r}; expected a list of at least one name.", field="labels"
            )
        self.labels = tuple(labels)
        self.max_days = max_days
        self._clear()

    def _clear(self) -> None:
        self._total = self._tallies(self.TOTAL_BINS)
        self._days: dict[int, list[LabelMetrics]] = {}
        self._figures: dict[int, dict[str, Figures]] = {}  # Cached results of days without new rows.
        self._logits = np.empty((BLOCK, len(self.labels)), np.float32)
        self._targets = np.empty((BLOCK, len(self.labels)), np.float32)
        self._when = np.empty(BLOCK, np.int64)
        self._filled = 0

    def _tallies(self, bins: int) -> list[LabelMetrics]:
        return [LabelMetrics(bins) for _ in self.labels]

    @property
    def rows(self) -> int:
        """The number of rows so far."""
        return self._total[0].log_loss.rows + self._filled

    def update(self, logits: ArrayLike, labels: ArrayLike, day: ArrayLike | None = None) -> None:
        """Adds a batch.

        Args:
            logits: `[rows, labels]`, or `[rows]` with one label; finite.
            labels: same shape as `logits`, each in [0, 1].
            day: integers `[rows]`, or one for all rows; None: the rows belong to no day.

        Raises:
            DataError: an argument is invalid, and nothing has been added; or there are more than `max_days` days,
                which is checked when a block is full.
        """
        x, y = self._matrix(logits, "logits"), self._matrix(labels, "labels")
        check(x, y)
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
            self._filled += take
            start += take
            if self._filled == BLOCK:
                self._count(self._total, self._days, BLOCK)
                self._filled = 0

    def _matrix(self, values: ArrayLike, name: str) -> Floats:
        array = np.asarray(values, dtype=np.float32)
        if array.ndim == 1:
            array = array[:, None]
        if array.ndim != 2 or array.shape[1] != len(self.labels):
            raise DataError(
                f"{name} have shape {array.shape}; pass [rows, {len(self.labels)}], a column for each of "
                f"{', '.join(self.labels)}.",
                field=name,
            )
        return array

    def _count(self, total: list[LabelMetrics], days: dict[int, list[LabelMetrics]], filled: int) -> None:
        """Adds the first `filled` rows of the buffer to the given metrics."""
        when = self._when[:filled]
        present = [int(when[0])] if when[0] == when[-1] and np.all(when == when[0]) else np.unique(when).tolist()
        if len(days.keys() | {d for d in present if d != NO_DAY}) > self.max_days:
            raise DataError(
                f"There are more than {self.max_days} different days; pass days, not timestamps.", field="day"
            )
        for day in days.keys() - set(present):  # Data in order of time do not return to this day.
            for tally in days[day]:
                tally.auc.settle()
        for day in present:
            rows = slice(0, filled) if len(present) == 1 else np.flatnonzero(when == day)
            if day != NO_DAY:
                self._figures.pop(day, None)
            tallies = None if day == NO_DAY else days.setdefault(day, self._tallies(self.DAY_BINS))
            for k in range(len(self.labels)):
                x, y = self._logits[rows, k], self._targets[rows, k]
                terms = loss_terms(x, y)
                total[k].add(x, y, terms)
                if tallies is not None:
                    tallies[k].add(x, y, terms)

    def _complete(self) -> tuple[list[LabelMetrics], dict[int, list[LabelMetrics]]]:
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
        per_day: dict[int, dict[str, Figures]] = {}
        for day in sorted(days):
            if day not in self._figures:
                self._figures[day] = dict(zip(self.labels, (t.figures() for t in days[day]), strict=True))
            per_day[day] = self._figures[day]
        buffered = {int(d) for d in np.unique(self._when[: self._filled])}
        self._figures = {d: f for d, f in self._figures.items() if d not in buffered}
        return MetricsResult(
            rows=self.rows,
            auc=mean(f.auc for f in figures.values()),
            log_loss=mean(f.log_loss for f in figures.values()),
            calibration=mean(f.calibration for f in figures.values()),
            normalized_entropy=mean(f.normalized_entropy for f in figures.values()),
            labels=figures,
            per_day=per_day,
            buckets={name: calibration_buckets(t.auc) for name, t in zip(self.labels, total, strict=True)},
        )

    def auc(self) -> float:
        """Returns the mean AUC over the labels that have both classes, without the other metrics."""
        total, _ = self._complete()
        return mean(tally.auc.result() for tally in total)

    def reliability(self) -> dict[str, list[tuple[float, float, float]]]:
        """Returns, by label, mean prediction, mean label and rows of groups of rows; see `AUC.reliability`."""
        total, _ = self._complete()
        return {label: tally.auc.reliability() for label, tally in zip(self.labels, total, strict=True)}

    def merge(self, other: Metrics) -> None:
        """Adds the rows of another Metrics with the same labels, which is not modified."""
        if other.labels != self.labels:
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
        self._filled = len(state["buffer.logits"])
        self._logits[: self._filled] = state["buffer.logits"]
        self._targets[: self._filled] = state["buffer.labels"]
        self._when[: self._filled] = state["buffer.day"]
