"""DCN-V2: explicit feature crosses of bounded degree, then a perceptron."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from persia.checks import check_integer, plain
from persia.nn.models.layers import feature_dims, mlp, output_count, pooled
from persia.nn.pooling import Embeddings
from persia.schema import Schema

__all__ = ["DCNv2"]


class DCNv2(nn.Module):
    """Deep & cross network, version 2, stacked (Wang et al., WWW 2021, arXiv 2008.13535).

    Cross layer: x' = x0 * (W x + b) + x, on all embeddings and dense features x0 side by side; then a deep network.
    Un-pooled sequences enter as the mean over their ids.

    Args:
        schema: the input; names features, dimensions, labels.
        hidden: widths of the deep network's hidden layers.
        cross_layers: number of cross layers; the degree of the crosses is one more.
        low_rank: W = U V with this many rows in V (paper: a quarter of the width loses little); None: full rank.
        dropout: share of each hidden layer that is dropped in training.
        outputs: logits per sample; `Schema.outputs` by default.

    Raises:
        ConfigError: no ID-type feature, a bad width, rank or number of layers.
    """

    def __init__(
        self,
        schema: Schema,
        *,
        hidden: Sequence[int] = (256, 128),
        cross_layers: int = 3,
        low_rank: int | None = None,
        dropout: float = 0.0,
        outputs: int | None = None,
    ) -> None:
        super().__init__()
        dims = feature_dims(schema)
        self.features = tuple(dims)
        width = sum(dims.values()) + schema.dense_width
        cross_layers, low_rank = plain(cross_layers), plain(low_rank)
        check_integer("cross_layers", cross_layers, 0)
        if low_rank is not None:
            check_integer("low_rank", low_rank, 1, width)
        self.cross = nn.ModuleList(
            nn.Linear(width, width)
            if low_rank is None
            else nn.Sequential(nn.Linear(width, low_rank, bias=False), nn.Linear(low_rank, width))
            for _ in range(cross_layers)
        )
        self.deep = mlp(width, hidden, output_count(schema, outputs), dropout=dropout)

    def forward(self, dense: Tensor, embeddings: Embeddings) -> Tensor:
        """Returns logits `[batch, outputs]` from dense features `[batch, n]` and embeddings."""
        x0 = torch.cat([*(pooled(embeddings[name]) for name in self.features), dense], 1)
        x = x0
        for layer in self.cross:
            x = torch.addcmul(x, x0, layer(x).to(x0.dtype))
        logits: Tensor = self.deep(x)
        return logits
