"""What a model gets for an ID-type feature."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

import torch

__all__ = ["Embeddings", "SequenceEmbedding"]


class SequenceEmbedding(NamedTuple):
    """An un-pooled feature.

    Attributes:
        values: `[batch, max_length, dim]`, zero where `mask` is False.
        mask: bool `[batch, max_length]`, True where there is an id.
    """

    values: torch.Tensor
    mask: torch.Tensor


Embeddings: TypeAlias = Mapping[str, torch.Tensor | SequenceEmbedding]
"""By feature name: `[batch, dim]` where pooled, else a SequenceEmbedding."""
