"""The area under the ROC curve by its definition: slow, readable, and exact."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

__all__ = ["exact_auc"]


def exact_auc(logits: ArrayLike, labels: ArrayLike) -> float:
    """Returns the share of pairs of a positive and a negative in which the positive has the higher logit.

    Pairs of equal logits count half. A label between 0 and 1 counts as that fraction of a positive and the rest of a
    negative.

    Args:
        logits: `[rows]`.
        labels: `[rows]`, each in [0, 1].

    Returns:
        The AUC; nan while there are rows of one class only.
    """
    x = np.asarray(logits, np.float32)
    positive = np.asarray(labels, np.float64)
    negative = 1 - positive
    order = (x[:, None] > x).astype(np.float64) + (x[:, None] == x) / 2
    pairs = positive.sum() * negative.sum()
    return float(positive @ order @ negative / pairs) if pairs else math.nan
