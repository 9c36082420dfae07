"""Streaming metrics of binary predictions, from logits: AUC, log-loss, calibration; in all, per label and per day.

Memory does not grow with rows, an update costs some microseconds, and a state that is saved and loaded continues to
the last digit. Nothing here needs torch; tensors on the CPU that need no gradient are taken as arrays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from persia.errors import ConfigError, DataError
from persia.types import Floats

__all__ = ["AUC", "Calibration", "Figures", "LogLoss", "Metrics", "MetricsResult"]

State = dict[str, Any]
"""Plain numpy arrays and numbers by name."""

BLOCK: Final = 1 << 14  # rows that are collected before they are binned: temporaries then fit into cache
LIMIT: Final = 16.0  # logits are clipped to +-LIMIT before they are binned


def _column(values: ArrayLike, name: str) -> Floats:
    array = np.asarray(values, dtype=np.float32)
    if array.ndim != 1:
        raise DataError(f"{name} have shape {array.shape}; give one value for each row, [rows].", field=name)
    return array


def _check(logits: Floats, labels: Floats) -> None:
    """Raises DataError unless shapes agree, logits are finite, and labels lie in [0, 1]."""
    if logits.shape != labels.shape:
        raise DataError(f"Logits have shape {logits.shape}, labels {labels.shape}; they must agree.", field="labels")
    if not logits.size:
        return
    finite = np.isfinite(logits)
    if not finite.all():
        bad = logits.size - int(np.count_nonzero(finite))
        raise DataError(
            f"{bad} of {logits.size} logits are not finite; the model has diverged or its input is not finite.",
            field="logits",
            count=bad,
        )
    if not (labels.min() >= 0 and labels.max() <= 1):  # written so that NaN fails
        raise DataError("A label lies outside [0, 1]; correct the data.", field="labels")


def _loss_terms(logits: Floats, labels: Floats) -> tuple[float, float, float]:
    """Sums of log-loss, prediction and label; stable for logits of any size."""
    x = logits.astype(np.float64)
    small = np.exp(-np.abs(x))
    positive = x >= 0
    loss = np.where(positive, x, 0.0) - x * labels + np.log1p(small)
    prediction = np.where(positive, 1.0, small) / (1.0 + small)
    return float(loss.sum()), float(prediction.sum()), float(labels.sum(dtype=np.float64))


class AUC:
    """Area under the ROC curve, over a histogram of logits.

    Logits are clipped to +-16 and binned uniformly; two rows of one bin count as a tie, that is half. With the default
    of 2^18 bins (1.2e-4 wide) this agrees with the exact value to about 1e-6 once logits spread over hundreds of bins;
    `bound` tells how far off it can be at most. A label between 0 and 1 counts as positive by that part, as negative by
    the rest.

    Memory: 16 bytes per bin (touched ones only, in pages) and a buffer of 128 KiB. Not thread-safe.

    Args:
        bins: number of bins.
    """

    def __init__(self, bins: int = 1 << 18) -> None:
        if not 2 <= bins <= 1 << 24:
            raise ConfigError(f"AUC.bins = {bins} is not from 2 to 2^24; correct it.", field="AUC.bins")
        self.bins = bins
        self._counts: NDArray[np.float64] | None = None  # [2 * bins]: negatives and positives of each bin
        self._logits = np.empty(0, np.float32)
        self._labels = np.empty(0, np.float32)
        self._filled = 0

    def update(self, logits: ArrayLike, labels: ArrayLike) -> None:
        """Adds rows.

        Args:
            logits: `[rows]`, finite.
            labels: `[rows]`, each in [0, 1].

        Raises:
            DataError: something is not as above; nothing has been added.
        """
        x, y = _column(logits, "logits"), _column(labels, "labels")
        _check(x, y)
        if len(self._logits) == 0:
            self._logits, self._labels = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
        start = 0
        while start < len(x):
            take = min(BLOCK - self._filled, len(x) - start)
            self._logits[self._filled : self._filled + take] = x[start : start + take]
            self._labels[self._filled : self._filled + take] = y[start : start + take]
            self._filled += take
            start += take
            if self._filled == BLOCK:
                self._flush()

    def _flush(self) -> None:
        if self._filled:
            self.add(self._logits[: self._filled], self._labels[: self._filled])
            self._filled = 0

    def add(self, logits: Floats, labels: Floats) -> None:
        """Bins rows at once, without checks or buffer: for callers that have done both."""
        if self._counts is None:
            self._counts = np.zeros(2 * self.bins)
        scaled = (np.clip(logits, -LIMIT, LIMIT) + np.float32(LIMIT)) * np.float32(self.bins / (2 * LIMIT))
        index = np.minimum(scaled.astype(np.intp), self.bins - 1)
        index *= 2
        positive = labels == 1
        if np.all(positive | (labels == 0)):
            index += positive
            np.add.at(self._counts, index, 1.0)
        else:
            np.add.at(self._counts, index, 1.0 - labels.astype(np.float64))
            np.add.at(self._counts, index + 1, labels.astype(np.float64))

    def _sides(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        self._flush()
        if self._counts is None:
            return np.zeros(1), np.zeros(1)
        sides = self._counts.reshape(-1, 2)
        return sides[:, 0], sides[:, 1]

    def result(self) -> float:
        """The area; nan while there are rows of one class only."""
        negative, positive = self._sides()
        pairs = float(negative.sum()) * float(positive.sum())
        if pairs == 0:
            return math.nan
        below = np.cumsum(negative) - 0.5 * negative
        return float(np.dot(positive, below)) / pairs

    def bound(self) -> float:
        """Largest error that binning can have caused: half the share of pairs that fall into one bin."""
        negative, positive = self._sides()
        pairs = float(negative.sum()) * float(positive.sum())
        return 0.5 * float(np.dot(positive, negative)) / pairs if pairs else math.nan

    def merge(self, other: AUC) -> None:
        """Adds the rows of another one with as many bins."""
        if other.bins != self.bins:
            raise ConfigError(f"AUC of {other.bins} bins does not merge into one of {self.bins}.", field="AUC.bins")
        self._flush()
        other._flush()
        if other._counts is not None:
            self._counts = other._counts.copy() if self._counts is None else self._counts + other._counts

    def state_dict(self) -> State:
        """Bins that are in use and their counts."""
        self._flush()
        used = np.flatnonzero(self._counts) if self._counts is not None else np.empty(0, np.int64)
        counts = self._counts[used] if self._counts is not None else np.empty(0)
        return {"bins": self.bins, "used": used.astype(np.int64), "counts": counts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replaces what has been counted."""
        self.bins = int(state["bins"])
        self._filled = 0
        self._counts = np.zeros(2 * self.bins)
        self._counts[np.asarray(state["used"])] = state["counts"]


