"""Feed-forward network on concatenated embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from persia.errors import ConfigError
from persia.nn.models.layers import feature_dims, feature_pairs, mlp, output_count, pooled
from persia.nn.pooling import Embeddings
from persia.schema import Schema

__all__ = ["FFNN"]


class FFNN(nn.Module):
    """A multi-layer perceptron on all embeddings and the dense features side by side (Persia, arXiv 2111.05897).

    Un-pooled sequences enter as the mean over their ids.

    Args:
        schema: the input; names features, dimensions, labels.
        hidden: widths of the hidden layers.
        products: pairs of ID-type features of one dimension whose element-wise product is an input too.
        batch_norm: normalises each hidden layer before its ReLU.
        dropout: share of each hidden layer that is dropped in training.
        outputs: logits per sample; `Schema.outputs` by default.

    Raises:
        ConfigError: no ID-type feature, a product of unknown features or of different dimensions, a bad width.
    """

    def __init__(
        self,
        schema: Schema,
        *,
        hidden: Sequence[int] = (256, 128),
        products: Sequence[tuple[str, str]] = (),
        batch_norm: bool = False,
        dropout: float = 0.0,
        outputs: int | None = None,
    ) -> None:
        super().__init__()
        dims = feature_dims(schema)
        self.products = feature_pairs("products", products)
        for left, right in self.products:
            for name in (left, right):
                schema.feature(name)
            if dims[left] != dims[right]:
                raise ConfigError(
                    f"The product of {left!r} (dim {dims[left]}) and {right!r} (dim {dims[right]}) needs equal dims.",
                    field="products",
                )
        self.features = tuple(dims)
        inputs = sum(dims.values()) + sum(dims[left] for left, _ in self.products) + schema.dense_width
        self.mlp = mlp(inputs, hidden, output_count(schema, outputs), batch_norm=batch_norm, dropout=dropout)

    @classmethod
    def paper(cls, schema: Schema, **options: Any) -> FFNN:
        """Builds the network of the Persia paper, section 6: hidden layers of 4096, 2048, 1024, 512 and 256."""
        return cls(schema, hidden=(4096, 2048, 1024, 512, 256), **options)

    def forward(self, dense: Tensor, embeddings: Embeddings) -> Tensor:
        """Returns logits `[batch, outputs]` from dense features `[batch, n]` and embeddings."""
        features = {name: pooled(embeddings[name]) for name in self.features}
        products = [features[left] * features[right] for left, right in self.products]
        logits: Tensor = self.mlp(torch.cat([*features.values(), *products, dense], 1))
        return logits
