"""Reads the embeddings of a batch from served rows, with the same code as training."""

from __future__ import annotations

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
from persia.serve.row_sources import RowLookup, Rows
from persia.store.served import lookup_packed
from persia.types import BucketMap, LookedUp, Packed
from persia.worker.routing import Router

__all__ = ["EmbeddingReader"]


class EmbeddingReader:
    """Looks up the ids of batches, and pools their rows. Read-only. Thread-safe.

    Args:
        schema: the features to read.
        buckets: the source of each bucket of ids, as in `RowLookup`.
        staging: copies tensors to the device of the network.
        threads: threads of each call.
    """

    def __init__(self, schema: Schema, buckets: BucketMap, staging: Staging, threads: int) -> None:
        # The log has float32 values, whatever the dtype of a table in training.
        tables = {name: msgspec.structs.replace(t, dtype="float32") for name, t in schema.resolved_tables().items()}
        self.schema = schema
        self._dims = {name: table.dim for name, table in tables.items()}
        self._router = Router(schema, buckets, threads)
        self._scratch = batching.Scratch()
        self._names = [feature.name for feature in schema.id_features]
        self._on_host = staging.device.type == "cpu"
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
        rows = self._rows(routed, source)
        if self._on_host:
            return _tensor(batch.dense), _tensor(batch.labels), self._pooled(routed, rows, len(batch))
        wire = cast("Packed[np.float32 | np.float16]", rows)
        looked_up = LookedUp(wire, routed.narrow, routed.wide, routed.offsets, weights=routed.weights)
        prepared, ready = self._transfer.rows(batch, looked_up)
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

    def _rows(self, batch: RoutedBatch, source: RowLookup) -> Packed[np.float32]:
        """Returns the rows of the distinct ids, which are sorted by table, and within a table by partition."""
        ids = batch.ids
        widths = [self._dims[name] for name in ids.names]
        buffer = self._scratch.floats(sum(map(operator.mul, ids.counts, widths)))
        rows = Packed(ids.names, ids.counts, buffer, widths)
        source.read(ids, batch.bounds, rows)
        return rows


def _tensor(array: NDArray[np.float32]) -> torch.Tensor:
    """Returns the array as a tensor; copies a read-only array, as torch has no read-only tensors."""
    return torch.from_numpy(array) if array.flags.writeable else copied_array(array)
