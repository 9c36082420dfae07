"""The slow, readable twin of the rules of non-ID-type features and labels: one value at a time."""

from __future__ import annotations

from typing import Any

import numpy as np

from persia.schema import DenseFeature, Label

__all__ = ["dense_row", "label_value"]


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
        x = np.log1p(x) if x >= 0 else -np.log1p(-x)
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
