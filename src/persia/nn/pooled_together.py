"""The features of a batch on a device: one gather and sum, one leaf and one hook for all (docs/decisions/0036).

A training thread that launches kernels holds the interpreter for each of them, so their number decides how fast a small
step is. All features of one dim are pooled by one kernel, and their gradients summed by row by one more.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from persia.nn.joined_tensors import JoinedTensors
from persia.nn.pooling_plan import GroupPlan
from persia.nn.row_groups import RowGroup
from persia.nn.torch_pooling import SequenceEmbedding

__all__ = ["FeatureGroup", "PooledTogether"]


class FeatureGroup(NamedTuple):
    """The features of the tables of one dim on a device.

    Attributes:
        plan: how they are pooled, without its arrays.
        rows: float32 `[rows, dim]`.
        places: int32 `[ids]`.
        ends: int32 `[bags + 1]`, or None for one id in each bag.
        bags: int32 `[ids]`, the bag of each id; None as `ends`.
        divisors: float32 `[bags, 1]`; None for 1.
        weights: float32 `[ids, 1]`; None for 1.
        masks: bool, of the positions of all sequences; None without.
    """

    plan: GroupPlan
    rows: torch.Tensor
    places: torch.Tensor
    ends: torch.Tensor | None
    bags: torch.Tensor | None
    divisors: torch.Tensor | None
    weights: torch.Tensor | None
    masks: torch.Tensor | None

    @classmethod
    def of(cls, plan: GroupPlan, rows: RowGroup, arrays: Mapping[str, torch.Tensor]) -> FeatureGroup:
        """Returns the features of a group, with what can be computed before the batch is used.

        Args:
            plan: of the features.
            rows: of the group.
            arrays: those of the plan, on the device.
        """
        ends, places = arrays.get("ends"), arrays["places"]
        bags = None if ends is None else torch.repeat_interleave(ends.diff(), output_size=len(places))
        rest = arrays.get("divisors"), arrays.get("weights"), arrays.get("masks")
        return cls(plan._replace(arrays={}), rows.values, places, ends, bags, *rest)

    def pool(self) -> torch.Tensor:
        """Returns the bags of all features, `[bags, dim]`."""
        if not len(self.places):
            bags = len(self.ends) - 1 if self.ends is not None else 0
            return self.rows.new_zeros(bags, self.rows.shape[1])
        if self.ends is None:
            values = self.rows.index_select(0, self.places)
            if self.weights is not None:
                values.mul_(self.weights)
        else:
            weights = None if self.weights is None else self.weights.view(-1)
            values = torch.nn.functional.embedding_bag(
                self.places, self.rows, self.ends, mode="sum", per_sample_weights=weights, include_last_offset=True
            )
        return values if self.divisors is None else values.div_(self.divisors)

    def cut(self, bags: torch.Tensor) -> list[torch.Tensor]:
        """Returns the bags of each feature, `[samples, dim]` or `[samples, length, dim]`, as tensors of their own.

        They share memory, but torch does not take them for views of it: a model may change them in place.
        """
        values: list[torch.Tensor] = []
        end = 0
        for length, count in self._runs():
            begin, end = end, end + count * self.plan.samples * (length or 1)
            run = bags if end - begin == len(bags) else bags[begin:end]
            if length is not None:
                run = run.view(-1, length, run.shape[1])
            values += run.unsafe_split_with_sizes([self.plan.samples] * count)
        return values

    def cut_masks(self) -> list[torch.Tensor]:
        """Returns the mask of each sequence, bool `[samples, length]`."""
        masks: list[torch.Tensor] = []
        if self.masks is None:
            return masks
        whole, end = self.masks.clone(), 0  # A model may change them.
        for length, count in self._runs():
            if length is not None:
                begin, end = end, end + count * self.plan.samples * length
                masks += whole[begin:end].view(-1, length).unsafe_split_with_sizes([self.plan.samples] * count)
        return masks

    def sum_by_row(self, gradients: Sequence[torch.Tensor | None], sums: torch.Tensor) -> None:
        """Adds the gradients of features to those of the rows.

        Args:
            gradients: of the values of each feature; None counts as zero.
            sums: float32 `[rows, dim]`.
        """
        runs, start = list[torch.Tensor](), 0
        for length, count in self._runs():
            of_run = gradients[start : start + count]
            start += count
            zeros = None
            if any(gradient is None for gradient in of_run):
                shape = (self.plan.samples, self.plan.layout.dim)
                zeros = sums.new_zeros(shape if length is None else (shape[0], length, shape[1]))
            whole = torch.cat([zeros if gradient is None else gradient for gradient in of_run])  # type: ignore[misc]
            runs.append(whole if length is None else whole.view(-1, self.plan.layout.dim))
        values = runs[0] if len(runs) == 1 else torch.cat(runs)
        if self.divisors is not None:
            values.div_(self.divisors)
        if self.bags is not None:
            values = values.index_select(0, self.bags)
        if self.weights is not None:
            values.mul_(self.weights)
        sums.index_add_(0, self.places, values)

    def _runs(self) -> list[tuple[int | None, int]]:
        """Returns how many features of each kind follow each other: pooled ones, or sequences of a length."""
        return [(length, len(list(alike))) for length, alike in itertools.groupby(self.plan.lengths)]


class _RowSums:
    """The gradients of the rows of a batch until they are taken. The graph of a loss that is kept keeps it, empty.

    Attributes:
        flat: of all groups whose tables get gradients, one behind the other; None without a backward pass.
        parts: views into it by group, `[rows, dim]`.
        tables: tables of the features that have got a gradient.
        closed: whether they were taken: what comes later is refused, and must not fill them again.
    """

    def __init__(self) -> None:
        self.closed = False
        self._clear()

    def close(self) -> None:
        """Forgets the gradients, for good."""
        self.closed = True
        self._clear()

    def _clear(self) -> None:
        self.flat: torch.Tensor | None = None
        self.parts: list[torch.Tensor] = []
        self.tables: set[str] = set()


class PooledTogether:
    """The features of a batch on a device.

    Args:
        groups: of all features.
        tables: the table of each feature, in the order of the schema.
        device: of the groups.

    Attributes:
        leaf: gets a gradient of 0 in every backward pass that has reached the features; for hooks.
    """

    def __init__(self, groups: Sequence[FeatureGroup], tables: Mapping[str, str], device: torch.device) -> None:
        self.leaf = torch.empty((), device=device)
        self._groups = groups
        self._tables = tables
        self._trained = [group for group in groups if not group.plan.layout.frozen]
        self._sums = _RowSums()

    def embeddings(self) -> dict[str, torch.Tensor | SequenceEmbedding]:
        """Returns the features, differentiable: `[batch, dim]`, or a SequenceEmbedding if a feature is not pooled."""
        outputs = iter(_PoolTogether.apply(self.leaf, self._groups, self._tables, self._sums))  # type: ignore[no-untyped-call]
        found: dict[str, torch.Tensor | SequenceEmbedding] = {}
        for group in self._groups:
            masks = iter(group.cut_masks())
            for name, length in zip(group.plan.features, group.plan.lengths, strict=True):
                values = next(outputs)
                found[name] = values if length is None else SequenceEmbedding(values, next(masks))
        return {name: found[name] for name in self._tables}

    def pool_again(self) -> None:
        """No-op: rows are pooled when the features are used."""

    @torch.no_grad()
    def take_gradients(
        self, of_rows: Mapping[str, torch.Tensor], factor: torch.Tensor | None
    ) -> Mapping[str, torch.Tensor]:
        """Takes the gradients of the rows, by table: of the tables that took part in the loss. None come later.

        Args:
            of_rows: gradients of rows that the loss has used directly, by table; added to the others.
            factor: float32 `[]`, what all of them are multiplied by; None for 1.
        """
        whole = None if of_rows else self._take_whole(factor)
        if whole is not None:
            return whole
        sums, taken = self._sums, dict[str, torch.Tensor]()
        for group, part in zip(self._trained, sums.parts, strict=bool(sums.parts)):
            by_table = zip(group.plan.layout.tables, part.split(group.plan.layout.counts), strict=True)
            taken.update({table: rows for table, rows in by_table if table in sums.tables})
        apart: list[torch.Tensor] = [] if sums.flat is None else [sums.flat]
        for table, gradient in of_rows.items():
            if table in taken:
                taken[table] += gradient
            else:
                taken[table] = gradient
                apart.append(gradient)
        if factor is not None:
            for gradient in apart:
                gradient.mul_(factor)
        self._close()
        return taken

    def _take_whole(self, factor: torch.Tensor | None) -> JoinedTensors | None:
        """Takes all gradients as they are to be sent, in one piece; None if a table took no part in the loss."""
        flat, layouts = self._sums.flat, [group.plan.layout for group in self._trained]
        names = [name for layout in layouts for name in layout.tables]
        if flat is None or not self._sums.tables.issuperset(names):
            return None
        if factor is not None:
            flat.mul_(factor)
        self._close()
        counts = [count for layout in layouts for count in layout.counts]
        return JoinedTensors(names, counts, [layout.dim for layout in layouts for _ in layout.tables], flat)

    def _close(self) -> None:
        self._sums.close()
        self.leaf.grad = None


class _PoolTogether(torch.autograd.Function):
    """The features of all groups; the backward pass sums their gradients by row, and passes none on."""

    @staticmethod
    def forward(
        ctx: Any, leaf: torch.Tensor, groups: Sequence[FeatureGroup], tables: Mapping[str, str], sums: _RowSums
    ) -> tuple[torch.Tensor, ...]:
        parts = [group.cut(group.pool()) for group in groups]
        # If no table is trained, the arrival of a gradient still ends the backward pass.
        if not all(group.plan.layout.frozen for group in groups):
            frozen = zip(groups, parts, strict=True)
            ctx.mark_non_differentiable(*(p for group, of in frozen if group.plan.layout.frozen for p in of))
        ctx.set_materialize_grads(False)
        # Saved, so that a loss which is kept does not keep them after its backward pass.
        trained = [group for group in groups if not group.plan.layout.frozen]
        ctx.save_for_backward(*(part for group in trained for part in group[2:7]))
        ctx.groups = [(group.plan, len(of)) for group, of in zip(groups, parts, strict=True)]
        ctx.tables, ctx.sums, ctx.device = tables, sums, leaf.device
        return tuple(itertools.chain.from_iterable(parts))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        zero, sums = torch.zeros((), device=ctx.device), ctx.sums
        if sums.closed:
            return zero, None, None, None  # The hook of the leaf raises.
        saved = iter(ctx.saved_tensors)
        trained = [plan for plan, _ in ctx.groups if not plan.layout.frozen]
        if sums.flat is None and trained:
            sizes = [plan.layout.rows * plan.layout.dim for plan in trained]
            sums.flat = zero.new_zeros(sum(sizes))
            views = zip(sums.flat.split(sizes), trained, strict=True)
            sums.parts = [view.view(plan.layout.rows, plan.layout.dim) for view, plan in views]
        parts, start = iter(sums.parts), 0
        for plan, count in ctx.groups:
            own = gradients[start : start + count]
            start += count
            if plan.layout.frozen:
                continue
            places, ends, bags, divisors, weights = itertools.islice(saved, 5)
            part = next(parts)
            used = {ctx.tables[name] for name, g in zip(plan.features, own, strict=True) if g is not None}
            if used:
                sums.tables |= used
                group = FeatureGroup(plan, part, places, ends, bags, divisors, weights, None)
                group.sum_by_row(own, part)
        return zero, None, None, None
