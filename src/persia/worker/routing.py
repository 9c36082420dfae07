"""From the ID features of a batch to what each embedding PS is asked for, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

import numpy as np

from persia import batching
from persia.batching.batch import IdColumn
from persia.schema import Schema
from persia.types import Contribution, Floats, Gradients, Halves, Ids, Int64Array, Inverse

__all__ = ["Entry", "Router"]


class Entry(NamedTuple):
    """What is kept of a batch, from registration to the push of its gradient.

    Distinct ids are sorted by the PS that owns them: those of PS p are at `bounds[p]` to `bounds[p + 1]`.
    """

    ids: dict[str, Ids]
    bounds: dict[str, list[int]]
    inverse: dict[str, Inverse]
    offsets: dict[str, Int64Array | None]


class Router:
    """Removes duplicates over whole batches, sorts by owner, and cuts and joins accordingly. Thread-safe.

    Args:
        schema: which features read which table.
        servers: number of embedding PSs.
        threads: that share the work of a call.
    """

    def __init__(self, schema: Schema, servers: int, threads: int) -> None:
        self._servers = servers
        self._pool = batching.ThreadPool(threads)
        self._scratch = batching.Scratch()
        self._features: dict[str, list[str]] = {name: [] for name in schema.resolved_tables()}
        self._dims = {name: table.dim for name, table in schema.resolved_tables().items()}
        for feature in schema.id_features:
            self._features[feature.table_name].append(feature.name)
        self._max_length = {f.name: f.max_length for f in schema.id_features}

    def entry(self, id_features: Mapping[str, IdColumn]) -> Entry:
        """The distinct ids of a batch by table, sorted by owner."""
        columns = {name: _truncated(id_features[name], most) for name, most in self._max_length.items()}
        groups = [[columns[feature].values for feature in features] for features in self._features.values()]
        unique = batching.unique(groups, self._pool, self._scratch)
        if self._servers > 1:
            bounds = batching.group_by_owner(list(self._features), unique, self._servers, self._pool, self._scratch)
        else:
            bounds = [np.array([0, len(ids)], np.int64) for ids, _ in unique]
        ids: dict[str, Ids] = {}
        inverse: dict[str, Inverse] = {}
        for (table, features), (distinct, inverses) in zip(self._features.items(), unique, strict=True):
            ids[table] = distinct
            inverse.update(zip(features, inverses, strict=True))
        return Entry(
            ids,
            {table: ends.tolist() for table, ends in zip(self._features, bounds, strict=True)},
            inverse,
            {name: column.offsets for name, column in columns.items()},
        )

    @staticmethod
    def ids_of(entry: Entry, server: int) -> dict[str, Ids]:
        """What one PS is asked for."""
        return {table: ids[slice(*entry.bounds[table][server : server + 2])] for table, ids in entry.ids.items()}

    def join(self, entry: Entry, answers: Sequence[Mapping[str, Floats]]) -> dict[str, Floats]:
        """Rows of the distinct ids, from the answers of all PSs."""
        if len(answers) == 1:
            return dict(answers[0])
        rows = batching.borrow([(len(ids), self._dims[table]) for table, ids in entry.ids.items()], self._scratch)
        found = dict(zip(entry.ids, rows, strict=True))
        for server, answer in enumerate(answers):
            for table, part in answer.items():
                found[table][slice(*entry.bounds[table][server : server + 2])] = part
        return found

    def gradients_for(self, batches: Sequence[tuple[Entry, Contribution]], server: int) -> dict[str, Gradients]:
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
                if scales is None:
                    plain = cast("Floats", values[mine])
                else:
                    plain = batching.decode_rows(cast("Halves", values[mine]), scales[mine])
                parts.append(Gradients(entry.ids[table][mine], plain))
            if len(parts) == 1:
                gradients[table] = parts[0]
            elif parts:
                gradients[table] = Gradients(*batching.merge_gradients(parts, self._pool, self._scratch))
        return gradients


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