class LogLoss:
    """Mean log-loss (binary cross-entropy), computed from logits; nan without rows. Not thread-safe."""

    def __init__(self) -> None:
        self.total = 0.0
        self.rows = 0

    def update(self, logits: ArrayLike, labels: ArrayLike) -> None:
        """Adds rows: logits and labels `[rows]`, as for :meth:`AUC.update`."""
        x, y = _column(logits, "logits"), _column(labels, "labels")
        _check(x, y)
        self.total += _loss_terms(x, y)[0]
        self.rows += len(x)

    def result(self) -> float:
        """The mean."""
        return self.total / self.rows if self.rows else math.nan

    def merge(self, other: LogLoss) -> None:
        """Adds the rows of another one."""
        self.total += other.total
        self.rows += other.rows

    def state_dict(self) -> State:
        """Sum and rows."""
        return {"total": self.total, "rows": self.rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replaces what has been counted."""
        self.total, self.rows = float(state["total"]), int(state["rows"])


class Calibration:
    """Mean prediction divided by mean label: 1 is ideal; nan without a positive label. Not thread-safe."""

    def __init__(self) -> None:
        self.predicted = 0.0
        self.observed = 0.0

    def update(self, logits: ArrayLike, labels: ArrayLike) -> None:
        """Adds rows: logits and labels `[rows]`, as for :meth:`AUC.update`."""
        x, y = _column(logits, "logits"), _column(labels, "labels")
        _check(x, y)
        _, predicted, observed = _loss_terms(x, y)
        self.predicted += predicted
        self.observed += observed

    def result(self) -> float:
        """The ratio."""
        return self.predicted / self.observed if self.observed else math.nan

    def merge(self, other: Calibration) -> None:
        """Adds the rows of another one."""
        self.predicted += other.predicted
        self.observed += other.observed

    def state_dict(self) -> State:
        """Both sums."""
        return {"predicted": self.predicted, "observed": self.observed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replaces what has been counted."""
        self.predicted, self.observed = float(state["predicted"]), float(state["observed"])


@dataclass(frozen=True, slots=True)
class Figures:
    """Quality of one label over some rows; nan where it is not defined (see the classes of these names)."""

    rows: int
    auc: float
    log_loss: float
    calibration: float


@dataclass(frozen=True, slots=True)
class MetricsResult:
    """Quality of a model.

    Attributes:
        rows: rows seen.
        auc: mean over the labels that have both classes; with one label, its AUC. Likewise the next two.
        log_loss: mean over labels.
        calibration: mean over labels.
        labels: figures of each label over all rows.
        per_day: figures of each label by day, days ascending; rows without a day are in none.
    """

    rows: int
    auc: float
    log_loss: float
    calibration: float
    labels: Mapping[str, Figures]
    per_day: Mapping[int, Mapping[str, Figures]] = field(default_factory=dict)

    @property
    def auc_per_day(self) -> dict[int, float]:
        """AUC by day, mean over labels."""
        return {day: _mean(f.auc for f in figures.values()) for day, figures in self.per_day.items()}

    @property
    def auc_mean_of_days(self) -> float:
        """Mean over the days of the AUC of each; nan without days."""
        return _mean(self.auc_per_day.values())


def _mean(values: Any) -> float:
    """Mean of the values that are not nan; nan without any."""
    known = [v for v in values if not math.isnan(v)]
    return math.fsum(known) / len(known) if known else math.nan


class _Tally:
    """AUC, log-loss and calibration of one label over one period."""

    def __init__(self, bins: int) -> None:
        self.auc = AUC(bins)
        self.log_loss = LogLoss()
        self.calibration = Calibration()

    def add(self, logits: Floats, labels: Floats, terms: tuple[float, float, float]) -> None:
        self.auc.add(logits, labels)
        self.log_loss.total += terms[0]
        self.log_loss.rows += len(logits)
        self.calibration.predicted += terms[1]
        self.calibration.observed += terms[2]

    def merge(self, other: _Tally) -> None:
        self.auc.merge(other.auc)
        self.log_loss.merge(other.log_loss)
        self.calibration.merge(other.calibration)

    def figures(self) -> Figures:
        return Figures(self.log_loss.rows, self.auc.result(), self.log_loss.result(), self.calibration.result())

    def state_dict(self) -> State:
        return {**self.auc.state_dict(), **self.log_loss.state_dict(), **self.calibration.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.auc.load_state_dict(state)
        self.log_loss.load_state_dict(state)
        self.calibration.load_state_dict(state)


NO_DAY: Final = np.int64(np.iinfo(np.int64).min)


class Metrics:
    """AUC, log-loss and calibration of each label, in all and per day.

    Days may come in any order. Rows are collected in blocks of 16,384 and counted block by block, so an update is
    cheap, and neither `result` nor `state_dict` changes a later result. Not thread-safe.

    Memory per label: 4 MiB (2^18 bins), 1 MiB for each day (2^16 bins; only pages in use), 128 KiB of buffer.

    Args:
        labels: their names, in the order of the columns.
        max_days: most distinct days.

    Raises:
        ConfigError: there is no label.
    """

    TOTAL_BINS: Final = 1 << 18
    DAY_BINS: Final = 1 << 16

    def __init__(self, labels: Sequence[str] = ("label",), *, max_days: int = 1000) -> None:
        if isinstance(labels, str) or not labels:
            raise ConfigError(f"Metrics.labels = {labels!r}; give a list of at least one name.", field="labels")
        self.labels = tuple(labels)
        self.max_days = max_days
        self._clear()

    def _clear(self) -> None:
        self._total = self._tallies(self.TOTAL_BINS)
        self._days: dict[int, list[_Tally]] = {}
        self._figures: dict[int, dict[str, Figures]] = {}  # of days that have not changed since
        self._logits = np.empty((BLOCK, len(self.labels)), np.float32)
        self._targets = np.empty((BLOCK, len(self.labels)), np.float32)
        self._when = np.empty(BLOCK, np.int64)
        self._filled = 0

    def _tallies(self, bins: int) -> list[_Tally]:
        return [_Tally(bins) for _ in self.labels]

    @property
    def rows(self) -> int:
        """Rows seen."""
        return self._total[0].log_loss.rows + self._filled

    def update(self, logits: ArrayLike, labels: ArrayLike, day: ArrayLike | None = None) -> None:
        """Adds a batch.

        Args:
            logits: `[rows, labels]`, or `[rows]` with one label; finite.
            labels: of the same shape, each in [0, 1].
            day: whole numbers `[rows]`, or one for all rows; None: the rows belong to no day.

        Raises:
            DataError: something is not as above, or there are more than `max_days` days; nothing has been added,
                except that the number of days is checked when a block is full.
        """
        x, y = self._matrix(logits, "logits"), self._matrix(labels, "labels")
        _check(x, y)
        when: Any = NO_DAY
        if day is not None:
            when = np.asarray(day)
            if when.dtype.kind not in "iu" or when.shape not in ((), (len(x),)):
                raise DataError(
                    f"day has dtype {when.dtype} and shape {when.shape}; give one integer for each of {len(x)} rows.",
                    field="day",
                )
        start = 0
        while start < len(x):
            take = min(BLOCK - self._filled, len(x) - start)
            here, there = slice(self._filled, self._filled + take), slice(start, start + take)
            self._logits[here], self._targets[here] = x[there], y[there]
            self._when[here] = when[there] if np.ndim(when) else when
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
                f"{name} have shape {array.shape}; give [rows, {len(self.labels)}], a column for each of "
                f"{', '.join(self.labels)}.",
                field=name,
            )
        return array

    def _count(self, total: list[_Tally], days: dict[int, list[_Tally]], filled: int) -> None:
        """Counts the first `filled` rows of the buffer into the given tallies."""
        when = self._when[:filled]
        present = [int(when[0])] if when[0] == when[-1] and np.all(when == when[0]) else np.unique(when).tolist()
        if len(days.keys() | {d for d in present if d != NO_DAY}) > self.max_days:
            raise DataError(
                f"There are more than {self.max_days} different days; give days, not timestamps.", field="day"
            )
        for day in present:
            rows = slice(0, filled) if len(present) == 1 else np.flatnonzero(when == day)
            if day != NO_DAY:
                self._figures.pop(day, None)
            tallies = None if day == NO_DAY else days.setdefault(day, self._tallies(self.DAY_BINS))
            for k in range(len(self.labels)):
                x, y = self._logits[rows, k], self._targets[rows, k]
                terms = _loss_terms(x, y)
                total[k].add(x, y, terms)
                if tallies is not None:
                    tallies[k].add(x, y, terms)

    def _complete(self) -> tuple[list[_Tally], dict[int, list[_Tally]]]:
        """The tallies with the buffer counted in; the own ones stay as they are."""
        if not self._filled:
            return self._total, self._days
        total = self._copies(self._total, self.TOTAL_BINS)
        touched = {int(d) for d in np.unique(self._when[: self._filled])}
        days = {d: self._copies(t, self.DAY_BINS) if d in touched else t for d, t in self._days.items()}
        self._count(total, days, self._filled)
        return total, days

    def _copies(self, tallies: list[_Tally], bins: int) -> list[_Tally]:
        copies = self._tallies(bins)
        for copy, tally in zip(copies, tallies, strict=True):
            copy.merge(tally)
        return copies

    def result(self) -> MetricsResult:
        """The figures so far; takes about a millisecond, and as much for each day that has changed since the last."""
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
            auc=_mean(f.auc for f in figures.values()),
            log_loss=_mean(f.log_loss for f in figures.values()),
            calibration=_mean(f.calibration for f in figures.values()),
            labels=figures,
            per_day=per_day,
        )

    def merge(self, other: Metrics) -> None:
        """Adds the rows of another one with the same labels; the other stays as it is."""
        if other.labels != self.labels:
            raise ConfigError(f"Metrics of {other.labels} do not merge into those of {self.labels}.", field="labels")
        total, days = other._complete()
        if len(self._days.keys() | days.keys()) > self.max_days:
            raise DataError(f"Together there are more than {self.max_days} different days.", field="day")
        for mine, theirs in zip(self._total, total, strict=True):
            mine.merge(theirs)
        for day, tallies in days.items():
            self._figures.pop(day, None)
            for mine, theirs in zip(self._days.setdefault(day, self._tallies(self.DAY_BINS)), tallies, strict=True):
                mine.merge(theirs)

    def state_dict(self) -> State:
        """What has been counted and what is buffered: numpy arrays, numbers and names under flat keys."""
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
        """Replaces everything by a state of Metrics with the same labels.

        Raises:
            ConfigError: the labels differ.
        """
        if list(state["labels"]) != list(self.labels):
            raise ConfigError(f"The state is of labels {state['labels']}, not of {self.labels}.", field="labels")
        self._clear()
        self._days = {int(d): self._tallies(self.DAY_BINS) for d in state["days"]}
        for period, tallies in [("total", self._total), *((f"day.{d}", t) for d, t in self._days.items())]:
            for k, tally in enumerate(tallies):
                prefix = f"{period}.{k}."
                tally.load_state_dict({n.removeprefix(prefix): v for n, v in state.items() if n.startswith(prefix)})
        self._filled = len(state["buffer.logits"])
        self._logits[: self._filled] = state["buffer.logits"]
        self._targets[: self._filled] = state["buffer.labels"]
        self._when[: self._filled] = state["buffer.day"]
