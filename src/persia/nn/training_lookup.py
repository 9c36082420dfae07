"""Lookups of rows for training: what is done with each batch before the network gets it."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Protocol

from persia.batching.batch import Batch
from persia.errors import StaleBatchError
from persia.nn.gate import StalenessGate
from persia.nn.outbox import Outbox
from persia.nn.pooling import Expander
from persia.nn.prepared import PreparedBatch
from persia.nn.row_cache import CachePlan, RowCache
from persia.nn.transfer import Ready, Transfer, nothing_to_do
from persia.schema import Schema
from persia.types import FedBatch

__all__ = ["EndOfBackward", "TrainingLookup"]


class EndOfBackward(Protocol):
    """Takes the gradients of a batch when its backward pass has ended."""

    def __call__(self, batch: PreparedBatch, *, compressed: bool) -> None:
        """Takes them.

        Args:
            batch: the batch.
            compressed: whether its rows have travelled as float16, so that its gradients do too.
        """


class TrainingLookup:
    """Registers batches and looks up their rows for training, in one thread at a time.

    Args:
        schema: of the batches.
        outbox: has the embedding workers, and keeps which batches are registered.
        transfer: brings rows to the device.
        expander: pools features ahead, on a host.
        gate: notes how old copies of rows are.
        dummy: makes the batch that takes the place of a lost one.
        cache: has copies of rows on the device; None without.
        ready: returns the number of batches that are looked up and wait for the network.
        end_of_backward: gets each batch once its gradients are computed.
    """

    def __init__(
        self,
        schema: Schema,
        outbox: Outbox,
        transfer: Transfer,
        expander: Expander,
        gate: StalenessGate,
        *,
        dummy: Callable[[], PreparedBatch],
        cache: RowCache | None,
        ready: Callable[[], int],
        end_of_backward: EndOfBackward,
    ) -> None:
        self._schema = schema
        self._outbox = outbox
        self._worker = outbox.connection.worker
        self._tracer = outbox.tracer
        self._transfer = transfer
        self._expander = expander
        self._gate = gate
        self._dummy = dummy
        self._cache = cache
        self._ready = ready
        self._end_of_backward = end_of_backward

    def register(self, batch: Batch | FedBatch) -> FedBatch:
        """Registers a batch, unless a data loader has."""
        if isinstance(batch, Batch):
            batch.validate(self._schema)
            batch = FedBatch(self._worker.register(batch.id_features), batch.dense, batch.labels, batch.day)
        self._outbox.registered.add(batch.batch_id)
        return batch

    def look_up(self, batch: FedBatch) -> tuple[PreparedBatch, Ready]:
        """Looks up the rows of a batch; returns a dummy batch if it was lost with its embedding worker."""
        plan: CachePlan | None = None
        began = time.monotonic()
        try:
            with self._tracer.span("lookup", batch=batch.batch_id):
                if self._cache is None:
                    found = (self._outbox.observer or self._worker).lookup(batch.batch_id)
                else:
                    plan = self._cache.plan(self._worker.distinct_ids(batch.batch_id), self._gate.last_lookup)
                    found = self._worker.lookup_part(batch.batch_id, plan.wanted)
        except StaleBatchError:
            if self._cache is not None:
                self._cache.clear()
            self._outbox.lost(batch)
            return self._dummy(), nothing_to_do
        with self._tracer.span("transfer", batch=batch.batch_id):
            prepared, ready = self._transfer.rows(batch, found, plan)
        prepared.looked_up = began
        if plan is not None:
            self._gate.aged(plan.oldest)
        if self._expander.on_host:
            prepared.pooled = self._expander.ahead(prepared.host_rows(), prepared.inverse, prepared.offsets)
            if prepared.pooled.fits(self._ready()):
                with self._tracer.span("pool", batch=batch.batch_id):
                    prepared.pooled.pool()
        compressed = found.scales is not None
        prepared.await_gradient(batch.batch_id, functools.partial(self._end_of_backward, compressed=compressed))
        return prepared, ready
