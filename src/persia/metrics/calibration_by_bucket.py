"""Calibration by bucket: where predictions are too high or too low."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from persia.metrics.auc import AUC
from persia.metrics.checks import sigmoid

__all__ = ["CalibrationBucket", "calibration_buckets"]

BUCKETS: Final = 10


class CalibrationBucket(NamedTuple):
    """Rows of similar predictions.

    Attributes:
        rows: number of rows.
        predicted: mean prediction.
        observed: mean label.
    """

    rows: int
    predicted: float
    observed: float


def calibration_buckets(auc: AUC) -> tuple[CalibrationBucket, ...]:
    """Divides rows by their predictions into ten buckets of equal size, lowest first.

    Rows of one bin of the histogram stay together, so bucket sizes differ if many rows have the same prediction. Empty
    buckets are left out. The mean prediction is computed from the centers of bins.

    Args:
        auc: a histogram of logits.
    """
    centers, negative, positive = auc.histogram()
    rows = negative + positive
    if not len(rows):
        return ()
    middle = (np.cumsum(rows) - rows / 2) / rows.sum()
    bucket = np.minimum((middle * BUCKETS).astype(np.intp), BUCKETS - 1)
    count, predicted, observed = (
        np.bincount(bucket, weights, BUCKETS) for weights in (rows, rows * sigmoid(centers), positive)
    )
    return tuple(
        CalibrationBucket(round(float(n)), float(p / n), float(o / n))
        for n, p, o in zip(count, predicted, observed, strict=True)
        if n
    )
