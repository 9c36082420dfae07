"""Pools rows feature by feature, by torch operations: the readable twin of the native path and of `PooledTogether`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from persia.schema import Pooling

__all__ = ["SequenceEmbedding", "expand_with_torch", "pool_bags", "sequence_of"]


class SequenceEmbedding(NamedTuple):
    """An un-pooled feature.

    Attributes:
        values: `[batch, max_length, dim]`, zero where `mask` is False.
        mask: bool `[batch, max_length]`, True where there is an id.
    """

    values: torch.Tensor
    mask: torch.Tensor


def pool_bags(
    rows: torch.Tensor,
    inverse: torch.Tensor,
    offsets: torch.Tensor | None,
    pooling: Pooling,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Pools the rows of each sample's ids.

    Args:
        rows: `[unique, dim]`.
        inverse: integer `[n]`.
        offsets: int64 `[batch + 1]`, or None where each sample has one id.
        pooling: "sum", "mean" or "sqrtn" (sum / sqrt(count)).
        weights: float32 `[n]`, see `batching.FeaturePlan`; None for 1.

    Returns:
        `[batch, dim]`; zeros for a sample without ids.
    """
    index = inverse.to(torch.int64)
    if weights is not None and len(index):
        return _pool_weighted(rows, index, offsets, pooling, weights)
    if offsets is None:
        return rows.index_select(0, index)
    mode = "mean" if pooling == "mean" else "sum"
    pooled = torch.nn.functional.embedding_bag(index, rows, offsets, mode=mode, include_last_offset=True)
    if pooling == "sqrtn":
        counts = offsets.diff().clamp(min=1).to(rows.dtype)
        pooled = pooled * counts.rsqrt().unsqueeze(1)
    return pooled


def _pool_weighted(
    rows: torch.Tensor, index: torch.Tensor, offsets: torch.Tensor | None, pooling: Pooling, weights: torch.Tensor
) -> torch.Tensor:
    """Pools weighted rows. No shape depends on data, so that a device need not be waited for."""
    bags = torch.nn.functional.embedding_bag
    if offsets is None:
        pooled = rows.index_select(0, index) * weights.unsqueeze(1)
    else:
        pooled = bags(index, rows, offsets, mode="sum", per_sample_weights=weights, include_last_offset=True)
    if pooling == "sum":
        return pooled
    powers = weights.double() if pooling == "mean" else weights.double().square()
    sums = powers
    if offsets is not None:
        places = torch.arange(len(index), device=index.device)
        sums = bags(places, powers.unsqueeze(1), offsets, mode="sum", include_last_offset=True).squeeze(1)
    divisors = (sums if pooling == "mean" else sums.sqrt()).to(rows.dtype)
    return pooled / torch.where(divisors == 0, torch.inf, divisors).unsqueeze(1)


def sequence_of(
    rows: torch.Tensor, inverse: torch.Tensor, offsets: torch.Tensor | None, max_length: int
) -> SequenceEmbedding:
    """Returns the first `max_length` rows of each sample, padded with zeros.

    Returns:
        values `[batch, max_length, dim]` and mask bool `[batch, max_length]`.
    """
    index = inverse.to(torch.int64)
    if offsets is None:
        offsets = torch.arange(len(index) + 1, device=rows.device)
    position = torch.arange(max_length, device=rows.device)
    mask = position < offsets.diff().unsqueeze(1)
    if not len(index):
        return SequenceEmbedding(rows.new_zeros(len(mask), max_length, rows.shape[1]), mask)
    # Padding reads row 0 of the sequence buffer and is zeroed: no data-dependent shape, so no device sync.
    where = torch.where(mask, offsets[:-1].unsqueeze(1) + position, 0)
    values = rows.index_select(0, index[where.reshape(-1)]).reshape(*where.shape, rows.shape[1])
    return SequenceEmbedding(values * mask.unsqueeze(2), mask)


def expand_with_torch(
    features: Mapping[str, tuple[str, Pooling | None, int | None]],
    rows: Mapping[str, torch.Tensor],
    inverse: Mapping[str, torch.Tensor],
    offsets: Mapping[str, torch.Tensor | None],
    weights: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor | SequenceEmbedding]:
    """Pools all features one by one.

    Args:
        features: by name: table, pooling, max_length.
        rows: by table.
        inverse: by feature.
        offsets: by feature.
        weights: by feature with weights.
    """
    pooled: dict[str, torch.Tensor | SequenceEmbedding] = {}
    for name, (table, pooling, max_length) in features.items():
        if pooling is None:
            assert max_length is not None
            pooled[name] = sequence_of(rows[table], inverse[name], offsets[name], max_length)
        else:
            pooled[name] = pool_bags(rows[table], inverse[name], offsets[name], pooling, weights.get(name))
    return pooled
