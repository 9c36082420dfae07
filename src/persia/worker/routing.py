"""Splits the ids and gradients of a batch by embedding PS, and joins the rows that come back."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

import numpy as np

from persia import batching
from persia.batching.id_column import IdColumn
from persia.errors import StoreError
from persia.schema import Schema
from persia.types import Contribution, Floats, Gradients, Halves, Inverse, Packed, PackedGradients
from persia.types.values import words_of

__all__ = ["Entry", "Router"]


class Entry(NamedTuple):
    """A registered batch: its distinct ids by owner, and the place of every id.

    Attributes:
        found: its distinct ids, sorted by the PS that owns them, and the place of every id.
        offsets: by feature, of the features whose samples have any number of ids.
    """

    found: batching.PackedBatch
    offsets: Packed[np.int64]

    @property
    def ids(self) -> Packed[np.uint64]:
        """The distinct ids, by table."""
        return self.found.ids

    @property
    def inverse(self) -> dict[str, Inverse]:
        """The place of every id, by feature."""
        return {**self.found.narrow, **self.found.wide}


class Router:
    """Removes duplicates over whole batches, sorts ids by owner, and splits and joins accordingly. Thread-safe.

    Args:
        schema: which features read which table.
        servers: number of embedding PSs.
        threads: number of threads that share the work of a call.
    """

    def __init__(self, schema: Schema, servers: int, threads: int) -> None:
        self._servers = servers
        self._pool = batching.ThreadPool(threads)
        self._scratch = batching.Scratch()
        features: dict[str, list[str]] = {name: [] for name in schema.resolved_tables()}
        for feature in schema.id_features:
            features[feature.table_name].append(feature.name)
        self._features = list(features.items())
        tables = schema.resolved_tables()
        self._dims = {name: table.dim for name, table in tables.items()}
        self._words = {name: words_of(table.dtype, table.dim) for name, table in tables.items()}
        self._kept = {f.name: (f.max_length, f.keep == "last") for f in schema.id_features}

    def entry(self, id_features: Mapping[str, IdColumn]) -> Entry:
        """Returns the distinct ids of a batch by table, sorted by owner."""
        columns = {name: _truncated(id_features[name], *kept) for name, kept in self._kept.items()}
        values = [[columns[name].values for name in features] for _, features in self._features]
        found = batching.pack_batch(self._features, values, self._servers, self._pool, self._scratch)
        ends = {name: column.offsets for name, column in columns.items() if column.offsets is not None}
        return Entry(found, Packed.of(ends, np.int64))

    def part_of(self, entry: Entry, wanted: Packed[np.bool_]) -> Entry:
        """Returns an entry with some of the distinct ids; the places of ids stay those of the whole.

        Args:
            entry: the whole.
            wanted: by table, bool `[unique ids]`.

        Raises:
            StoreError: `wanted` does not fit the ids of the batch.
        """
        ids, bounds, narrow, wide = entry.found
        wanted = Packed.of(wanted, np.bool_)
        if list(wanted.names) != list(ids.names) or list(wanted.counts) != list(ids.counts):
            raise StoreError(
                f"wanted has {dict(zip(wanted.names, wanted.counts, strict=True))} rows; give one flag for each of the "
                f"distinct ids, {dict(zip(ids.names, ids.counts, strict=True))}."
            )
        before = np.concatenate(([0], np.cumsum(wanted.buffer, dtype=np.int64)))  # Wanted ids before each id.
        starts = np.concatenate(([0], np.cumsum(ids.counts)))[:-1, None].astype(np.int64)
        kept = np.ascontiguousarray(before[starts + bounds] - before[starts])
        part = Packed(ids.names, kept[:, -1].tolist(), ids.buffer[wanted.buffer])
        return Entry(batching.PackedBatch(part, kept, narrow, wide), entry.offsets)

    def ids_of(self, entry: Entry, server: int) -> Packed[np.uint64]:
        """Returns the ids to request from one PS."""
        return batching.take_part(entry.ids, entry.found.bounds, server)

    def join(self, entry: Entry, answers: Sequence[Packed[np.float32]]) -> Packed[np.float32]:
        """Returns the rows of the distinct ids as stored, from the answers of all PSs."""
        if len(answers) == 1:
            return answers[0]
        ids = entry.ids
        words = [self._words[name] for name in ids.names]
        rows = Packed(ids.names, ids.counts, self._scratch.floats(sum(map(operator.mul, ids.counts, words))), words)
        for server, answer in enumerate(answers):
            batching.put_part(rows, entry.found.bounds, server, answer.buffer)
        return rows

    def gradients_for(self, batches: Sequence[tuple[Entry, Contribution]]) -> list[PackedGradients]:
        """Returns the gradients to push to each PS: its part of those of a batch, or the sum over several batches.

        Raises:
            StoreError: gradients do not fit the rows of their batch.
        """
        parts = [self._parts(entry, contribution) for entry, contribution in batches]
        if len(parts) == 1:
            return parts[0]
        return [self._sum([part[server] for part in parts]) for server in range(self._servers)]

    def _parts(self, entry: Entry, contribution: Contribution) -> list[PackedGradients]:
        """Splits one contribution by PS."""
        gradients, ids, bounds = contribution.gradients, entry.ids, entry.found.bounds
        if list(gradients) != ids.names:  # Some tables took no part in the loss.
            places = {name: place for place, name in enumerate(ids.names)}
            unknown = [name for name in gradients if name not in places]
            if unknown:
                raise StoreError(f"The batch has no table {unknown[0]!r}.", table=unknown[0])
            bounds = np.ascontiguousarray(bounds[[places[name] for name in gradients]])
            ids = Packed.of({name: ids[name] for name in gradients}, np.uint64)
        rows = self._plain(contribution)
        dims = [self._dims[name] for name in ids.names]
        if list(rows.counts) != list(ids.counts) or (dims and list(rows.widths or ()) != dims):
            raise StoreError(
                f"Gradients must be [rows, dim] as looked up, {list(zip(ids.counts, dims, strict=True))} for "
                f"{', '.join(ids.names)}; got {list(rows.counts)} rows of {rows.widths}."
            )
        return [
            PackedGradients(batching.take_part(ids, bounds, server), batching.take_part(rows, bounds, server))
            for server in range(self._servers)
        ]

    def _plain(self, contribution: Contribution) -> Packed[np.float32]:
        """Returns the gradients as float32."""
        gradients, scales = contribution.gradients, contribution.scales
        try:
            if scales is None:
                return Packed.of(cast("Mapping[str, Floats]", gradients), np.float32)
            halves = Packed.of(cast("Mapping[str, Halves]", gradients), np.float16)
            factors = Packed.of(scales, np.float32)
        except ValueError as error:
            raise StoreError(f"Gradients: {error}.") from error
        if list(factors.names) != list(halves.names) or list(factors.counts) != list(halves.counts):
            raise StoreError("Gradients must have a scale for each row.")
        return batching.decode_packed(halves, factors, self._scratch)

    def _sum(self, parts: Sequence[PackedGradients]) -> PackedGradients:
        """Sums the gradients of several batches for one PS."""
        gradients: dict[str, Gradients] = {}
        for table, _ in self._features:
            mine = [part[table] for part in parts if table in part]
            if len(mine) == 1:
                gradients[table] = mine[0]
            elif mine:
                gradients[table] = Gradients(*batching.merge_gradients(mine, self._pool, self._scratch))
        return PackedGradients.of(gradients)


def _truncated(column: IdColumn, most: int | None, last: bool) -> IdColumn:
    """Returns the first or last `most` ids of each sample; the others are neither looked up nor admitted."""
    if most is None or column.offsets is None:
        return column
    lengths = np.diff(column.offsets)
    if not len(lengths) or lengths.max() <= most:
        return column
    index = np.arange(len(column.values))
    if last:
        kept = index >= np.repeat(column.offsets[1:] - most, lengths)
    else:
        kept = index < np.repeat(column.offsets[:-1] + most, lengths)
    offsets = np.concatenate(([0], np.cumsum(np.minimum(lengths, most)))).astype(np.int64)
    return IdColumn(column.values[kept], offsets)
