"""Parts that the networks share: reading the schema, pooling sequences, the multi-layer perceptron."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from persia.checks import check_integer, check_number, plain
from persia.errors import ConfigError
from persia.nn.pooling import Embeddings, SequenceEmbedding
from persia.schema import Schema

__all__ = ["SameDim", "feature_dims", "mlp", "output_count", "pooled"]


def feature_dims(schema: Schema) -> dict[str, int]:
    """Returns the dimension of each ID-type feature, in the order of the schema.

    Raises:
        ConfigError: there is no ID-type feature.
    """
    if not schema.id_features:
        raise ConfigError("The schema has no ID-type feature; this model needs at least one.", field="id_features")
    tables = schema.resolved_tables()
    return {feature.name: tables[feature.table_name].dim for feature in schema.id_features}


def output_count(schema: Schema, outputs: int | None) -> int:
    """Returns the number of logits per sample: `outputs`, or one for each label.

    Raises:
        ConfigError: there is none.
    """
    count = len(schema.labels) if outputs is None else outputs
    if count < 1:
        raise ConfigError(
            f"A model needs at least one output, but has {count}; pass `outputs`, or declare labels.", field="outputs"
        )
    return count


def pooled(embedding: Tensor | SequenceEmbedding) -> Tensor:
    """Returns `[batch, dim]`: the embedding itself, or the mean of a sequence over its ids (zero without ids)."""
    if isinstance(embedding, Tensor):
        return embedding
    weights = embedding.mask.to(embedding.values.dtype)
    weights = weights / weights.sum(1, keepdim=True).clamp(min=1)
    return torch.bmm(weights.unsqueeze(1), embedding.values).squeeze(1)


def mlp(
    inputs: int, hidden: Sequence[int], outputs: int | None, *, batch_norm: bool = False, dropout: float = 0.0
) -> nn.Sequential:
    """Returns linear layers of these widths, each with ReLU, BatchNorm, dropout as asked; then one to `outputs`.

    Raises:
        ConfigError: a width is not a positive whole number, or `dropout` not in [0, 1).
    """
    dropout = plain(dropout)
    check_number("dropout", dropout, 0, 1, open_high=True)
    layers: list[nn.Module] = []
    for width in map(plain, hidden):
        check_integer("width of a hidden layer", width, 1, field="hidden")
        layers.append(nn.Linear(inputs, width, bias=not batch_norm))
        if batch_norm:
            layers.append(nn.BatchNorm1d(width))
        layers.append(nn.ReLU(inplace=True))
        if dropout:
            layers.append(nn.Dropout(dropout))
        inputs = width
    if outputs is not None:
        layers.append(nn.Linear(inputs, outputs))
    return nn.Sequential(*layers)


class SameDim(nn.Module):
    """Projects all features to one dimension, those of another dimension by a linear layer without bias.

    Args:
        dims: dimension of each feature.
        dim: the common one; by default the most frequent, of equally frequent ones the largest.
    """

    def __init__(self, dims: dict[str, int], dim: int | None = None) -> None:
        super().__init__()
        self.names = tuple(dims)
        sizes = list(dims.values())
        self.dim = dim if dim is not None else max(sizes, key=lambda size: (sizes.count(size), size))
        if self.dim < 1:
            raise ConfigError(f"Invalid dim = {dim!r}; expected a whole number >= 1.", field="dim")
        self.indices = {name: i for i, (name, size) in enumerate(dims.items()) if size != self.dim}
        self.projections = nn.ModuleList(nn.Linear(dims[name], self.dim, bias=False) for name in self.indices)

    def forward(self, embeddings: Embeddings) -> list[Tensor]:
        """Returns the features, `[batch, dim]` each."""
        features = [pooled(embeddings[name]) for name in self.names]
        for index, projection in zip(self.indices.values(), self.projections, strict=True):
            features[index] = projection(features[index])
        return features
