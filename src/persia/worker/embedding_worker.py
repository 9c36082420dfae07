"""The embedding worker (Persia paper, section 4.1, Algorithm 1)."""

from __future__ import annotations

import functools
import itertools
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

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
from persia.worker.calls import CallAll, call_all

__all__ = ["Worker"]


class _Entry(NamedTuple):
    """What is kept of a batch, from registration to the push of its gradient.

    Distinct ids are sorted by the PS that owns them: those of PS p are at `bounds[p]` to `bounds[p + 1]`.
    """

    ids: dict[str, Ids]
    bounds: dict[str, list[int]]
    inverse: dict[str, Inverse]
    offsets: dict[str, Int64Array | None]


class Worker:
    """Buffers the ID features of batches, removes duplicates over the whole batch, and routes rows and gradients.

    It keeps nothing that outlives a batch, so it needs no recovery. Safe to call from several threads.

    Args:
        schema: which features read which table.
        servers: the embedding PSs, by partition.
        threads: threads for duplicate removal, shared with nobody.
        rank: number of this embedding worker, 0 to 255.
        incarnation: rises with each restart, 1 to 65,535.
        call_all: how several PSs are asked at once.
    """

    def __init__(
        self,
        schema: Schema,
        servers: Sequence[EmbeddingPS],
        threads: int = 1,
        rank: int = 0,
        incarnation: int = 1,
        call_all: CallAll[Any] = call_all,
    ) -> None:
        self._servers = list(servers)
        self._call_all = call_all
        self._pool = batching.ThreadPool(threads)
        self._scratch = batching.Scratch()
        self._features: dict[str, list[str]] = {name: [] for name in schema.resolved_tables()}
        self._dims = {name: table.dim for name, table in schema.resolved_tables().items()}
        for feature in schema.id_features:
            self._features[feature.table_name].append(feature.name)
        self._max_length = {f.name: f.max_length for f in schema.id_features}
        self._rank, self._incarnation = rank, incarnation
        self._counter = itertools.count()
        self._entries: dict[int, _Entry] = {}
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        # Of each NN worker, by (generation, rank, part): its last push, for the case that the reply is lost.
        self._outcomes: dict[tuple[int, int, int], tuple[int, dict[str, UpdateCounts]]] = {}

    def register(self, id_features: Mapping[str, IdColumn]) -> int:
        """Buffers a batch, duplicates removed, and returns its batch id (docs: rank, incarnation, counter)."""
        entry = self._deduplicate(id_features)
        batch_id = BatchId(self._rank, self._incarnation, next(self._counter)).pack()
        self._entries[batch_id] = entry
        self._count("registered")
        return batch_id

    def lookup(self, batch_id: int, train: bool = True) -> LookedUp:
        """Rows of a registered batch; without `train` they are only read, and the batch is forgotten.

        Raises:
            StaleBatchError: the batch is unknown, pushed or released.
        """
        found = self._rows(self._entry(batch_id), train)
        self._count("looked_up")
        if not train:
            self.release(batch_id)
        return found

    def evaluate(self, id_features: Mapping[str, IdColumn]) -> LookedUp:
        """Rows of a batch, read-only; nothing is buffered."""
        return self._rows(self._deduplicate(id_features), train=False)

    def push(self, header: PushHeader, contributions: Sequence[Contribution]) -> dict[str, UpdateCounts]:
        """Sends the summed gradients of the batches to every PS, also to those without any, and forgets the batches.

        A repetition of the last push of an NN worker is answered without the batches.

        Raises:
            StaleBatchError: a batch is unknown, pushed or released; nothing is applied.
        """
        sender = (header.generation, header.rank, header.part)
        sequence, counts = self._outcomes.get(sender, (0, {}))
        if sequence == header.sequence:
            return counts
        batches = [(self._entry(contribution.batch_id), contribution) for contribution in contributions]
        answers = self._call_all(
            [
                functools.partial(server.push, header, self._gradients(batches, number))
                for number, server in enumerate(self._servers)
            ]
        )
        counts = {}
        for answer in answers:
            for table, more in answer.items():
                counts[table] = UpdateCounts(*map(sum, zip(counts.get(table, UpdateCounts()), more, strict=True)))
        with self._lock:
            for known in [known for known in self._outcomes if known[0] < header.generation]:
                del self._outcomes[known]
            self._outcomes[sender] = header.sequence, counts
        for contribution in contributions:
            self._forget(contribution.batch_id, "pushed")
        return counts

    def _gradients(self, batches: Sequence[tuple[_Entry, Contribution]], server: int) -> dict[str, Gradients]:
        """What one PS gets: slices of what has come, or the sum of several batches' slices."""
        gradients: dict[str, Gradients] = {}
        for table in self._features:
            parts: list[Gradients] = []
            for entry, contribution in batches:
                values = contribution.gradients.get(table)
                if values is None:
                    continue
                mine = slice(*entry.bounds[table][server : server + 2])
                scales = (contribution.scales or {}).get(table)
                plain = values[mine] if scales is None else values[mine] * scales[mine, None]
                parts.append(Gradients(entry.ids[table][mine], cast("Floats", plain)))
            if len(parts) == 1:
                gradients[table] = parts[0]
            elif parts:
                gradients[table] = Gradients(*batching.merge_gradients(parts, self._pool, self._scratch))
        return gradients

    def release(self, batch_id: int) -> None:
        """Forgets a batch that will have no gradient; unknown batches are no error."""
        self._forget(batch_id, "released")

    def statistics(self) -> dict[str, int]:
        """Batches buffered now; batches registered, looked up, pushed and released so far."""
        counts = {name: self._counts[name] for name in ("registered", "looked_up", "pushed", "released")}
        return {"buffered": self.buffered, **counts}

    @property
    def buffered(self) -> int:
        """Batches between registration and push."""
        return len(self._entries)

    def _rows(self, entry: _Entry, train: bool) -> LookedUp:
        return LookedUp(dict(self._ask(entry, train)), entry.inverse, entry.offsets)

    def _ask(self, entry: _Entry, train: bool) -> dict[str, Floats]:
        if len(self._servers) == 1:
            return self._servers[0].lookup(entry.ids, train)
        wanted = [
            {table: ids[entry.bounds[table][p] : entry.bounds[table][p + 1]] for table, ids in entry.ids.items()}
            for p in range(len(self._servers))
        ]
        answers = self._call_all(
            [functools.partial(server.lookup, ids, train) for server, ids in zip(self._servers, wanted, strict=True)]
        )
        rows = batching.borrow([(len(ids), self._dims[table]) for table, ids in entry.ids.items()], self._scratch)
        found = dict(zip(entry.ids, rows, strict=True))
        for p, answer in enumerate(answers):
            for table, part in answer.items():
                found[table][entry.bounds[table][p] : entry.bounds[table][p + 1]] = part
        return found

    def _forget(self, batch_id: int, what: str) -> None:
        if self._entries.pop(batch_id, None) is not None:
            self._count(what)

    def _count(self, what: str) -> None:
        with self._lock:
            self._counts[what] += 1

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
        unique = batching.unique(groups, self._pool, self._scratch)
        if len(self._servers) > 1:
            bounds = batching.group_by_owner(
                list(self._features), unique, len(self._servers), self._pool, self._scratch
            )
        else:
            bounds = [np.array([0, len(ids)], np.int64) for ids, _ in unique]
        ids: dict[str, Ids] = {}
        inverse: dict[str, Inverse] = {}
        for (table, features), (distinct, inverses) in zip(self._features.items(), unique, strict=True):
            ids[table] = distinct
            inverse.update(zip(features, inverses, strict=True))
        return _Entry(
            ids,
            {table: ends.tolist() for table, ends in zip(self._features, bounds, strict=True)},
            inverse,
            {name: column.offsets for name, column in columns.items()},
        )


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
