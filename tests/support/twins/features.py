"""The slow, readable twin of the rules of non-ID-type features and labels: one value at a time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from persia.schema import DenseFeature, Label

__all__ = ["dense_row", "label_value", "log1p"]

_HALF_ROOT = float.fromhex("0x1.6a09ep-1")
_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
_LG = (
    6.666666666666735130e-01, 3.999999999940941908e-01, 2.857142874366239149e-01, 2.222219843214978396e-01,
    1.818357216161805012e-01, 1.531383769920937332e-01, 1.479819860511658591e-01,
)  # fmt: skip


def dense_row(feature: str | DenseFeature, value: Any) -> list[np.float32]:
    """The input of the network for one sample.

    Args:
        feature: the feature, fitted.
        value: a number, a list of `feature.size` numbers, or None if it is missing.
    """
    if isinstance(feature, str):
        return [np.float32(value)]
    missing = value is None
    if missing:
        assert feature.fill is not None
        fill = feature.fitted.mean if feature.fill == "mean" and feature.fitted is not None else feature.fill
        value = [fill] * feature.values
    numbers = value if isinstance(value, list) else [value]
    row = [np.float32(_transformed(feature, np.float64(number))) for number in numbers]
    return [*row, np.float32(missing)] if feature.missing_indicator else row


def _transformed(feature: DenseFeature, x: np.float64) -> np.float64:
    if feature.clip is not None:
        low, high = feature.clip
        x = np.float64(min(max(x, low), high))
    if feature.log:
        x = np.float64(math.copysign(log1p(abs(float(x))), x))
    if isinstance(feature.scale, tuple):
        centre, width = feature.scale
        x = (x - centre) / width
    elif feature.scale in ("standard", "minmax"):
        assert feature.fitted is not None
        x = (x - feature.fitted.centre) / feature.fitted.width
    elif feature.scale == "quantile":
        assert feature.fitted is not None
        x = _rank(list(feature.fitted.quantiles), x)
    return x + 0.0


def log1p(x: float) -> float:
    """log(1 + x) for x >= 0, as fdlibm (s_log1p.c) computes it; `math.log1p` differs in the last digit by system.

    1 + x is 2**k * (1 + f), and log(1 + f) is a polynomial in f / (2 + f), see there. Python, too, rounds each step.
    """
    total = 1.0 + x
    mantissa, k = math.frexp(total)
    if mantissa < _HALF_ROOT:
        mantissa, k = 2 * mantissa, k - 1
    if k == 0:
        f, correction = x, 0.0
    else:  # What 1 + x has lost by rounding.
        f, correction = mantissa - 1.0, ((1.0 - (total - x)) if k >= 2 else (x - (total - 1.0))) / total
    half, s = 0.5 * f * f, f / (2.0 + f)
    z = s * s
    w = z * z
    even = w * (_LG[1] + w * (_LG[3] + w * _LG[5]))
    odd = z * (_LG[0] + w * (_LG[2] + w * (_LG[4] + w * _LG[6])))
    return s * (half + (odd + even)) + (k * _LN2_LOW + correction) - half + f + k * _LN2_HIGH


def _rank(quantiles: list[float], x: np.float64) -> np.float64:
    last = len(quantiles) - 1
    if x <= quantiles[0]:
        return np.float64(0)
    if x >= quantiles[-1]:
        return np.float64(1)
    equal = [place for place, quantile in enumerate(quantiles) if quantile == x]
    if equal:
        return np.float64((equal[0] + equal[-1]) / 2 / last)
    above = next(place for place, quantile in enumerate(quantiles) if quantile > x)
    low, high = quantiles[above - 1], quantiles[above]
    return ((above - 1) + (x - low) / (high - low)) / last


def label_value(label: str | Label, value: Any) -> np.float32:
    """The label of one sample; NaN if it is missing."""
    if value is None:
        return np.float32(np.nan)
    if isinstance(label, Label) and isinstance(label.classes, tuple):
        return np.float32(label.classes.index(str(value)))
    return np.float32(value)
