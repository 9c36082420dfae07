"""The embedding worker (Persia paper, section 4.1, Algorithm 1)."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

import numpy as np

from persia import batching
from persia.batching.batch import IdColumn
from persia.errors import StaleBatchError
from persia.schema import Schema
from persia.services import EmbeddingPS
from persia.types import (
    BatchId,
    Contribution,
    Floats,
    Gradients,
    Ids,
    Int64Array,
    Inverse,
    LookedUp,
    PushHeader,
    UpdateCounts,
)

__all__ = ["Worker"]


class _Entry(NamedTuple):
    """What is kept of a batch, from registration to the push of its gradient."""

    ids: dict[str, Ids]
    inverse: dict[str, Inverse]
    offsets: dict[str, Int64Array | None]


class Worker:
    """Buffers the ID features of batches, removes duplicates over the whole batch, and routes rows and gradients.

    It keeps nothing that outlives a batch, so it needs no recovery. Safe to call from several threads.

    Args:
        schema: which features read which table.
        server: the embedding PS.
        threads: threads for duplicate removal, shared with nobody.
        rank: number of this embedding worker, 0 to 255.
        incarnation: rises with each restart, 1 to 65,535.
    """

    def __init__(
        self, schema: Schema, server: EmbeddingPS, threads: int = 1, rank: int = 0, incarnation: int = 1
    ) -> None:
        self._server = server
        self._pool = batching.ThreadPool(threads)
        self._scratch = batching.Scratch()
        self._features: dict[str, list[str]] = {name: [] for name in schema.resolved_tables()}
        for feature in schema.id_features:
            self._features[feature.table_name].append(feature.name)
        self._max_length = {f.name: f.max_length for f in schema.id_features}
        self._rank, self._incarnation = rank, incarnation
        self._counter = itertools.count()
        self._entries: dict[int, _Entry] = {}
        self._counts: Counter[str] = Counter()

    def register(self, id_features: Mapping[str, IdColumn]) -> int:
        """Buffers a batch, duplicates removed, and returns its batch id (docs: rank, incarnation, counter)."""
        entry = self._deduplicate(id_features)
        batch_id = BatchId(self._rank, self._incarnation, next(self._counter)).pack()
        self._entries[batch_id] = entry
        self._counts["registered"] += 1
        return batch_id

    def lookup(self, batch_id: int, train: bool = True) -> LookedUp:
        """Rows of a registered batch; without `train` they are only read, and the batch is forgotten.

        Raises:
            StaleBatchError: the batch is unknown, pushed or released.
        """
        entry = self._entry(batch_id)
        found = self._rows(entry, train)
        self._counts["looked_up"] += 1
        if not train:
            self.release(batch_id)
        return found

    def evaluate(self, id_features: Mapping[str, IdColumn]) -> LookedUp:
        """Rows of a batch, read-only; nothing is buffered."""
        return self._rows(self._deduplicate(id_features), train=False)

    def push(self, header: PushHeader, contributions: Sequence[Contribution]) -> dict[str, UpdateCounts]:
        """Sends the summed gradients of the batches to the PS and forgets the batches.

        Raises:
            StaleBatchError: a batch is unknown, pushed or released; nothing is applied.
        """
        entries = [self._entry(c.batch_id) for c in contributions]
        gradients: dict[str, Gradients] = {}
        for table in self._features:
            parts = [
                Gradients(entry.ids[table], cast("Floats", contribution.gradients[table]))
                for entry, contribution in zip(entries, contributions, strict=True)
                if table in contribution.gradients
            ]
            if len(parts) == 1:
                gradients[table] = parts[0]
            elif parts:
                gradients[table] = Gradients(*batching.merge_gradients(parts, self._pool, self._scratch))
        counts = self._server.push(header, gradients)
        for contribution in contributions:
            self._counts["pushed"] += self._entries.pop(contribution.batch_id, None) is not None
        return counts

    def release(self, batch_id: int) -> None:
        """Forgets a batch that will have no gradient; unknown batches are no error."""
        self._counts["released"] += self._entries.pop(batch_id, None) is not None

    def statistics(self) -> dict[str, int]:
        """Batches buffered now; batches registered, looked up, pushed and released so far."""
        counts = {name: self._counts[name] for name in ("registered", "looked_up", "pushed", "released")}
        return {"buffered": self.buffered, **counts}

    @property
    def buffered(self) -> int:
        """Batches between registration and push."""
        return len(self._entries)

    def _rows(self, entry: _Entry, train: bool) -> LookedUp:
        return LookedUp(dict(self._server.lookup(entry.ids, train)), entry.inverse, entry.offsets)

    def _entry(self, batch_id: int) -> _Entry:
        entry = self._entries.get(batch_id)
        if entry is None:
            raise StaleBatchError(
                f"Batch {batch_id:#x} is not buffered: its gradient was pushed or it was released. "
                "Call backward once per batch, before drawing the next.",
                batch_id=batch_id,
            )
        return entry

    def _deduplicate(self, id_features: Mapping[str, IdColumn]) -> _Entry:
        columns = {name: _truncated(id_features[name], most) for name, most in self._max_length.items()}
        groups = [[columns[feature].values for feature in features] for features in self._features.values()]
        ids: dict[str, Ids] = {}
        inverse: dict[str, Inverse] = {}
        for (table, features), (unique, inverses) in zip(
            self._features.items(), batching.unique(groups, self._pool, self._scratch), strict=True
        ):
            ids[table] = unique
            inverse.update(zip(features, inverses, strict=True))
        return _Entry(ids, inverse, {name: column.offsets for name, column in columns.items()})


def _truncated(column: IdColumn, most: int | None) -> IdColumn:
    """The first `most` ids of each sample: what is not read is neither looked up nor admitted."""
    if most is None or column.offsets is None:
        return column
    lengths = np.diff(column.offsets)
    if not len(lengths) or lengths.max() <= most:
        return column
    position = np.arange(len(column.values)) - np.repeat(column.offsets[:-1], lengths)
    offsets = np.concatenate(([0], np.cumsum(np.minimum(lengths, most)))).astype(np.int64)
    return IdColumn(column.values[position < most], offsets)
