"""`ModelOutput`: what a model returns whose loss needs more than its logits."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

__all__ = ["ModelOutput"]


class ModelOutput(NamedTuple):
    """Logits, and what the loss needs beside them.

    A model returns it in place of logits for an auxiliary loss, or for a loss of its own, such as a sampled softmax.
    Its method `loss(logits, labels, extra)` gets `extra` back. Metrics and predictions use the logits only.

    Attributes:
        logits: `[batch, labels]`.
        extra: anything made of tensors. Collectives of several NN workers average gradients only, so terms of it are
            of this NN worker's local batch.
    """

    logits: torch.Tensor
    extra: Any
