"""Batches whose rows are on the device, as `prefetch` yields them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Set

import numpy as np
import torch

from persia.errors import PersiaError, StaleBatchError
from persia.nn.owned_tables import OwnedTablesPlan
from persia.nn.pooled_together import PooledTogether
from persia.nn.pooling import UNWEIGHTED, PooledAhead
from persia.nn.row_groups import RowGroup
from persia.nn.token_client import DrawnToken
from persia.schema import Schema
from persia.types import Floats, Ids, Int32Array, Int64Array, Inverse, Moment, Packed, RegisteredBatch

__all__ = ["PreparedBatch", "dummy_batch", "loss_scale"]


class PreparedBatch:
    """The samples of one step on the device, with the rows of their ids.

    Args:
        dense: float32 `[batch, Schema.dense_width]`.
        labels: float32 `[batch, labels]`; NaN where one is missing.
        day: int32 `[batch]` on the host, or None.
        rows: by table, float32 `[unique ids, dim]`; on a host as they are packed, on a device by group.
        inverse: by feature, the index of each id's row; arrays of the host, as the next.
        offsets: by feature, int64 `[batch + 1]`; or None if each sample has one id.

    Attributes:
        weights: weight of each sample, float32 `[batch]`; None weighs all 1.
        groups: group of each sample, int64 `[batch]`; None without groups.
        id_weights: weights of ids, by feature with weights, float32, as `inverse`.
        batch_id: its key at the embedding worker; None if no gradient is awaited.
        pooled: its features, which keep their own gradients: the rows then get only the gradients of loss terms that
            use them directly. None for a batch of the host that is only read.
        compressed: whether its rows have travelled as float16, so that its gradients do too.
        dummy: whether it stands in for data that this NN worker does not have; the network must not learn from it.
        token: its token, in asynchronous modes.
        number: of the batch within the pass over the data.
        frozen: tables whose rows get no gradient.
        began: time at which it was drawn, on the monotonic clock.
        looked_up: time at which its lookup began, on the same clock.
        pooled_ids: number of distinct ids by table, for tables whose features were pooled at an embedding worker: for
            them `rows` has values.
        seen: moments of the PSs that its rows are of, if they are to be refreshed; else None.
        left_out: which of its rows are zeros until they are refreshed, as in `LookedUp`; None if none is.
        lost: whether they will not be refreshed, as the batch was lost with its embedding worker.
        step: its step within the pass, if its rows are to be refreshed.
        current_to: number of this NN worker's steps of the pass whose updates its rows have, at least; -1 if some rows
            were left out.
        owned: which of its rows the device owns; None if it owns rows of no table.
        needs_step: number of these steps whose updates its rows have to have; -1 as long as any will do.
    """

    def __init__(
        self,
        dense: torch.Tensor,
        labels: torch.Tensor,
        day: Int32Array | None,
        rows: dict[str, torch.Tensor] | Packed[np.float32] | list[RowGroup],
        inverse: dict[str, Inverse],
        offsets: dict[str, Int64Array | None],
    ) -> None:
        self.dense = dense
        self.labels = labels
        self.day = day
        self._packed = rows if isinstance(rows, Packed) else None
        self._groups = rows if isinstance(rows, list) else None
        self._rows = rows if isinstance(rows, dict) else None
        self.inverse = inverse
        self.offsets = offsets
        self.weights: torch.Tensor | None = None
        self.groups: torch.Tensor | None = None
        self.id_weights: Mapping[str, Floats] = UNWEIGHTED
        self.batch_id: int | None = None
        self.pooled: PooledAhead | PooledTogether | None = None
        self.compressed = False
        self.dummy = False
        self.token: DrawnToken | None = None
        self.number = 0
        self.frozen: Set[str] = frozenset()
        self.began = 0.0
        self.looked_up = 0.0
        self.pooled_ids: Mapping[str, int] = {}
        self.seen: list[Moment] | None = None
        self.left_out: Packed[np.bool_] | None = None
        self.lost = False
        self.step = 0
        self.current_to = 0
        self.needs_step = 0
        self.owned: OwnedTablesPlan | None = None
        self._copied: list[Callable[[], None]] = []
        self._finish: Callable[[PreparedBatch], None] | None = None
        self._closed = False
        self._called_back = False

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def rows(self) -> dict[str, torch.Tensor]:
        """By table, float32 `[unique ids, dim]`: autograd leaves, if a gradient is awaited.

        With `pooled`, only a loss that uses rows directly needs them, so they are made by the first access.
        """
        if self._rows is None:
            if self._groups is not None:
                self._rows = {name: rows for group in self._groups for name, rows in group.by_table().items()}
            else:
                views = self.packed_rows().items()
                self._rows = {n: torch.from_numpy(v) if v.flags.writeable else torch.tensor(v) for n, v in views}
            if self.trains:
                self._make_leaves(self._trained(self._rows))
        if self.pooled_ids and not isinstance(self._rows, _SomeRows):
            self._rows = _SomeRows(self._rows)
        return self._rows

    def host_rows(self) -> Mapping[str, Floats]:
        """Returns the same as arrays; for a batch on a host. No leaves are made."""
        return self._packed if self._packed is not None else {name: part.numpy() for name, part in self.rows.items()}

    def row_counts(self) -> dict[str, int]:
        """Returns the number of distinct rows, by table."""
        if self._packed is not None:
            return dict(zip(self._packed.names, self._packed.counts, strict=True))
        if self._groups is not None:
            return {name: n for (of, _) in self._groups for name, n in zip(of.tables, of.counts, strict=True)}
        return {name: len(rows) for name, rows in self.rows.items()}

    def id_counts(self) -> dict[str, int]:
        """Returns the number of distinct ids, by table; also of tables whose features were pooled elsewhere."""
        return {**self.row_counts(), **self.pooled_ids}

    def packed_rows(self) -> Packed[np.float32]:
        """Returns the rows of a batch on a host. Their buffer may be written until they are used."""
        assert self._packed is not None
        return self._packed

    def row_groups(self) -> list[RowGroup]:
        """Returns the rows of a batch on a device. They may be written until they are used."""
        assert self._groups is not None
        return self._groups

    def refreshed(self, copied: Callable[[], None]) -> None:
        """Notes that rows on the device were overwritten; `copied` makes the using thread wait for it."""
        self._copied.append(copied)

    def finish_refresh(self) -> None:
        """Makes the calling thread, which uses the rows next, wait for copies to the device."""
        for copied in self._copied:
            copied()
        self._copied.clear()

    def on_host(self) -> RegisteredBatch:
        """Returns the samples as arrays; for a batch with a batch id."""
        assert self.batch_id is not None
        dense, labels = self.dense.detach().cpu().numpy(), self.labels.cpu().numpy()
        weights = None if self.weights is None else self.weights.cpu().numpy()
        return RegisteredBatch(self.batch_id, dense, labels, self.day, None, weights, self.host_groups())

    def host_groups(self) -> Ids | None:
        """Returns the groups as an array, uint64 `[batch]`; None without groups."""
        return None if self.groups is None else self.groups.cpu().numpy().view(np.uint64)

    @property
    def samples(self) -> int:
        """Number of samples that count."""
        return 0 if self.dummy else len(self)

    @property
    def trains(self) -> bool:
        """Whether a gradient of this batch is awaited."""
        return self._finish is not None and not self._closed

    def await_gradient(self, batch_id: int, finish: Callable[[PreparedBatch], None]) -> None:
        """Makes autograd leaves; `finish(self)` is called at the end of the first backward pass."""
        self.batch_id = batch_id
        self._finish = finish
        if self.pooled is not None:
            self._make_leaves([self.pooled.leaf])
        if self._rows is not None or self.pooled is None:
            self._make_leaves(self._trained(self.rows))

    def _trained(self, rows: Mapping[str, torch.Tensor]) -> Iterable[torch.Tensor]:
        """Returns the rows that get a gradient; all, if none is to be sent: its arrival ends the backward pass."""
        return [part for table, part in rows.items() if table not in self.frozen] or rows.values()

    def _make_leaves(self, tensors: Iterable[torch.Tensor]) -> None:
        # Weak: a leaf that kept its batch alive would be a cycle, and megabytes would wait for the cycle collector.
        myself = weakref.ref(self)

        def on_gradient(_: torch.Tensor) -> None:
            batch = myself()
            if batch is None or batch._closed:
                raise StaleBatchError(
                    "The gradient of this batch was pushed already, or the batch was released when the next one was "
                    "drawn. Call backward once per batch (add losses up first), before drawing the next."
                )
            batch._on_gradient()

        for leaf in tensors:
            leaf.requires_grad_()
            leaf.register_post_accumulate_grad_hook(on_gradient)

    def close(self) -> bool:
        """Refuses gradients from now on. Returns whether one was awaited."""
        awaited = self.trains
        self._closed = True
        return awaited

    def take_gradients(self, factor: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """Takes the gradients off the leaves, by table, times `factor`. Does not wait for the device.

        Args:
            factor: float32 `[]` on the device; None for 1.
        """
        gradients: dict[str, torch.Tensor] = {}
        for table, leaf in (self._rows or {}).items():
            if leaf.grad is not None and table not in self.frozen:
                gradients[table] = leaf.grad if factor is None else leaf.grad.mul_(factor)
                leaf.grad = None
        return gradients

    def _on_gradient(self) -> None:
        if not self._called_back:
            # Gradients of the leaves arrive one by one; the engine calls back after the last.
            self._called_back = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)

    def _end_of_backward(self) -> None:
        finish = self._finish
        assert finish is not None
        finish(self)
        self._closed = True


class _SomeRows(dict[str, torch.Tensor]):
    """The rows of a batch, without those whose features were pooled at an embedding worker."""

    def __missing__(self, table: str) -> torch.Tensor:
        raise PersiaError(
            f"This batch has no rows of table {table!r}: an embedding worker has pooled its features. To use rows in "
            'the loss, set RayOptions(pool_at="nn_worker").',
            table=table,
        )


def loss_scale(scaler: torch.amp.GradScaler | None, device: torch.device) -> torch.Tensor | None:
    """Returns the present scale of the loss, float32 `[]` on the device; None if losses are not scaled.

    Waits only if the scale is on a GPU and wanted on the CPU.

    Args:
        scaler: of the loss; its scale may be on another device.
        device: of the gradients that are divided by it.
    """
    if scaler is None or not scaler.is_enabled():
        return None
    current: torch.Tensor | None = scaler._scale  # None before the first use.
    if device.type == "cpu" and current is not None and current.device.type != "cpu":
        # `scale` would start a copy to the CPU and not wait for it.
        return torch.tensor(scaler.get_scale(), dtype=torch.float32)
    scale: torch.Tensor = scaler.scale(torch.ones((), device=device))
    return scale


def dummy_batch(schema: Schema, rows: int, device: torch.device) -> PreparedBatch:
    """Returns a batch of zeros and samples without ids, so that a rank without data can take part in collectives.

    Args:
        schema: of the model's input.
        rows: samples, 0 or more.
        device: where the network runs.
    """
    names = [f.name for f in schema.id_features]
    # Pooling needs a row, though no id points to it.
    tables = {name: torch.zeros(1, table.dim, device=device) for name, table in schema.resolved_tables().items()}
    dense = torch.zeros(rows, schema.dense_width, device=device)
    labels = torch.zeros(rows, len(schema.label_names), device=device)
    index: dict[str, Inverse] = {name: np.empty(0, np.uint16) for name in names}
    ends: dict[str, Int64Array | None] = {name: np.zeros(rows + 1, np.int64) for name in names}
    batch = PreparedBatch(dense, labels, None, tables, index, ends)
    batch.dummy = True
    if schema.group is not None:  # A loss may need them.
        batch.groups = torch.zeros(rows, dtype=torch.int64, device=device)
    return batch
