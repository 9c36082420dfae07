"""The Protocols through which roles meet, and nothing else.

A role is a plain class that has these methods. A caller holds the object itself or a stub of it and cannot tell.
All methods block, are safe to call from several threads, and raise :class:`persia.errors.PersiaError`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from persia.batching.batch import Batch, IdColumn
from persia.modes import Mode
from persia.schema import EmbeddingOptimizer, Schema, Table
from persia.types import Contribution, Floats, Ids, LookedUp, UpdateCounts

__all__ = ["Cluster", "Connection", "EmbeddingPS", "EmbeddingWorker", "RowChunk", "Seekable"]


class RowChunk(NamedTuple):
    """Whole rows of one shard, for checkpoints.

    Attributes:
        table: name of the table.
        shard: internal slice of the PS that the rows are from.
        arrays: the columns of `persia.store.Rows`: `ids` uint64 `[n]`, `embeddings` float32 `[n, dim]`, `state`
            float32 `[n, width]`, `update_count`, `last_step` and `stamp` uint32 `[n]`.
    """

    table: str
    shard: int
    arrays: dict[str, np.ndarray]


class EmbeddingPS(Protocol):
    """Embedding parameter server: owns the rows of a partition of every table."""

    def tables(self) -> Mapping[str, Table]:
        """The tables by name, their optimizers filled in."""

    def lookup(self, ids: Mapping[str, Ids], train: bool) -> dict[str, Floats]:
        """Rows of distinct ids, by table.

        Args:
            ids: by table, uint64 `[n]`, distinct.
            train: whether missing ids may be admitted; otherwise they read as zeros and nothing changes.

        Returns:
            By table, float32 `[n, dim]`.
        """

    def push(
        self, client: int, sequence: int, step: int, gradients: Mapping[str, tuple[Ids, Floats]]
    ) -> dict[str, UpdateCounts]:
        """Applies gradients, by table (ids `[n]`, gradients `[n, dim]`); once per (client, sequence).

        Args:
            client: identity of the sender, not 0.
            sequence: rises by one with every push of the client.
            step: global step; the learning-rate schedule and `last_step` of the rows follow it.
            gradients: by table.
        """

    def statistics(self) -> dict[str, dict[str, int]]:
        """Counters by table: rows, bytes, hits, misses, admitted, evicted, absent gradients, ..."""

    def export_rows(self) -> Iterator[RowChunk]:
        """All rows, in chunks of bounded size; each row is of one moment."""

    def import_rows(self, chunk: RowChunk) -> None:
        """Puts rows back; rows of the same ids are replaced."""

    def state(self) -> dict[str, Any]:
        """What besides the rows decides the future: clocks, counters, admission sketches, applied pushes."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Puts `state()` back, after the rows."""


class EmbeddingWorker(Protocol):
    """Embedding worker (Persia paper, Algorithm 1): buffers ID features, removes duplicates, routes."""

    def register(self, id_features: Mapping[str, IdColumn]) -> int:
        """Buffers the ID features of a batch and returns its batch id."""

    def lookup(self, batch_id: int) -> LookedUp:
        """Rows of a registered batch, for training. The batch stays registered until its push or release."""

    def push(self, contributions: Sequence[Contribution], step: int) -> dict[str, UpdateCounts]:
        """Applies the sum of the gradients of one or several batches as one update, and forgets the batches."""

    def release(self, batch_id: int) -> None:
        """Forgets a batch that will have no gradient."""

    def evaluate(self, id_features: Mapping[str, IdColumn]) -> LookedUp:
        """Rows for evaluation: read-only, nothing is admitted, touched or buffered."""


@runtime_checkable
class Seekable(Protocol):
    """A source of batches that can begin anywhere, so that a resumed run neither repeats nor skips a batch."""

    def batches(self, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from number `start` on; the same ones every time."""


class Connection(NamedTuple):
    """What an NN worker holds of a cluster."""

    worker: EmbeddingWorker
    servers: Sequence[EmbeddingPS]


class Cluster(Protocol):
    """A way to run the roles."""

    def connect(self, schema: Schema, optimizer: EmbeddingOptimizer, mode: Mode, seed: int) -> Connection:
        """Starts the roles for this schema and returns what an NN worker needs of them.

        Args:
            schema: the input of the model.
            optimizer: for tables that declare none.
            mode: how gradients are aggregated.
            seed: of row initialisation and admission.
        """
