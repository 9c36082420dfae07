"""Expands and pools distinct rows into the input of the model, on the NN worker's device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias, cast

import torch

from persia import batching
from persia.schema import Pooling, Schema
from persia.types import Int64Array, Inverse

__all__ = ["Embeddings", "Expander", "SequenceEmbedding", "expand_with_torch", "pool_bags", "sequence_of"]


class SequenceEmbedding(NamedTuple):
    """An un-pooled feature.

    Attributes:
        values: `[batch, max_length, dim]`, zero where `mask` is False.
        mask: bool `[batch, max_length]`, True where there is an id.
    """

    values: torch.Tensor
    mask: torch.Tensor


Embeddings: TypeAlias = Mapping[str, torch.Tensor | SequenceEmbedding]
"""By feature name: `[batch, dim]` if pooled, else a SequenceEmbedding."""


class Expander:
    """Expands and pools all features of a batch, differentiable with respect to the unique rows.

    Args:
        schema: features and their pooling.
        device: on the CPU the native path runs, elsewhere torch operations.
        threads: of the native path.
    """

    def __init__(self, schema: Schema, device: torch.device, threads: int | None = None) -> None:
        self.on_host = device.type == "cpu"
        self._features = {
            f.name: (f.table_name, cast("Pooling | None", f.pooling), f.max_length) for f in schema.id_features
        }
        self._tables = {name: number for number, name in enumerate(schema.resolved_tables())}
        self._pool = batching.ThreadPool(threads or torch.get_num_threads())
        self._scratch = batching.Scratch()

    def __call__(
        self,
        rows: Mapping[str, torch.Tensor],
        inverse: Mapping[str, Inverse] | Mapping[str, torch.Tensor],
        offsets: Mapping[str, Int64Array | None] | Mapping[str, torch.Tensor | None],
    ) -> dict[str, torch.Tensor | SequenceEmbedding]:
        """Returns by feature `[batch, dim]`, or a SequenceEmbedding if it is not pooled.

        Args:
            rows: by table, `[unique, dim]`.
            inverse: by feature; arrays when `on_host`, else tensors.
            offsets: by feature, likewise.
        """
        if not self.on_host:
            return expand_with_torch(
                self._features,
                rows,
                cast("Mapping[str, torch.Tensor]", inverse),
                cast("Mapping[str, torch.Tensor | None]", offsets),
            )
        plans = [
            batching.FeaturePlan(
                self._tables[table],
                cast("Inverse", inverse[name]),
                cast("Int64Array | None", offsets[name]),
                pooling,
                max_length if pooling is None else None,
            )
            for name, (table, pooling, max_length) in self._features.items()
        ]
        outputs = iter(_NativePool.apply(self._pool, self._scratch, plans, *(rows[table] for table in self._tables)))  # type: ignore[no-untyped-call]
        result: dict[str, torch.Tensor | SequenceEmbedding] = {}
        for name, (_, pooling, _) in self._features.items():
            result[name] = next(outputs) if pooling is not None else SequenceEmbedding(next(outputs), next(outputs))
        return result


class _NativePool(torch.autograd.Function):
    """Pooling and its backward in the native core: one node for all features of a batch."""

    @staticmethod
    def forward(
        ctx: Any,
        pool: batching.ThreadPool,
        scratch: batching.Scratch,
        plans: list[batching.FeaturePlan],
        *rows: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        shapes = [
            (plan.batch, rows[plan.table].shape[1])
            if plan.pooling is not None
            else (plan.batch, plan.max_length or 0, rows[plan.table].shape[1])
            for plan in plans
        ]
        pooled = batching.pool_forward([r.numpy() for r in rows], plans, pool, batching.borrow(shapes, scratch))
        outputs: list[torch.Tensor] = []
        masks: list[torch.Tensor] = []
        for values, mask in zip(pooled.values, pooled.masks, strict=True):
            outputs.append(torch.from_numpy(values))
            if mask is not None:
                masks.append(torch.from_numpy(mask))
                outputs.append(masks[-1])
        ctx.mark_non_differentiable(*masks)
        ctx.set_materialize_grads(False)
        ctx.pool, ctx.scratch, ctx.plans, ctx.shapes = pool, scratch, plans, [tuple(r.shape) for r in rows]
        return tuple(outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        given = iter(gradients)
        arrays: list[Any] = []
        for plan in ctx.plans:
            gradient = next(given)
            if plan.pooling is None:
                next(given)  # Of the mask.
            arrays.append(None if gradient is None else gradient.numpy())
        # One after another in one storage, as they are to be sent.
        sizes = [count * width for count, width in ctx.shapes]
        whole = torch.from_numpy(ctx.scratch.floats(sum(sizes)))
        sums = [part.view(shape) for part, shape in zip(whole.split(sizes), ctx.shapes, strict=True)]
        out = [part.numpy() for part in sums]
        batching.pool_backward(ctx.shapes, ctx.plans, arrays, ctx.pool, ctx.scratch, out)
        used = {plan.table for plan, array in zip(ctx.plans, arrays, strict=True) if array is not None}
        return None, None, None, *(part if i in used else None for i, part in enumerate(sums))


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
) -> dict[str, torch.Tensor | SequenceEmbedding]:
    """Pools all features with torch operations: the path of a GPU, and the readable twin of the native path.

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
