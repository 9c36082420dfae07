"""Registers batches and looks up their rows for training."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from persia.batching.batch import Batch
from persia.errors import StaleBatchError
from persia.nn.gate import StalenessGate
from persia.nn.owned_tables import OwnedTables, OwnedTablesPlan
from persia.nn.pooling import Expander
from persia.nn.prepared import PreparedBatch, dummy_batch
from persia.nn.push_log import PushLog
from persia.nn.row_cache import CachePlan, RowCache
from persia.nn.staging import Ready, nothing_to_do
from persia.nn.transfer import Transfer
from persia.schema import Schema
from persia.types import RegisteredBatch

__all__ = ["TrainingLookup"]


class TrainingLookup:
    """Registers batches and looks up their rows for training, in one thread at a time.

    Args:
        schema: of the batches.
        log: has the embedding workers, and keeps which batches are registered.
        transfer: brings rows to the device.
        expander: pools features ahead, on a host.
        gate: notes how old copies of rows are.
        device: of the network.
    """

    def __init__(
        self,
        schema: Schema,
        log: PushLog,
        transfer: Transfer,
        expander: Expander,
        gate: StalenessGate,
        device: torch.device,
    ) -> None:
        self._schema = schema
        self._log = log
        self._worker = log.connection.worker
        self._tracer = log.tracer
        self._transfer = transfer
        self._expander = expander
        self._gate = gate
        self._device = device
        self._pools = log.connection.pools and not transfer.clips

    def begin(self) -> None:
        """Prepares the calling thread, a new one, for lookups next to a network that computes."""
        self._transfer.begin_beside_network()

    def register(self, batch: Batch | RegisteredBatch) -> RegisteredBatch:
        """Registers a batch, unless a data loader has."""
        if isinstance(batch, Batch):
            batch.validate(self._schema)
            batch = batch.registered(self._worker.register(batch.id_features))
        self._log.registered.add(batch.batch_id)
        return batch

    def look_up(
        self,
        batch: RegisteredBatch,
        end_of_backward: Callable[[PreparedBatch], None],
        *,
        ready: int = 0,
        cache: RowCache | OwnedTables | None = None,
        refreshed: bool = False,
        recent: int = 0,
        final: bool = True,
        dummy_rows: int = 1,
    ) -> tuple[PreparedBatch, Ready]:
        """Looks up the rows of a batch; returns a dummy batch if it was lost with its embedding worker.

        Args:
            batch: the batch.
            end_of_backward: called with the batch when its backward pass has ended.
            ready: number of batches that are looked up and wait for the network.
            cache: has copies of rows, or owned rows, on the device; None without.
            refreshed: whether its rows may be refreshed before it is used.
            recent: number of earlier batches whose rows it may leave out, so that they have to be refreshed.
            final: whether they will hardly be, so that it is worth pooling them here.
            dummy_rows: rows of a dummy batch.

        Returns:
            The batch, and the function that makes it ready, in the training thread.
        """
        plan: CachePlan | OwnedTablesPlan | None = None
        began = time.monotonic()
        try:
            with self._tracer.span("lookup", batch=batch.batch_id):
                if refreshed:
                    rows = self._worker.lookup_ahead(batch.batch_id, self._pools, recent)
                elif cache is not None:
                    plan = cache.plan(self._worker.distinct_ids(batch.batch_id), self._gate.last_lookup)
                    rows = self._worker.lookup_part(batch.batch_id, plan.wanted)
                elif self._log.observer is not None:
                    rows = self._log.observer.lookup(batch.batch_id)
                else:
                    rows = self._worker.lookup(batch.batch_id, True, self._pools)
        except StaleBatchError:
            if cache is not None:
                cache.clear()
            self._log.lost(batch.batch_id, len(batch.labels))
            return self.dummy(dummy_rows), nothing_to_do
        with self._tracer.span("transfer", batch=batch.batch_id):
            prepared, make_ready = self._transfer.rows(batch, rows, plan)
        prepared.looked_up = began
        prepared.owned = plan if isinstance(plan, OwnedTablesPlan) else None
        prepared.compressed = rows.scales is not None
        if plan is not None:
            self._gate.aged(plan.oldest)
        if self._expander.on_host:
            index = prepared.inverse, prepared.offsets, prepared.id_weights
            prepared.pooled = self._expander.of_pooled(prepared.pooled_ids).ahead(prepared.host_rows(), *index)
            if final and prepared.left_out is None and prepared.pooled.fits(ready):
                with self._tracer.span("pool", batch=batch.batch_id):
                    prepared.pooled.pool()
        prepared.await_gradient(batch.batch_id, end_of_backward)
        return prepared, make_ready

    def refresh(self, batch: PreparedBatch) -> Ready:
        """Reads the rows of a batch that have changed since they were read last. Blocks.

        Returns:
            A function that overwrites them, for a batch that nothing uses yet, and pools it again.
        """
        assert batch.batch_id is not None
        assert batch.seen is not None
        with self._tracer.span("refresh", batch=batch.batch_id):
            try:
                fresh = self._worker.refresh(batch.batch_id, batch.seen, batch.left_out)
            except StaleBatchError:  # Lost with its embedding worker, as its gradient will be, which is counted.
                batch.lost = batch.left_out is not None
                return nothing_to_do
            replace = self._transfer.fresh_rows(batch, fresh)

        def overwrite() -> None:
            replace()
            batch.seen, batch.left_out = fresh.seen, None
            if batch.pooled is not None:
                batch.pooled.pool_again()

        return overwrite

    def dummy(self, rows: int) -> PreparedBatch:
        """Returns the batch with which this NN worker takes part in a step for which it has no data."""
        return dummy_batch(self._schema, rows, self._device)
