"""Expands and pools distinct rows into the input of the model, on the NN worker's device."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import torch

from persia import batching
from persia.errors import PersiaError
from persia.nn.joined_tensors import joined, of_one_width
from persia.schema import Pooling, Schema
from persia.types import Floats, Int64Array, Inverse, Packed

__all__ = [
    "Embeddings",
    "Expander",
    "PooledAhead",
    "SequenceEmbedding",
    "expand_with_torch",
    "pool_bags",
    "sequence_of",
]


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


MOST_AHEAD = 256 << 20
"""Most bytes of pooled features that wait for the training thread, and of gradients that wait to be summed.

About: exact if batches are of one size.
"""


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
            offsets: by feature, int64 `[batch + 1]` or None.
        """
        if not self.on_host:
            return expand_with_torch(
                self._features,
                rows,
                cast("Mapping[str, torch.Tensor]", inverse),
                cast("Mapping[str, torch.Tensor | None]", offsets),
            )
        plans, tables = self._plans(inverse, offsets), [rows[table] for table in self._tables]
        return self.by_feature(_NativePool.apply(self, plans, *tables))  # type: ignore[no-untyped-call]

    def pool_one(
        self,
        name: str,
        rows: Mapping[str, torch.Tensor],
        inverse: Mapping[str, Inverse] | Mapping[str, torch.Tensor],
        offsets: Mapping[str, Int64Array | None] | Mapping[str, torch.Tensor | None],
    ) -> None:
        """Pools one feature, waits until that is done, and drops the result: to measure it.

        Args:
            name: of the feature.
            rows: by table, without gradients; see `__call__`, as for the others.
            inverse: by feature.
            offsets: by feature.
        """
        if self.on_host:
            plan = self._plans(inverse, offsets)[list(self._features).index(name)]
            self.pool_rows([plan], [rows[table].numpy() for table in self._tables])
            return
        tensors = cast("Mapping[str, torch.Tensor]", inverse), cast("Mapping[str, torch.Tensor | None]", offsets)
        expand_with_torch({name: self._features[name]}, rows, *tensors)
        torch.cuda.synchronize()

    def ahead(
        self,
        rows: Mapping[str, Floats],
        inverse: Mapping[str, Inverse] | Mapping[str, torch.Tensor],
        offsets: Mapping[str, Int64Array | None] | Mapping[str, torch.Tensor | None],
    ) -> PooledAhead:
        """Returns the features of a batch for a training thread that takes them later. Only `on_host`.

        Args:
            rows: by table, float32 `[unique, dim]`. They must not change while the result is in use.
            inverse: by feature.
            offsets: by feature, or None if each sample has one id.
        """
        return PooledAhead(self, self._plans(inverse, offsets), {table: rows[table] for table in self._tables})

    def pool_rows(self, plans: Sequence[batching.FeaturePlan], rows: Sequence[Floats]) -> batching.Pooled:
        """Returns the values and masks of all features. Thread-safe."""
        shapes = _value_shapes(plans, [part.shape[1] for part in rows])
        return batching.pool_forward(rows, plans, self._pool, batching.borrow(shapes, self._scratch))

    def sum_rows(
        self,
        plans: Sequence[batching.FeaturePlan],
        shapes: Sequence[tuple[int, int]],
        gradients: Sequence[torch.Tensor | None],
    ) -> tuple[Floats, dict[int, Floats]]:
        """Sums the gradients of all features by row. Thread-safe.

        Args:
            plans: of the features.
            shapes: of the rows of each table.
            gradients: of the values of each feature.

        Returns:
            One array for all tables, as it is to be sent, and views into it for those tables that got a gradient.
        """
        arrays = [None if gradient is None else gradient.numpy() for gradient in gradients]
        whole = self._scratch.floats(sum(count * width for count, width in shapes))
        sums: list[Floats] = []
        start = 0
        for count, width in shapes:
            sums.append(whole[start : start + count * width].reshape(count, width))
            start += count * width
        batching.pool_backward(shapes, plans, arrays, self._pool, self._scratch, sums)
        used = {plan.table for plan, array in zip(plans, arrays, strict=True) if array is not None}
        return whole, {table: sums[table] for table in sorted(used)}

    def by_feature(self, outputs: Sequence[torch.Tensor]) -> dict[str, torch.Tensor | SequenceEmbedding]:
        """Names the values of each feature, each with its mask behind if it is not pooled."""
        following = iter(outputs)
        return {
            name: next(following) if pooling is not None else SequenceEmbedding(next(following), next(following))
            for name, (_, pooling, _) in self._features.items()
        }

    def _plans(
        self,
        inverse: Mapping[str, Inverse] | Mapping[str, torch.Tensor],
        offsets: Mapping[str, Int64Array | None] | Mapping[str, torch.Tensor | None],
    ) -> list[batching.FeaturePlan]:
        return [
            batching.FeaturePlan(
                self._tables[table],
                cast("Inverse", inverse[name]),
                cast("Int64Array | None", offsets[name]),
                pooling,
                max_length if pooling is None else None,
            )
            for name, (table, pooling, max_length) in self._features.items()
        ]


