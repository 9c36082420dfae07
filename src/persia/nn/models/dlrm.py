"""DLRM: dot products of all pairs of features, between two perceptrons."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from persia.errors import ConfigError
from persia.nn.models.layers import SameDim, feature_dims, layer_widths, mlp, output_count
from persia.nn.pooling import Embeddings
from persia.schema import Schema

__all__ = ["DLRM"]


class DLRM(nn.Module):
    """Deep learning recommendation model (Naumov et al., 2019, arXiv 1906.00091).

    A bottom network turns the dense features into one more vector of the embeddings' dimension; the dot products of
    all pairs of vectors and that vector itself enter the top network. Without dense features there is no bottom
    network. Un-pooled sequences enter as the mean over their ids.

    Args:
        schema: the input; names features, dimensions, labels.
        hidden: widths of the top network's hidden layers.
        bottom: widths of the bottom network's hidden layers.
        dim: common dimension of the vectors, by default the most frequent one; other features are projected.
        outputs: logits per sample; `Schema.outputs` by default.

    Raises:
        ConfigError: no ID-type feature, no pair (a single one and no dense features), or a bad width.
    """

    lower: Tensor

    def __init__(
        self,
        schema: Schema,
        *,
        hidden: Sequence[int] = (256, 128),
        bottom: Sequence[int] = (128,),
        dim: int | None = None,
        outputs: int | None = None,
    ) -> None:
        super().__init__()
        self.same_dim = SameDim(feature_dims(schema), dim)
        dense = schema.dense_width
        self.bottom = mlp(dense, [*layer_widths("bottom", bottom), self.same_dim.dim], None) if dense else None
        vectors = len(self.same_dim.names) + bool(dense)
        if vectors < 2:
            raise ConfigError("DLRM needs two ID-type features, or one and dense features.", field="id_features")
        row, column = torch.tril_indices(vectors, vectors, -1)
        self.register_buffer("lower", row * vectors + column, persistent=False)
        inputs = len(row) + (self.same_dim.dim if dense else 0)
        self.top = mlp(inputs, hidden, output_count(schema, outputs))

    def forward(self, dense: Tensor, embeddings: Embeddings) -> Tensor:
        """Returns logits `[batch, outputs]` from dense features `[batch, n]` and embeddings."""
        vectors = self.same_dim(embeddings)
        first = [] if self.bottom is None else [self.bottom(dense)]
        stacked = torch.stack([v.to(vectors[0].dtype) for v in (*first, *vectors)], 1)
        dots = torch.bmm(stacked, stacked.transpose(1, 2)).flatten(1).index_select(1, self.lower)
        logits: Tensor = self.top(torch.cat([*first, dots], 1))
        return logits
