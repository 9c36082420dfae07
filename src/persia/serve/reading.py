"""Reads the embeddings of a batch from served rows, with the same code as training."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias, cast

import msgspec
import numpy as np
import torch

from persia import batching
from persia.batching.batch import Batch
from persia.nn.pooling import Embeddings, Expander
from persia.nn.transfer import Staging, Transfer
from persia.schema import Schema
from persia.store.served import ServedTable, lookup_packed
from persia.types import LookedUp, Packed
from persia.worker.routing import Entry, Router

__all__ = ["EmbeddingReader", "Rows", "part_of"]

Rows: TypeAlias = Mapping[str, ServedTable]
"""The rows of one PS, by table."""


class EmbeddingReader:
    """Looks the ids of batches up, and pools their rows. Read-only. Thread-safe.

    Args:
        schema: the features to read.
        servers: number of PSs, over which the rows are partitioned.
        staging: brings tensors to the device of the network.
        threads: of each call.
    """

    def __init__(self, schema: Schema, servers: int, staging: Staging, threads: int) -> None:
        # The log has values as float32, whatever the dtype of a table is in training.
        tables = {name: msgspec.structs.replace(t, dtype="float32") for name, t in schema.resolved_tables().items()}
        self.schema = schema
        self._dims = {name: table.dim for name, table in tables.items()}
        self._router = Router(schema, servers, threads)
        self._expander = Expander(schema, staging.device, threads)
        self._transfer = Transfer(staging, self._expander.on_host, tables)
        self._scratch = batching.Scratch()

    def read(self, batch: Batch, servers: Sequence[Rows]) -> tuple[torch.Tensor, torch.Tensor, Embeddings]:
        """Returns dense features `[batch, n]`, labels `[batch, labels]` and the embeddings of a batch, on the device.

        Args:
            batch: valid, with the features of the schema.
            servers: rows by PS.
        """
        entry = self._router.entry(batch.id_features)
        _, _, narrow, wide = entry.found
        prepared, ready = self._transfer.rows(batch, LookedUp(self._rows(entry, servers), narrow, wide, entry.offsets))
        ready()
        return prepared.dense, prepared.labels, self._expander(prepared.rows, prepared.inverse, prepared.offsets)

    def _rows(self, entry: Entry, servers: Sequence[Rows]) -> Packed[np.float32 | np.float16]:
        """Returns the rows of the distinct ids, which are sorted by table, and those of a table by PS."""
        ids = entry.ids
        widths = [self._dims[name] for name in ids.names]
        buffer = self._scratch.floats(sum(map(operator.mul, ids.counts, widths)))
        tables = [rows[name] for name in ids.names for rows in servers]
        counts: list[int] = np.diff(entry.found.bounds).reshape(-1).tolist()
        lookup_packed(tables, counts, ids.buffer, buffer)
        return cast("Packed[np.float32 | np.float16]", Packed(ids.names, ids.counts, buffer, widths))


def part_of(schema: Schema, features: Collection[str]) -> Schema:
    """Returns the schema of some ID-type features, whose ids are there: nothing is left to be computed.

    Args:
        schema: of all features.
        features: names of the ID-type features to keep. All dense features and labels stay.
    """
    kept = [
        msgspec.structs.replace(
            feature,
            cross=(),
            of=None,
            mapping=None,
            age_since=None,
            aligned_with=feature.aligned_with if feature.aligned_with in features else None,
        )
        for feature in schema.id_features
        if feature.name in features
    ]
    used = {feature.table_name for feature in kept}
    tables = [table for name, table in schema.resolved_tables().items() if name in used]
    return Schema(kept, schema.dense_features, schema.labels, tables)
