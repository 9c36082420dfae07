"""The ranking network of YouTube's recommender."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from persia.nn.models.layers import feature_dims, mlp, output_count, pooled
from persia.nn.pooling import Embeddings
from persia.schema import Schema

__all__ = ["YouTubeDNN"]

MAX_SQUARE = 2.0**15
"""Largest square of a dense feature: half of the largest number in float16, to leave space for the sum of a layer."""


class YouTubeDNN(nn.Module):
    """The ranking network for YouTube recommendations (Covington, Adams, Sargin, RecSys 2016, section 4).

    A perceptron on embeddings, on the mean of each sequence, and on three powers of each dense feature: x, its square
    A perceptron on embeddings, on the mean of each sequence, and on three powers of each dense feature: x, its square
    and its square root (with the sign of x), for super- and sub-linear functions of it. The paper scales dense features
    to [0, 1] by their distribution, which is left to the reader; squares above 32,768 count as that, so that they fit
    into float16. The paper weighs clicks by watch time; for that, give a class derived from this one a `loss`.

    Args:
        schema: the input; names features, dimensions, labels.
        hidden: widths of the hidden layers; the paper's largest network has 1024, 512, 256.
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
        dropout: float = 0.0,
        outputs: int | None = None,
    ) -> None:
        super().__init__()
        dims = feature_dims(schema)
        self.features = tuple(dims)
        inputs = sum(dims.values()) + 3 * schema.dense_width
        self.mlp = mlp(inputs, hidden, output_count(schema, outputs), dropout=dropout)

    def forward(self, dense: Tensor, embeddings: Embeddings) -> Tensor:
        """Returns logits `[batch, outputs]` from dense features `[batch, n]` and embeddings."""
        powers = [dense, dense.square().clamp(max=MAX_SQUARE), dense.sign() * dense.abs().sqrt()]
        logits: Tensor = self.mlp(torch.cat([*(pooled(embeddings[name]) for name in self.features), *powers], 1))
        return logits
