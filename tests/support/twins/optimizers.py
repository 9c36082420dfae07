"""The rules of the sparse optimizers in NumPy: one row, one gradient, float32 throughout.

Each operation and its order are those of the native kernels, so results agree to the last bit.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from persia.store.table_config import TableConfig

__all__ = ["apply"]

F = np.float32
Vector = NDArray[np.float32]


def apply(config: TableConfig, weight: Vector, state: Vector, gradient: Vector, lr: float, count: int) -> None:
    """Updates `weight` and `state` in place; `count` is the row's number of updates, this one included."""
    params = config.with_defaults()
    with np.errstate(all="ignore"):
        if params["clip_row_norm"]:
            gradient = _clipped(gradient, params["clip_row_norm"])
        if decay := params.get("decoupled_weight_decay"):
            weight *= F(1 - float(F(lr)) * float(F(decay)))
        _RULES[config.optimizer](params, weight, state, gradient, F(lr), count)
        if config.value_bound:
            bound = F(config.stored_bound)
            weight[:] = np.minimum(np.maximum(weight, -bound), bound)


def _clipped(gradient: Vector, limit: float) -> Vector:
    """Returns the gradient, scaled down to this L2 norm if its norm is larger. In float64, 16 running sums."""
    lanes = np.zeros(16)
    for start in range(0, len(gradient), 16):
        part = gradient[start : start + 16].astype(np.float64)
        lanes[: len(part)] += part * part
    for width in (8, 4, 2, 1):
        lanes[:width] += lanes[width : 2 * width]
    norm, limit = math.sqrt(lanes[0]), float(F(limit))
    return (gradient * np.float64(limit / norm)).astype(F) if norm > limit else gradient


def _decayed(params: dict[str, float], weight: Vector, gradient: Vector) -> Vector:
    return gradient + F(params["weight_decay"]) * weight


def _sgd(params: dict[str, float], weight: Vector, state: Vector, gradient: Vector, lr: F, count: int) -> None:
    g = _decayed(params, weight, gradient)
    if params["momentum"]:
        state[:] = F(params["momentum"]) * state + g
        g = state
    weight -= lr * g


def _adagrad(params: dict[str, float], weight: Vector, state: Vector, gradient: Vector, lr: F, count: int) -> None:
    g = _decayed(params, weight, gradient)
    state += g * g
    weight -= lr * g / (np.sqrt(state) + F(params["eps"]))


def _rowwise_adagrad(
    params: dict[str, float], weight: Vector, state: Vector, gradient: Vector, lr: F, count: int
) -> None:
    g = _decayed(params, weight, gradient)
    state[0] += _sum_in_lanes(g * g) / F(len(g))
    weight -= (lr / (np.sqrt(state[0]) + F(params["eps"]))) * g


def _sum_in_lanes(values: Vector) -> F:
    """16 running sums, then pairwise: an order that vector units of any width can keep."""
    lanes = np.zeros(16, F)
    for start in range(0, len(values), 16):
        part = values[start : start + 16]
        lanes[: len(part)] += part
    for width in (8, 4, 2, 1):
        lanes[:width] += lanes[width : 2 * width]
    return F(lanes[0])


def _adam(params: dict[str, float], weight: Vector, state: Vector, gradient: Vector, lr: F, count: int) -> None:
    g = _decayed(params, weight, gradient)
    beta1, beta2 = params["beta1"], params["beta2"]
    first, second = state[: len(g)], state[len(g) :]
    first[:] = F(beta1) * first + F(1 - beta1) * g
    second[:] = F(beta2) * second + F(1 - beta2) * (g * g)
    scale = F(1 / (1 - _power(beta1, count)))
    root_scale = F(1 / math.sqrt(1 - _power(beta2, count)))
    weight -= (lr * scale) * first / (np.sqrt(second) * root_scale + F(params["eps"]))


def _power(base: float, exponent: int) -> float:
    """By squaring, as in the native code: rounds alike on every machine."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def _ftrl(params: dict[str, float], weight: Vector, state: Vector, gradient: Vector, alpha: F, count: int) -> None:
    z, n = state[: len(gradient)], state[len(gradient) :]
    squares = n + gradient * gradient
    root = np.sqrt(squares)
    sigma = (root - np.sqrt(n)) / alpha
    z[:] = z + (gradient - sigma * weight)
    n[:] = squares
    l1 = F(params["l1"])
    solved = -(z - np.copysign(l1, z)) / ((F(params["beta"]) + root) / alpha + F(params["l2"]))
    weight[:] = np.where(np.abs(z) <= l1, F(0), solved)


_RULES = {
    "sgd": _sgd,
    "adagrad": _adagrad,
    "rowwise_adagrad": _rowwise_adagrad,
    "adam": _adam,
    "ftrl": _ftrl,
}