class PooledAhead:
    """The features of a batch on the host, with the work for them apart from the network's passes.

    Whoever looks up pools, the training thread takes the features, and whoever pushes sums the gradients of the rows.
    Where other threads do that, neither delays the network. The results are those of `Expander.__call__`, bit for bit.

    Args:
        expander: pools and sums.
        plans: of the features.
        rows: by table, float32 `[unique, dim]`.

    Attributes:
        leaf: gets a gradient of 0 in every backward pass that has reached the features; for hooks.
        nbytes: size of the features, and of their gradients.
    """

    def __init__(self, expander: Expander, plans: list[batching.FeaturePlan], rows: Mapping[str, Floats]) -> None:
        self.leaf = torch.zeros((), requires_grad=True)
        shapes = _value_shapes(plans, [part.shape[1] for part in rows.values()])
        self.nbytes = 4 * sum(math.prod(shape) for shape in shapes)
        self._expander = expander
        self._plans = plans
        self._rows = rows
        self._values: batching.Pooled | None = None
        self._kept: list[_Kept] = []

    def fits(self, waiting: int) -> bool:
        """Returns whether the features of this batch, or their gradients, may wait next to `waiting` other batches."""
        return (waiting + 1) * self.nbytes <= MOST_AHEAD

    def pool(self) -> None:
        """Pools now, in the calling thread. Without it, `embeddings` does."""
        self._values = self._pooled()

    def embeddings(self) -> dict[str, torch.Tensor | SequenceEmbedding]:
        """Returns the features, differentiable. Later calls pool again, as the first result may have been changed."""
        pooled, self._values = self._values or self._pooled(), None
        return self._expander.by_feature(_TakePooled.apply(self.leaf, pooled, self._kept))  # type: ignore[no-untyped-call]

    def gradients(self, of_rows: Mapping[str, Floats], factor: float) -> Callable[[], Packed[np.float32]]:
        """Takes the gradients of the features, and returns a function that sums them by row, times `factor`.

        The function may be called once, by another thread. It returns the tables that took part in the loss.

        Args:
            of_rows: gradients of rows that the loss has used directly, by table; added to the sums.
            factor: what all of them are multiplied by.

        Raises:
            PersiaError: from the function: a gradient was changed in place after the backward pass.
        """
        # The graph keeps `_kept` for as long as the loss lives, and a second backward pass adds to it.
        taken = self._kept.copy()
        self._kept.clear()
        self.leaf.grad = None

        def summed() -> Packed[np.float32]:
            names, shapes = list(self._rows), [(len(rows), rows.shape[1]) for rows in self._rows.values()]
            total = dict(of_rows)
            whole: Floats | None = None
            for kept in taken:  # As many as there were calls of `embeddings`.
                whole, sums = self._expander.sum_rows(self._plans, shapes, kept.gradients)
                kept.check()
                for table, part in sums.items():
                    before = total.get(names[table])
                    total[names[table]] = part if before is None else np.add(part, before, out=part)
            if whole is not None and len(taken) == 1 and len(total) == len(sums) == len(names):
                packed = Packed(names, [n for n, _ in shapes], whole, [width for _, width in shapes])
            else:
                packed = Packed.of(total, np.float32)
            taken.clear()
            if factor != 1.0:
                packed.buffer *= np.float32(factor)
            return packed

        return summed

    def _pooled(self) -> batching.Pooled:
        return self._expander.pool_rows(self._plans, list(self._rows.values()))


