"""Input checks of the metrics, and shared sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from persia.checks import check_integer, plain
from persia.errors import ConfigError, DataError
from persia.types import Floats

__all__ = [
    "State",
    "check",
    "check_cutoffs",
    "check_logits",
    "check_weights",
    "column",
    "loss_terms",
    "sigmoid",
    "total_weight",
]

State = dict[str, Any]
"""State of a metric: numpy arrays and numbers by name."""


def column(values: ArrayLike, name: str) -> Floats:
    """Converts values to float32 `[rows]`. Raises DataError for another shape."""
    array = np.asarray(values, dtype=np.float32)
    if array.ndim != 1:
        raise DataError(f"{name} have shape {array.shape}; pass one value for each row, [rows].", field=name)
    return array


def check(logits: Floats, labels: Floats) -> None:
    """Raises DataError unless shapes agree, logits are finite, and labels lie in [0, 1]."""
    if logits.shape != labels.shape:
        raise DataError(f"Logits have shape {logits.shape}, labels {labels.shape}; they must agree.", field="labels")
    check_logits(logits)
    if logits.size and not (labels.min() >= 0 and labels.max() <= 1):  # In this form, NaN fails the check.
        raise DataError("A label lies outside [0, 1]; correct the data.", field="labels")


def check_cutoffs(name: str, at: Sequence[int]) -> tuple[int, ...]:
    """Returns distinct values of k.

    Raises:
        ConfigError: a k is less than 1 or not an integer, or there is none.
    """
    if isinstance(at, (str, int)) or not at:
        raise ConfigError(f"Invalid {name} = {at!r}; expected a list of numbers.", field="at")
    values = tuple(plain(k) for k in at)
    for k in values:
        check_integer(name, k, 1)
    return tuple(dict.fromkeys(values))


def check_logits(logits: Floats) -> None:
    """Raises DataError unless logits are finite."""
    finite = np.isfinite(logits)
    if not finite.all():
        bad = logits.size - int(np.count_nonzero(finite))
        raise DataError(
            f"{bad} of {logits.size} logits are not finite; check the model's input and learning rate.",
            field="logits",
            count=bad,
        )


def check_weights(weights: ArrayLike | None, rows: int) -> Floats | None:
    """Returns weights float32 `[rows]`; None if each is 1, as None itself says.

    Raises:
        DataError: they have another shape, or one is negative or not finite.
    """
    if weights is None:
        return None
    array = np.asarray(weights, dtype=np.float32)
    if array.shape != (rows,):
        raise DataError(f"weights have shape {array.shape}; pass one for each of {rows} rows.", field="weights")
    if rows and not (array.min() >= 0 and array.max() < np.inf):  # In this form, NaN fails the check.
        raise DataError("A weight is negative or not finite; correct the data.", field="weights")
    return None if (array == 1).all() else array


def total_weight(rows: int, weights: Floats | None) -> float:
    """Returns the sum of weights `[rows]`; None weighs each row 1."""
    return float(rows) if weights is None else float(weights.sum(dtype=np.float64))


def loss_terms(logits: Floats, labels: Floats, weights: Floats | None = None) -> tuple[float, float, float]:
    """Returns the weighted sums of log-loss, prediction and label. Numerically stable for logits of any size."""
    x = logits.astype(np.float64)
    small = np.abs(x)
    np.exp(np.negative(small, out=small), out=small)
    prediction = np.where(x >= 0, 1.0, small)
    loss = np.maximum(x, 0.0)
    np.multiply(x, labels, out=x)
    np.subtract(loss, x, out=loss)
    np.add(loss, np.log1p(small, out=x), out=loss)
    np.divide(prediction, np.add(small, 1.0, out=small), out=prediction)
    if weights is not None:
        np.multiply(loss, weights, out=loss)
        np.multiply(prediction, weights, out=prediction)
        return float(loss.sum()), float(prediction.sum()), float((labels.astype(np.float64) * weights).sum())
    return float(loss.sum()), float(prediction.sum()), float(labels.sum(dtype=np.float64))


def sigmoid(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the predictions for logits. Numerically stable for logits of any size."""
    small = np.exp(-np.abs(logits))
    prediction: NDArray[np.float64] = np.where(logits >= 0, 1.0, small) / (1.0 + small)
    return prediction
