"""From unique rows to what the model reads: expansion and pooling on the NN worker's own device."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from persia.nn.types import SequenceEmbedding
from persia.schema import Pooling

__all__ = ["expand_with_torch", "pool_bags", "sequence_of"]


def pool_bags(
    rows: torch.Tensor, inverse: torch.Tensor, offsets: torch.Tensor | None, pooling: Pooling
) -> torch.Tensor:
    """Pools the rows of each sample's ids.

    Args:
        rows: `[unique, dim]`.
        inverse: integer `[n]`.
        offsets: int64 `[batch + 1]`, or None where each sample has one id.
        pooling: "sum", "mean" or "sqrtn" (sum / sqrt(count)).

    Returns:
        `[batch, dim]`; zeros for a sample without ids.
    """
    index = inverse.to(torch.int64)
    if offsets is None:
        return rows.index_select(0, index)
    mode = "mean" if pooling == "mean" else "sum"
    pooled = torch.nn.functional.embedding_bag(index, rows, offsets, mode=mode, include_last_offset=True)
    if pooling == "sqrtn":
        counts = offsets.diff().clamp(min=1).to(rows.dtype)
        pooled = pooled * counts.rsqrt().unsqueeze(1)
    return pooled


def sequence_of(
    rows: torch.Tensor, inverse: torch.Tensor, offsets: torch.Tensor | None, max_length: int
) -> SequenceEmbedding:
    """The first `max_length` rows of each sample, padded with zeros.

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
) -> dict[str, torch.Tensor | SequenceEmbedding]:
    """All features, by torch operations: what runs on a GPU, and the readable twin of the native path.

    Args:
        features: by name: table, pooling, max_length.
        rows: by table.
        inverse: by feature.
        offsets: by feature.
    """
    result: dict[str, torch.Tensor | SequenceEmbedding] = {}
    for name, (table, pooling, max_length) in features.items():
        if pooling is None:
            assert max_length is not None
            result[name] = sequence_of(rows[table], inverse[name], offsets[name], max_length)
        else:
            result[name] = pool_bags(rows[table], inverse[name], offsets[name], pooling)
    return result
