"""The view of a request: one version of the network, and rows of at least its step."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Iterator

import torch

from persia.batching.batch import Batch
from persia.nn.staging import Staging
from persia.schema import Schema
from persia.serve.device_rows import DeviceRows
from persia.serve.embedding_reader import EmbeddingReader
from persia.serve.network_builder import Network
from persia.serve.row_sources import RowLookup
from persia.serve.schema_parts import part_of
from persia.types import BucketMap

__all__ = ["Readers", "View"]

MAX_PARTS = 32
"""Maximum number of sets of features with a reader."""


class Readers:
    """Readers of all features, and of subsets. Thread-safe.

    Args:
        schema: schema of all features.
        buckets: the source of each bucket of ids, as in `RowLookup`.
        staging: copies tensors to the device of the network.
        threads: threads of each request.
        copies: copies of rows on the device, for the reader of all features; None without.
    """

    def __init__(
        self, schema: Schema, buckets: BucketMap, staging: Staging, threads: int, copies: DeviceRows | None = None
    ) -> None:
        self.whole = EmbeddingReader(schema, buckets, staging, threads, copies)
        self._arguments = (buckets, staging, threads)
        self._parts: dict[frozenset[str], EmbeddingReader] = {}
        self._lock = threading.Lock()

    def of(self, features: Collection[str]) -> EmbeddingReader:
        """Returns a reader of one or more ID-type features."""
        key = frozenset(features)
        with self._lock:
            reader = self._parts.get(key)
            if reader is None:
                if len(self._parts) >= MAX_PARTS:  # A client may request any number of sets.
                    del self._parts[next(iter(self._parts))]
                reader = EmbeddingReader(part_of(self.whole.schema, key), *self._arguments)
                self._parts[key] = reader
        return reader


class View:
    """A version of the network with the rows that belong to it. A request uses one view from start to end.

    Args:
        epoch: number of the epoch.
        network: the version.
        rows: rows of the epoch, which contain at least the step of the network.
        readers: readers of its schema.
    """

    def __init__(self, epoch: int, network: Network, rows: RowLookup, readers: Readers) -> None:
        self.epoch = epoch
        self.network = network
        self.rows = rows
        self.readers = readers
        self._requests = 0
        self._lock = threading.Lock()

    @property
    def schema(self) -> Schema:
        """The input of the network."""
        return self.readers.whole.schema

    @property
    def used(self) -> bool:
        """Whether a request uses this view."""
        return self._requests > 0

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Counts a request, so that the thread of updates frees old rows, rather than the request."""
        with self._lock:
            self._requests += 1
        try:
            yield
        finally:
            with self._lock:
                self._requests -= 1

    def logits(self, batch: Batch) -> torch.Tensor:
        """Returns logits float32 `[batch, labels]` of a valid batch, on the device. Blocks for the computation."""
        with torch.no_grad():
            dense, labels, embeddings = self.readers.whole.read(batch, self.rows)
        return self.network.logits(dense, embeddings, labels)
