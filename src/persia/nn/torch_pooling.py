"""Pools rows by torch operations: the path of a GPU, and the readable twin of the native path."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from persia.nn.joined_tensors import joined, of_one_width
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


class _RowsOfSamples(torch.autograd.Function):
    """The rows at places `[features, batch]` of all tables, one behind the other, which have one width.

    As in the native path, a table none of whose features has a gradient gets none.
    """

    @staticmethod
    def forward(
        ctx: Any, places: torch.Tensor, of_features: list[int], *rows: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(places)
        ctx.of_features, ctx.counts = of_features, [len(part) for part in rows]
        ctx.set_materialize_grads(False)
        values = torch.cat(rows).index_select(0, places.view(-1))
        return tuple(torch.unsafe_split(values, places.shape[1]))  # Not views: a model may change them in place.

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        given = {number: gradient for number, gradient in enumerate(gradients) if gradient is not None}
        if not given:
            return (None,) * (2 + len(ctx.counts))
        if len(given) < len(gradients):
            places = torch.stack([places[number] for number in given])
        joint = torch.cat(list(given.values()))
        sums = joint.new_zeros(sum(ctx.counts), joint.shape[1]).index_add_(0, places.view(-1), joint)
        used = {ctx.of_features[number] for number in given}
        parts = sums.split(ctx.counts)  # One behind the other in one storage, as they are to be sent.
        return None, None, *(part if number in used else None for number, part in enumerate(parts))


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
    """Pools all features with torch operations: the path of a GPU, and the readable twin of the native path.

    Args:
        features: by name: table, pooling, max_length.
        rows: by table.
        inverse: by feature.
        offsets: by feature.
        weights: by feature with weights.
    """
    pooled: dict[str, torch.Tensor | SequenceEmbedding] = {}
    single: dict[str, str] = {}
    for name, (table, pooling, max_length) in features.items():
        if pooling is None:
            assert max_length is not None
            pooled[name] = sequence_of(rows[table], inverse[name], offsets[name], max_length)
        elif offsets[name] is None and len(inverse[name]) and name not in weights:
            single[name] = table
        else:
            pooled[name] = pool_bags(rows[table], inverse[name], offsets[name], pooling, weights.get(name))
    # Rows without gradients are apart, so that none is computed for them.
    for trained in (True, False):
        alike = {name: rows[table] for name, table in single.items() if rows[table].requires_grad is trained}
        for names in of_one_width(alike):
            pooled.update(rows_of_samples({name: single[name] for name in names}, rows, inverse))
    return {name: pooled[name] for name in features}


def rows_of_samples(
    features: Mapping[str, str], rows: Mapping[str, torch.Tensor], inverse: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Returns the row of each sample's id by feature, `[batch, dim]`: a few kernels for any number of features.

    Args:
        features: their tables, by name. Samples have one id in each; the rows of all tables have one width.
        rows: by table, `[unique, dim]`.
        inverse: by feature, integer `[batch]`.
    """
    names = sorted(features, key=lambda name: inverse[name].element_size())
    if len(names) == 1:
        return {name: pool_bags(rows[table], inverse[name], None, "sum") for name, table in features.items()}
    tables = list(dict.fromkeys(features.values()))
    first = dict(zip(tables, itertools.accumulate((len(rows[table]) for table in tables), initial=0), strict=False))
    of_sizes = itertools.groupby((inverse[name] for name in names), torch.Tensor.element_size)
    places = torch.cat([joined(list(group)).to(torch.int64) for _, group in of_sizes]).view(len(names), -1)
    starts = torch.tensor([[first[features[name]]] for name in names], pin_memory=places.is_cuda)
    places = places + starts.to(places.device, non_blocking=True)
    of_features = [tables.index(features[name]) for name in names]
    values = _RowsOfSamples.apply(places, of_features, *(rows[table] for table in tables))  # type: ignore[no-untyped-call]
    return dict(zip(names, values, strict=True))
