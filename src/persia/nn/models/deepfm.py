"""DeepFM: a factorization machine and a deep network on the same embeddings."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from persia.nn.models.layers import SameDim, feature_dims, mlp, output_count
from persia.nn.pooling import Embeddings
from persia.schema import Schema

__all__ = ["DeepFM"]


class DeepFM(nn.Module):
    """Sum of first-order terms, pairwise interactions and a deep network (Guo et al., IJCAI 2017, arXiv 1703.04247).

    The paper gives each id its own weight besides its embedding. Here the first-order terms are a linear layer on
    the embeddings and dense features, so that one lookup serves all three parts. The pairwise term, the sum of the dot
    products of all pairs of ID-type features, is common to all labels. Un-pooled sequences enter as the mean over
    their ids.

    Args:
        schema: the input; names features, dimensions, labels.
        hidden: widths of the deep network's hidden layers.
        dim: common dimension of the interactions, by default the most frequent one; other features are projected.
        dropout: share of each hidden layer that is dropped in training.
        outputs: logits per sample; `Schema.outputs` by default.

    Raises:
        ConfigError: no ID-type feature, or a bad width.
    """

    def __init__(
        self,
        schema: Schema,
        *,
        hidden: Sequence[int] = (256, 128),
        dim: int | None = None,
        dropout: float = 0.0,
        outputs: int | None = None,
    ) -> None:
        super().__init__()
        self.same_dim = SameDim(feature_dims(schema), dim)
        inputs = len(self.same_dim.names) * self.same_dim.dim + schema.dense_width
        count = output_count(schema, outputs)
        self.first_order = nn.Linear(inputs, count)
        self.deep = mlp(inputs, hidden, count, dropout=dropout)

    def forward(self, dense: Tensor, embeddings: Embeddings) -> Tensor:
        """Returns logits `[batch, outputs]` from dense features `[batch, n]` and embeddings."""
        features = torch.cat(self.same_dim(embeddings), 1)
        total = features.view(-1, len(self.same_dim.names), self.same_dim.dim).sum(1)
        pairs = 0.5 * (total.square().sum(1, keepdim=True) - features.square().sum(1, keepdim=True))
        inputs = torch.cat([features, dense], 1)
        logits: Tensor = self.deep(inputs) + self.first_order(inputs) + pairs
        return logits
