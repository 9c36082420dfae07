"""Parts that the networks share: reading the schema, pooling sequences, the multi-layer perceptron."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from persia.checks import check_flag, check_integer, check_kind, check_number, plain
from persia.errors import ConfigError
from persia.nn.pooling import Embeddings, SequenceEmbedding
from persia.schema import Schema

__all__ = [
    "SameDim",
    "feature_dims",
    "feature_names",
    "feature_pairs",
    "layer_widths",
    "mlp",
    "output_count",
    "pooled",
    "same_rows",
]

HASH_FACTOR = -7046029254386353131
"""2^64 over the golden ratio, as a signed integer: its powers mix bits well."""


def feature_dims(schema: Schema) -> dict[str, int]:
    """Returns the dimension of each ID-type feature, in the order of the schema.

    Raises:
        ConfigError: there is no ID-type feature, or `schema` is no schema.
    """
    check_kind("schema", schema, Schema, "a persia.Schema")
    if not schema.id_features:
        raise ConfigError("The schema has no ID-type feature; this model needs at least one.", field="id_features")
    tables = schema.resolved_tables()
    return {feature.name: tables[feature.table_name].dim for feature in schema.id_features}


def feature_names(option: str, value: Any) -> tuple[str, ...]:
    """Returns the names of features in an option of a model.

    Raises:
        ConfigError: it is no list of names. A single one would be read letter by letter.
    """
    if isinstance(value, Iterable) and not isinstance(value, str):
        names = tuple(value)
        if all(isinstance(name, str) for name in names):
            return names
    raise ConfigError(
        f'Invalid {option} = {value!r}; expected a list of names of features, such as ["item"].', field=option
    )


def feature_pairs(option: str, value: Any) -> tuple[tuple[str, str], ...]:
    """Returns the pairs of names of features in an option of a model.

    Raises:
        ConfigError: it is no list of such pairs.
    """
    if isinstance(value, Iterable) and not isinstance(value, str):
        pairs = list(value)
        if all(isinstance(pair, (tuple, list)) and [type(name) for name in pair] == [str, str] for pair in pairs):
            return tuple((first, second) for first, second in pairs)
    raise ConfigError(
        f'Invalid {option} = {value!r}; expected a list of pairs of features, such as [("history", "item")].',
        field=option,
    )


def layer_widths(option: str, value: Any) -> tuple[int, ...]:
    """Returns the widths of layers in an option of a model.

    Raises:
        ConfigError: it is no list of whole numbers from 1 on.
    """
    if not isinstance(value, Iterable):
        raise ConfigError(f"Invalid {option} = {value!r}; expected a list of widths, such as (256, 128).", field=option)
    widths = tuple(map(plain, value))
    for width in widths:
        check_integer(f"width in {option}", width, 1, field=option)
    return widths


def output_count(schema: Schema, outputs: int | None) -> int:
    """Returns the number of logits per sample: `outputs`, or `Schema.outputs`.

    Raises:
        ConfigError: there is none, or `outputs` is no whole number.
    """
    if outputs is not None:
        outputs = plain(outputs)
        check_integer("outputs", outputs, 1)
        return outputs
    if not schema.label_names:
        raise ConfigError(
            "A model needs at least one output, but the schema has no label; pass `outputs`, or declare labels.",
            field="outputs",
        )
    return schema.outputs


def pooled(embedding: Tensor | SequenceEmbedding) -> Tensor:
    """Returns `[batch, dim]`: the embedding itself, or the mean of a sequence over its ids (zero without ids)."""
    if isinstance(embedding, Tensor):
        return embedding
    weights = embedding.mask.to(embedding.values.dtype)
    weights = weights / weights.sum(1, keepdim=True).clamp(min=1)
    return torch.bmm(weights.unsqueeze(1), embedding.values).squeeze(1)


def same_rows(rows: Tensor, others: Tensor) -> Tensor:
    """Returns which rows are equal and not all zero, as rows of ids without a row are, bool `[..., n]`.

    Compares hashes of 64 bits: `torch.unique` makes the host wait for the device, and is slower. Rows stand for ids if
    tables have a random initializer: rows of zeros are of any id that has none yet, and equal first rows of several ids
    would be taken for one.

    Args:
        rows: `[..., width]`.
        others: `[n, width]`.
    """
    of_others = _hashes(others)
    # The hash of zeros is 0, as hardly any other: in its place is a number that zeros do not have.
    return _hashes(rows).unsqueeze(-1) == of_others.masked_fill(of_others == 0, -1)


def _hashes(rows: Tensor) -> Tensor:
    bits = (rows.float() + 0.0).view(torch.int32).long()  # The sum turns -0.0 into 0.0.
    factors = torch.full((bits.shape[-1],), HASH_FACTOR, device=bits.device).cumprod(0)
    return (bits * factors).sum(-1)


def mlp(
    inputs: int,
    hidden: Sequence[int],
    outputs: int | None,
    *,
    batch_norm: bool = False,
    dropout: float = 0.0,
    option: str = "hidden",
) -> nn.Sequential:
    """Returns linear layers, each with BatchNorm if asked, ReLU and dropout; then a linear layer to `outputs`, if any.

    Args:
        inputs: width of the input.
        hidden: widths of the layers.
        outputs: width of the last layer; None for none.
        batch_norm: normalises each layer before its ReLU.
        dropout: share of each layer that is dropped in training.
        option: name of `hidden` among the options of the model, for errors.

    Raises:
        ConfigError: a width is not a positive whole number, or `dropout` not in [0, 1).
    """
    dropout = plain(dropout)
    check_number("dropout", dropout, 0, 1, open_high=True)
    check_flag("batch_norm", batch_norm)
    layers: list[nn.Module] = []
    for width in layer_widths(option, hidden):
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
    """Projects all features to one dimension, features of another dimension by a linear layer without bias.

    Args:
        dims: dimension of each feature.
        dim: the common one; by default the most frequent, of equally frequent ones the largest.

    Raises:
        ConfigError: `dim` is no whole number from 1 on.
    """

    def __init__(self, dims: dict[str, int], dim: int | None = None) -> None:
        super().__init__()
        self.names = tuple(dims)
        sizes = list(dims.values())
        self.dim = max(sizes, key=lambda size: (sizes.count(size), size)) if dim is None else plain(dim)
        check_integer("dim", self.dim, 1)
        self.indices = {name: i for i, (name, size) in enumerate(dims.items()) if size != self.dim}
        self.projections = nn.ModuleList(nn.Linear(dims[name], self.dim, bias=False) for name in self.indices)

    def forward(self, embeddings: Embeddings) -> list[Tensor]:
        """Returns the features, `[batch, dim]` each."""
        features = [pooled(embeddings[name]) for name in self.names]
        for index, projection in zip(self.indices.values(), self.projections, strict=True):
            features[index] = projection(features[index])
        return features
