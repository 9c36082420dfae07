"""Expands and pools distinct rows into the input of the model, on the NN worker's device."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import torch

from persia import batching
from persia.errors import PersiaError
from persia.nn.pooling_plan import PooledFeature
from persia.nn.torch_pooling import SequenceEmbedding, expand_with_torch
from persia.nn.trained_tables import TrainedTables
from persia.schema import Pooling, Schema, Table
from persia.schema.pooled_features import sent_tables, values_name
from persia.types import Floats, Int64Array, Inverse, Packed

__all__ = [
    "UNWEIGHTED",
    "Embeddings",
    "Expander",
    "PooledAhead",
    "SequenceEmbedding",
    "Weights",
    "expand_with_torch",
]


Embeddings: TypeAlias = Mapping[str, torch.Tensor | SequenceEmbedding]
"""By feature name: `[batch, dim]` if pooled, else a SequenceEmbedding."""


Weights: TypeAlias = Mapping[str, Floats] | Mapping[str, torch.Tensor]
"""Weights of ids by feature, float32 `[n]`; without features whose ids all have weight 1."""

UNWEIGHTED: Mapping[str, Floats] = {}

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

    Attributes:
        features: table, pooling and maximum length of each feature.
    """

    def __init__(self, schema: Schema, device: torch.device, threads: int | None = None) -> None:
        self.on_host = device.type == "cpu"
        self.features: Mapping[str, PooledFeature] = {
            f.name: (f.table_name, cast("Pooling | None", f.pooling), f.max_length) for f in schema.id_features
        }
        self._device = device
        self._number(schema.resolved_tables())
        self._schema = schema
        self._pool = batching.ThreadPool(threads or torch.get_num_threads())
        self._scratch = batching.Scratch()
        self._of_pooled: dict[tuple[str, ...], Expander] = {}
        vars(self)  # Here, as two threads that make it corrupt memory with CPython 3.11 (python/cpython#97922).

    def of_pooled(self, tables: Collection[str]) -> Expander:
        """Returns an expander for batches that have the values of the features of some tables in place of their rows.

        Each of these features has one row for each sample, by `persia.schema.pooled_features.values_name`. Thread-safe.

        Args:
            tables: names of the tables, of which all features are pooled. Without any, it is this expander.
        """
        if not tables:
            return self
        key = tuple(tables)
        if key not in self._of_pooled:
            self._of_pooled[key] = self._without_rows(key)
        return self._of_pooled[key]

    def _without_rows(self, tables: Collection[str]) -> Expander:
        expander = copy.copy(self)  # It shares the threads.
        features = {f.name: values_name(f) for f in self._schema.id_features if f.table_name in tables}
        expander.features = {
            name: (features[name], "sum", None) if name in features else of_feature
            for name, of_feature in self.features.items()
        }
        of_schema = {name: table for name, table in self._schema.resolved_tables().items() if name not in tables}
        sent = sent_tables(self._schema)
        expander._number({**of_schema, **{name: sent[name] for name in features.values()}})
        return expander

    def _number(self, tables: Mapping[str, Table]) -> None:
        self._tables = {name: number for number, name in enumerate(tables)}
        self.trained = TrainedTables([table.trainable for table in tables.values()])

    def __call__(
        self,
        rows: Mapping[str, torch.Tensor],
        inverse: Mapping[str, Inverse] | Mapping[str, torch.Tensor],
        offsets: Mapping[str, Int64Array | None] | Mapping[str, torch.Tensor | None],
        weights: Weights = UNWEIGHTED,
    ) -> dict[str, torch.Tensor | SequenceEmbedding]:
        """Returns by feature `[batch, dim]`, or a SequenceEmbedding if it is not pooled.

        Args:
            rows: by table, `[unique, dim]`.
            inverse: by feature; arrays when `on_host`, else tensors.
            offsets: by feature, int64 `[batch + 1]` or None.
            weights: by feature with weights of its ids, float32 `[n]`.
        """
        if not self.on_host:
            return expand_with_torch(
                self.features,
                rows,
                cast("Mapping[str, torch.Tensor]", inverse),
                cast("Mapping[str, torch.Tensor | None]", offsets),
                cast("Mapping[str, torch.Tensor]", weights),
            )
        plans, tables = self._plans(inverse, offsets, weights), [rows[table] for table in self._tables]
        return self.by_feature(_NativePool.apply(self, plans, *tables))  # type: ignore[no-untyped-call]

    def index(
        self,
        inverse: Mapping[str, Inverse],
        offsets: Mapping[str, Int64Array | None],
        weights: Mapping[str, Floats],
    ) -> tuple[Any, Any, Any]:
        """Returns which rows the samples have as the other methods take it: where it is, or as tensors of the device.

        Args:
            inverse: by feature.
            offsets: by feature, or None if each sample has one id.
            weights: by feature with weights.
        """
        if self.on_host:
            return inverse, offsets, weights
        places = {name: torch.from_numpy(index.astype(np.int64)).to(self._device) for name, index in inverse.items()}
        ends = {n: None if own is None else torch.tensor(own, device=self._device) for n, own in offsets.items()}
        return places, ends, {name: torch.tensor(own, device=self._device) for name, own in weights.items()}

    def pool_one(
        self,
        name: str,
        rows: Mapping[str, torch.Tensor],
        inverse: Mapping[str, Inverse] | Mapping[str, torch.Tensor],
        offsets: Mapping[str, Int64Array | None] | Mapping[str, torch.Tensor | None],
        weights: Weights = UNWEIGHTED,
    ) -> None:
        """Pools one feature, waits until that is done, and drops the result: to measure it.

        Args:
            name: of the feature.
            rows: by table, without gradients; see `__call__`, as for the others.
            inverse: by feature.
            offsets: by feature.
            weights: by feature with weights.
        """
        if self.on_host:
            plan = self._plans(inverse, offsets, weights)[list(self.features).index(name)]
            self.pool_rows([plan], [rows[table].numpy() for table in self._tables])
            return
        tensors = cast("Mapping[str, torch.Tensor]", inverse), cast("Mapping[str, torch.Tensor | None]", offsets)
        expand_with_torch({name: self.features[name]}, rows, *tensors, cast("Mapping[str, torch.Tensor]", weights))
        torch.cuda.synchronize()

    def ahead(
        self,
        rows: Mapping[str, Floats],
        inverse: Mapping[str, Inverse] | Mapping[str, torch.Tensor],
        offsets: Mapping[str, Int64Array | None] | Mapping[str, torch.Tensor | None],
        weights: Weights = UNWEIGHTED,
    ) -> PooledAhead:
        """Returns the features of a batch for a training thread that takes them later. Only `on_host`.

        Args:
            rows: by table, float32 `[unique, dim]`. They must not change while the result is in use.
            inverse: by feature.
            offsets: by feature, or None if each sample has one id.
            weights: by feature with weights.
        """
        return PooledAhead(self, self._plans(inverse, offsets, weights), {table: rows[table] for table in self._tables})

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
            shapes: of the sums of each table; see `TrainedTables.shapes`.
            gradients: of the values of each feature.

        Returns:
            One array for all tables, as it is to be sent, and views into it for those tables that got a gradient.
        """
        of_plans = zip(plans, gradients, strict=True)
        arrays = [None if g is None or plan.table not in self.trained else g.numpy() for plan, g in of_plans]
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
            for name, (_, pooling, _) in self.features.items()
        }

    def _plans(
        self,
        inverse: Mapping[str, Inverse] | Mapping[str, torch.Tensor],
        offsets: Mapping[str, Int64Array | None] | Mapping[str, torch.Tensor | None],
        weights: Weights,
    ) -> list[batching.FeaturePlan]:
        return [
            batching.FeaturePlan(
                self._tables[table],
                cast("Inverse", inverse[name]),
                cast("Int64Array | None", offsets[name]),
                pooling,
                max_length if pooling is None else None,
                cast("Floats | None", weights.get(name)),
            )
            for name, (table, pooling, max_length) in self.features.items()
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
        self._constants = expander.trained.constants(plans)
        self._values: batching.Pooled | None = None
        self._kept: list[_Kept] = []

    def fits(self, waiting: int) -> bool:
        """Returns whether the features of this batch, or their gradients, may wait next to `waiting` other batches."""
        return (waiting + 1) * self.nbytes <= MOST_AHEAD

    def pool(self) -> None:
        """Pools now, in the calling thread. Without it, `embeddings` does."""
        self._values = self._pooled()

    def pool_again(self) -> None:
        """Pools rows that were changed, in the calling thread; later if the features are too large to wait."""
        self._values = None
        if self.fits(0):
            self.pool()

    def embeddings(self) -> dict[str, torch.Tensor | SequenceEmbedding]:
        """Returns the features, differentiable. Later calls pool again, as the first result may have been changed."""
        pooled, self._values = self._values or self._pooled(), None
        return self._expander.by_feature(_TakePooled.apply(self.leaf, pooled, self._constants, self._kept))  # type: ignore[no-untyped-call]

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
            names = list(self._rows)
            shapes = self._expander.trained.shapes([(len(rows), rows.shape[1]) for rows in self._rows.values()])
            total = dict(of_rows)
            whole: Floats | None = None
            for call in taken:  # As many as there were calls of `embeddings`.
                whole, sums = self._expander.sum_rows(self._plans, shapes, call.gradients)
                call.check()
                for table, part in sums.items():
                    before = total.get(names[table])
                    total[names[table]] = part if before is None else np.add(part, before, out=part)
            if whole is not None and len(taken) == 1 and len(total) == len(sums) == self._expander.trained.count:
                sent = [shapes[table] for table in sums]
                packed = Packed(list(total), [n for n, _ in sent], whole, [width for _, width in sent])
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


def _bring(ctx: Any, pooled: batching.Pooled, constants: Sequence[bool]) -> tuple[torch.Tensor, ...]:
    """Returns values and masks of each feature as outputs of a native function; `constants` get no gradient."""
    outputs, without = list[torch.Tensor](), list[torch.Tensor]()
    for values, mask, constant in zip(pooled.values, pooled.masks, constants, strict=True):
        outputs.append(torch.from_numpy(values))
        if constant:
            without.append(outputs[-1])
        if mask is not None:
            without.append(torch.from_numpy(mask))
            outputs.append(without[-1])
    ctx.mark_non_differentiable(*without)
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
        ctx.expander, ctx.plans = expander, plans
        ctx.shapes = expander.trained.shapes([(len(r), r.shape[1]) for r in rows])
        pooled = expander.pool_rows(plans, [r.numpy() for r in rows])
        return _bring(ctx, pooled, expander.trained.constants(plans))

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
    def forward(
        ctx: Any, leaf: torch.Tensor, pooled: batching.Pooled, constants: Sequence[bool], kept: list[_Kept]
    ) -> tuple[torch.Tensor, ...]:
        ctx.kept = kept
        return _bring(ctx, pooled, constants)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor, None, None, None]:
        ctx.kept.append(_Kept(_of_values(ctx, gradients)))
        return torch.zeros(()), None, None, None
