"""Guesses whether numbers are ids, times or quantities, and by which rules quantities enter a model."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from persia.cli.init.column_names import NUMBER_WORDS, TIME_WORDS, names_an_id, words_of
from persia.cli.init.guessed_columns import ColumnGuess, ColumnValues, Role
from persia.cli.init.time_guess import guess_time

__all__ = ["FEW", "guess_number", "unit_of_times", "with_buckets"]

FEW = 20
"""Whole numbers with at most this many different values are treated as codes."""

_UNIX = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
_FROM, _TO = 788_918_400, 2_208_988_800  # 1995 and 2040, in seconds since 1970.
_LONGEST_LOG = 20 * 365 * 86_400

_SKEW = 2.0
"""Skewness from which on a logarithm is tried; that of an exponential distribution."""
_BUCKETS = 32
_BUCKET_ROWS = 2_000
_BUCKET_GAIN = 0.01


def guess_number(column: str, values: ColumnValues) -> ColumnGuess:
    """Guesses the use of a column of numbers."""
    assert values.numbers is not None
    numbers = values.numbers[~np.isnan(values.numbers)]
    words = words_of(column)
    whole = bool(np.all(numbers == np.floor(numbers)) and np.all(np.isfinite(numbers)))
    if not np.all(np.isfinite(numbers)):
        return ColumnGuess(column, "unused", "has infinite values")
    if values.distinct == 1:
        return ColumnGuess(column, "unused", f"is {numbers[0]:g} in every row")
    if whole and (unit := _time_unit(words, numbers, values.distinct)):
        return guess_time(column, values, unit)
    if whole and values.distinct == values.rows and values.rows > 2 * FEW:
        steps = np.diff(numbers)
        if "id" in words or np.all(steps > 0) or np.all(steps < 0):
            return ColumnGuess(column, "unused", "differs in every row")
    role: Role = "number"
    sure = True
    reason = "numbers"
    if whole:
        span = numbers.max() - numbers.min() + 1
        if names_an_id(words):
            role, reason = "id", "whole numbers with the name of an id"
        elif set(words) & NUMBER_WORDS:
            reason = "whole numbers with the name of a quantity"
        elif values.distinct <= FEW:
            role, reason = "id", f"only {values.distinct} different whole numbers"
        elif numbers.min() >= 0 and values.distinct >= 0.5 * span:
            role, reason, sure = "id", "whole numbers that fill their range, as codes do", False
        else:
            reason, sure = "whole numbers", not words or "column" in words or values.distinct < values.rows // 100
    return ColumnGuess(
        column,
        role,
        reason,
        sure,
        log=_skewed(numbers),
        missing=values.missing / values.rows,
        nulls=values.nulls,
        distinct=values.distinct,
    )


def with_buckets(guess: ColumnGuess, values: ColumnValues, targets: NDArray[np.float64]) -> ColumnGuess:
    """Returns the guess with buckets, if these explain more of the label than a straight line through the number does.

    Both are shares of the variance of the label, adjusted for the number of buckets. The network could learn such a
    curve from the number, but needs more samples for it, and the linear part of a factorisation machine cannot.

    Args:
        guess: guess about a column of numbers.
        values: its values.
        targets: float64 `[rows]`, the label as a number; NaN where unknown.
    """
    assert values.numbers is not None
    known = ~(np.isnan(values.numbers) | np.isnan(targets))
    numbers, labels = values.numbers[known], targets[known]
    if len(numbers) < _BUCKET_ROWS or labels.std() == 0:
        return guess
    entered = _logs(numbers) if guess.log else numbers
    line = float(np.corrcoef(entered, labels)[0, 1]) ** 2 if entered.std() else 0.0
    edges = np.unique(np.quantile(numbers, np.linspace(0, 1, _BUCKETS + 1)[1:-1]))
    buckets = np.searchsorted(edges, numbers, side="right")
    counts = np.bincount(buckets)
    means = np.bincount(buckets, labels) / np.maximum(counts, 1)
    between = float((counts * (means - labels.mean()) ** 2).sum() / ((labels - labels.mean()) ** 2).sum())
    rows, used = len(labels), np.count_nonzero(counts)
    explained = 1 - (1 - between) * (rows - 1) / (rows - used)
    if explained - line < _BUCKET_GAIN:
        return guess
    why = f"{_BUCKETS} buckets explain {explained:.1%} of the label's variance, a line {line:.1%}"
    return guess._replace(buckets=_BUCKETS, bucket_reason=why)


def _skewed(numbers: NDArray[np.float64]) -> bool:
    """Whether the logarithms of numbers are spread more evenly than the numbers."""
    before = _skewness(numbers)
    return before > _SKEW and abs(_skewness(_logs(numbers))) < before / 2


def _skewness(numbers: NDArray[np.float64]) -> float:
    """Returns the third standardised moment, of numbers scaled so that it does not overflow."""
    scaled = (numbers - numbers.mean()) / (np.abs(numbers).max() or 1.0)
    deviation = float(scaled.std())
    return float(np.mean((scaled / deviation) ** 3)) if deviation else 0.0


def _logs(numbers: NDArray[np.float64]) -> NDArray[np.float64]:
    logs: NDArray[np.float64] = np.sign(numbers) * np.log1p(np.abs(numbers))
    return logs


def _time_unit(words: list[str], numbers: NDArray[np.float64], distinct: int) -> str:
    """Returns the unit of numbers that are times since 1970; empty if they are none."""
    named = bool(set(words) & TIME_WORDS)
    if distinct <= FEW and not named:
        return ""
    name = unit_of_times(numbers)
    span = float(numbers.max() - numbers.min())
    return name if name and (named or ("column" in words and span <= _LONGEST_LOG * _UNIX[name])) else ""


def unit_of_times(numbers: NDArray[np.float64]) -> str:
    """Returns the unit in which numbers since 1970 are times from 1995 to 2040; empty if there is none."""
    low, high = float(numbers.min()), float(numbers.max())
    return next((name for name, unit in _UNIX.items() if low >= _FROM * unit and high <= _TO * unit), "")
