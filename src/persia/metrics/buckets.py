"""Calibration by bucket: where predictions are too high or too low."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from persia.metrics.auc import AUC

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
    """Divides rows by their predictions into ten buckets of as many rows each, lowest first.

    Rows of one bin of the histogram stay together, so buckets differ in rows where many rows have the same prediction;
    empty ones are left out. The mean prediction is that of the centers of bins: off by a relative 6e-5 at most, and
    logits beyond +-16 count as +-16.

    Args:
        auc: a histogram of logits.
    """
    centers, negative, positive = auc.histogram()
    used = np.flatnonzero(negative + positive)
    if not len(used):
        return ()
    rows = (negative + positive)[used]
    middle = (np.cumsum(rows) - rows / 2) / rows.sum()
    bucket = np.minimum((middle * BUCKETS).astype(np.intp), BUCKETS - 1)
    predictions = 1 / (1 + np.exp(-centers[used]))
    count, predicted, observed = (
        np.bincount(bucket, weights, BUCKETS) for weights in (rows, rows * predictions, positive[used])
    )
    return tuple(
        CalibrationBucket(round(float(n)), float(p / n), float(o / n))
        for n, p, o in zip(count, predicted, observed, strict=True)
        if n
    )