class _Kept:
    """Gradients of features that wait to be summed.

    Args:
        gradients: of the values of each feature.
    """

    def __init__(self, gradients: list[torch.Tensor | None]) -> None:
        self.gradients = gradients
        self._versions = self._now()

    def check(self) -> None:
        """Raises PersiaError if torch has changed a gradient since the backward pass."""
        if self._now() != self._versions:
            raise PersiaError(
                "The gradient of a feature was changed in place after its backward pass, while it waited to be summed. "
                "Change gradients within the pass (`register_hook`), and return new tensors from the `backward` of "
                "your autograd functions."
            )

    def _now(self) -> list[int]:
        return [0 if gradient is None else gradient._version for gradient in self.gradients]


def _value_shapes(plans: Sequence[batching.FeaturePlan], widths: Sequence[int]) -> list[tuple[int, ...]]:
    """Returns the shape of each feature's values."""
    return [
        (plan.batch, widths[plan.table])
        if plan.pooling is not None
        else (plan.batch, plan.max_length or 0, widths[plan.table])
        for plan in plans
    ]


def _bring(ctx: Any, pooled: batching.Pooled) -> tuple[torch.Tensor, ...]:
    """Returns the values of each feature, with its mask behind if there is one, as outputs of a native function."""
    outputs: list[torch.Tensor] = []
    masks: list[torch.Tensor] = []
    for values, mask in zip(pooled.values, pooled.masks, strict=True):
        outputs.append(torch.from_numpy(values))
        if mask is not None:
            masks.append(torch.from_numpy(mask))
            outputs.append(masks[-1])
    ctx.mark_non_differentiable(*masks)
    ctx.set_materialize_grads(False)
    ctx.is_value = [output.dtype != torch.bool for output in outputs]
    return tuple(outputs)


def _of_values(ctx: Any, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Returns the gradient of each feature's values, without masks."""
    return [gradient for gradient, is_value in zip(gradients, ctx.is_value, strict=True) if is_value]


class _NativePool(torch.autograd.Function):
    """Values and masks of all features from the rows of all tables."""

    @staticmethod
    def forward(
        ctx: Any, expander: Expander, plans: list[batching.FeaturePlan], *rows: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.expander, ctx.plans, ctx.shapes = expander, plans, [tuple(r.shape) for r in rows]
        return _bring(ctx, expander.pool_rows(plans, [r.numpy() for r in rows]))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        # One after another in one storage, as they are to be sent.
        whole, sums = ctx.expander.sum_rows(ctx.plans, ctx.shapes, _of_values(ctx, gradients))
        parts = torch.from_numpy(whole).split([count * width for count, width in ctx.shapes])
        return None, None, *(part.view(ctx.shapes[i]) if i in sums else None for i, part in enumerate(parts))


class _TakePooled(torch.autograd.Function):
    """Brings features that are pooled already into the graph; its backward keeps their gradients for later."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, pooled: batching.Pooled, kept: list[_Kept]) -> tuple[torch.Tensor, ...]:
        ctx.kept = kept
        return _bring(ctx, pooled)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor, None, None]:
        ctx.kept.append(_Kept(_of_values(ctx, gradients)))
        return torch.zeros(()), None, None


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
    pooled: dict[str, torch.Tensor | SequenceEmbedding] = {}
    single: dict[str, str] = {}
    for name, (table, pooling, max_length) in features.items():
        if pooling is None:
            assert max_length is not None
            pooled[name] = sequence_of(rows[table], inverse[name], offsets[name], max_length)
        elif offsets[name] is None and len(inverse[name]):
            single[name] = table
        else:
            pooled[name] = pool_bags(rows[table], inverse[name], offsets[name], pooling)
    for names in of_one_width({name: rows[table] for name, table in single.items()}):
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
