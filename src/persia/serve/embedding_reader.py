"""Reads the embeddings of a batch from served rows, with the same code as training."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Sequence
from typing import cast

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from persia import batching
from persia.batching import RoutedBatch
from persia.batching.batch import Batch
from persia.batching.id_column import IdColumn
from persia.nn.pooling import Embeddings, Expander, SequenceEmbedding
from persia.nn.staging import Staging, copied_array
from persia.nn.transfer import Transfer
from persia.schema import Pooling, Schema
from persia.serve.device_rows import DeviceRows, missing_bounds
from persia.serve.row_sources import RowLookup, Rows
from persia.store.served import lookup_packed
from persia.types import BoolArray, BucketMap, Int64Array, LookedUp, Packed
from persia.worker.routing import Router

__all__ = ["EmbeddingReader"]


class EmbeddingReader:
    """Looks up the ids of batches, and pools their rows. Read-only. Thread-safe.

    Args:
        schema: the features to read.
        buckets: the source of each bucket of ids, as in `RowLookup`.
        staging: copies tensors to the device of the network.
        threads: threads of each call.
        copies: copies of rows on a device; None to read all rows of each batch.
    """

    def __init__(
        self, schema: Schema, buckets: BucketMap, staging: Staging, threads: int, copies: DeviceRows | None = None
    ) -> None:
        # The log has float32 values, whatever the dtype of a table in training.
        tables = {name: msgspec.structs.replace(t, dtype="float32") for name, t in schema.resolved_tables().items()}
        self.schema = schema
        self._dims = {name: table.dim for name, table in tables.items()}
        self._copies = copies
        self._router = Router(schema, buckets, threads)
        self._scratch = batching.Scratch()
        self._names = [feature.name for feature in schema.id_features]
        self._on_host = staging.on_host
        self._table_of = [feature.table_name for feature in schema.id_features]
        self._feature_dims = [self._dims[name] for name in self._table_of]
        self._pools_all = all(feature.pooling is not None for feature in schema.id_features)
        if self._on_host:
            numbers = {name: number for number, name in enumerate(tables)}
            features = [
                (numbers[feature.table_name], cast("Pooling | None", feature.pooling), feature.max_length)
                for feature in schema.id_features
            ]
            pool = batching.ThreadPool(threads)
            self._pooler = batching.Pooler(features, list(self._dims.values()), pool, self._scratch)
        else:
            self._transfer = Transfer(staging, False, tables, expander=Expander(schema, staging.device, threads))

    def read(self, batch: Batch, source: RowLookup) -> tuple[torch.Tensor, torch.Tensor, Embeddings]:
        """Returns dense features `[batch, n]`, labels `[batch, labels]` and the embeddings of a batch, on the device.

        Args:
            batch: valid, with the features of the schema.
            source: source of the rows.

        Raises:
            DeadlineError: a row server did not answer in time.
            PublishError: a row server does not have these rows.
        """
        if self._on_host and not self._names:
            return _tensor(batch.dense), _tensor(batch.labels), {}
        whole = source.whole
        if self._on_host and self._pools_all and whole is not None:
            columns = [batch.id_features[name] for name in self._names]
            if all(column.offsets is None and column.weights is None for column in columns):
                return _tensor(batch.dense), _tensor(batch.labels), self._rows_of_single_ids(columns, whole)
        routed = self._router.route(batch.id_features)
        if self._on_host:
            rows = self._rows(routed.ids, routed.bounds, source)
            return _tensor(batch.dense), _tensor(batch.labels), self._pooled(routed, rows, len(batch))
        with contextlib.nullcontext() if self._copies is None else self._copies.planned(routed.ids, source) as plan:
            if plan is None:
                rows = self._rows(routed.ids, routed.bounds, source)
            else:
                rows = self._rows(*_missing(routed, plan.wanted.buffer), source)
            wire = cast("Packed[np.float32 | np.float16]", rows)
            looked_up = LookedUp(wire, routed.narrow, routed.wide, routed.offsets, weights=routed.weights)
            prepared, ready = self._transfer.rows(batch, looked_up, plan)
        ready()
        embeddings = {} if prepared.pooled is None else prepared.pooled.embeddings()  # Without ID features.
        return prepared.dense, prepared.labels, embeddings

    def _rows_of_single_ids(self, columns: Sequence[IdColumn], rows: Rows) -> Embeddings:
        """Returns the embeddings of features with one id per sample, which are the rows, by one lookup."""
        samples = len(columns[0])
        ids = np.concatenate([column.values for column in columns])
        block = self._scratch.floats(samples * sum(self._feature_dims))
        lookup_packed([rows[name] for name in self._table_of], [samples] * len(columns), ids, block)
        parts = torch.from_numpy(block).split([samples * dim for dim in self._feature_dims])
        return {
            name: part.view(samples, dim)
            for name, part, dim in zip(self._names, parts, self._feature_dims, strict=True)
        }

    def _pooled(self, batch: RoutedBatch, rows: Packed[np.float32], samples: int) -> Embeddings:
        """Returns the embeddings, as `Expander` does for a batch without gradients, with less overhead."""
        inverse, ends = batch.inverse, dict(batch.offsets.items())
        weights = {} if batch.weights is None else dict(batch.weights.items())
        values, masks = self._pooler(
            rows.arrays(),
            [inverse[name] for name in self._names],
            [ends.get(name) for name in self._names],
            [weights.get(name) for name in self._names],
            samples,
        )
        return {
            name: torch.from_numpy(array)
            if mask is None
            else SequenceEmbedding(torch.from_numpy(array), torch.from_numpy(mask))
            for name, array, mask in zip(self._names, values, masks, strict=True)
        }

    def _rows(self, ids: Packed[np.uint64], bounds: Int64Array, source: RowLookup) -> Packed[np.float32]:
        """Returns the rows of distinct ids, which are sorted by table, and within a table by partition."""
        widths = [self._dims[name] for name in ids.names]
        buffer = self._scratch.floats(sum(map(operator.mul, ids.counts, widths)))
        rows = Packed(ids.names, ids.counts, buffer, widths)
        source.read(ids, bounds, rows)
        return rows


def _missing(batch: RoutedBatch, wanted: BoolArray) -> tuple[Packed[np.uint64], Int64Array]:
    """Returns the ids to look up, with their bounds."""
    bounds = missing_bounds(batch.ids.counts, batch.bounds, wanted)
    return Packed(batch.ids.names, bounds[:, -1].tolist(), batch.ids.buffer[wanted]), bounds


def _tensor(array: NDArray[np.float32]) -> torch.Tensor:
    """Returns the array as a tensor; copies a read-only array, as torch has no read-only tensors."""
    return torch.from_numpy(array) if array.flags.writeable else copied_array(array)
