"""`Targets`: what a loss compares logits with."""

from __future__ import annotations

from typing import NamedTuple

import torch

from persia.schema import Schema

__all__ = ["Targets", "may_be_missing", "targets_of"]


class Targets(NamedTuple):
    """The targets of a batch.

    A method `loss(logits, targets)` of a model gets them in place of labels, because of the name of its parameter.

    Attributes:
        labels: float32 `[batch, labels]`: numbers, or the numbers of classes; 0 where a label is missing.
        mask: bool `[batch, labels]`: whether a label is known; None if no label of the schema may be missing.
        weights: weight of each sample, float32 `[batch]`; None weighs all 1.
        groups: group of each sample, int64 `[batch]`; None without groups.
    """

    labels: torch.Tensor
    mask: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    groups: torch.Tensor | None = None

    def weights_of(self, column: int) -> torch.Tensor | None:
        """Returns the weight of each sample in the loss of a label: 0 where it is missing. None weighs all 1.

        Args:
            column: number of the label, in the order of the schema.

        Returns:
            `[batch]`, of the dtype of `labels`.
        """
        if self.mask is None:
            return self.weights
        known = self.mask[:, column]
        return known.to(self.labels.dtype) if self.weights is None else self.weights * known


def may_be_missing(schema: Schema) -> bool:
    """Returns whether a label of the schema may be missing."""
    return any(label.missing == "mask" for label in schema.targets)


def targets_of(
    labels: torch.Tensor, weights: torch.Tensor | None, groups: torch.Tensor | None, *, masked: bool
) -> Targets:
    """Returns the targets of a batch.

    Args:
        labels: float32 `[batch, labels]`; NaN where one is missing.
        weights: float32 `[batch]`, or None.
        groups: int64 `[batch]`, or None.
        masked: whether a label may be missing.
    """
    if not masked:
        return Targets(labels, None, weights, groups)
    mask = ~labels.isnan()
    return Targets(labels.masked_fill(~mask, 0), mask, weights, groups)
