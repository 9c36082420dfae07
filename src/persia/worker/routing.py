"""Splits the ids and gradients of a batch by embedding PS, and joins the rows of the answers."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from persia import batching
from persia.batching import RoutedBatch
from persia.batching.id_column import IdColumn
from persia.errors import StoreError
from persia.schema import Schema
from persia.types import BucketMap, Contribution, Floats, FreshRows, Gradients, Halves, Moment, Packed, PackedGradients
from persia.types.half_floats import words_of

__all__ = ["Router", "SplitBatch"]


class SplitBatch(NamedTuple):
    """A batch that was looked up ahead: with the rows that were, and those that were left out.

    Attributes:
        ahead: the batch with the ids that were looked up.
        ahead_places: their places among all its ids; None if no row was left out.
        late: the batch with the ids that were left out; None without any.
        late_places: their places among all its ids.
    """

    ahead: RoutedBatch
    ahead_places: Packed[np.uint32] | None = None
    late: RoutedBatch | None = None
    late_places: Packed[np.uint32] | None = None


class Router:
    """Removes duplicates over whole batches, sorts ids by owner, and splits and joins accordingly. Thread-safe.

    Args:
        schema: schema of the model, which maps features to tables.
        buckets: the PS of each bucket of ids.
        threads: number of threads that share the work of a call.

    Attributes:
        buckets: see above; may be set to another map.
    """

    def __init__(self, schema: Schema, buckets: BucketMap, threads: int) -> None:
        self.buckets = buckets
        self._pool = batching.ThreadPool(threads)
        self._scratch = batching.Scratch()
        features: dict[str, list[str]] = {name: [] for name in schema.resolved_tables()}
        for feature in schema.id_features:
            features[feature.table_name].append(feature.name)
        self._features = list(features.items())
        tables = schema.resolved_tables()
        self._dims = {name: table.dim for name, table in tables.items()}
        self._words = {name: words_of(table.dtype, table.dim) for name, table in tables.items()}
        self._truncation = {f.name: (f.max_length, f.keep == "last") for f in schema.id_features}

    def route(self, id_features: Mapping[str, IdColumn]) -> RoutedBatch:
        """Returns the distinct ids of a batch by table, sorted by owner."""
        columns = {name: id_features[name] for name in self._truncation}
        for name, (most, last) in self._truncation.items():
            if most is not None:
                columns[name] = _truncated(columns[name], most, last)
        return batching.route_batch(self._features, columns, self.buckets, self._pool, self._scratch)

    def sort_again(self, batch: RoutedBatch) -> RoutedBatch:
        """Returns a batch sorted by the current map, from one sorted by another. The order of its ids changes."""
        columns: dict[str, IdColumn] = {}
        for table, features in self._features:
            for name in features:
                inverse = batch.narrow[name] if name in batch.narrow else batch.wide[name]
                weights = None if batch.weights is None else batch.weights.get(name)
                columns[name] = IdColumn(batch.ids[table][inverse], batch.offsets.get(name), weights)
        return batching.route_batch(self._features, columns, self.buckets, self._pool, self._scratch)

    def part_of(self, batch: RoutedBatch, wanted: Packed[np.bool_]) -> RoutedBatch:
        """Returns a batch with some of its distinct ids; the inverse indices are unchanged.

        Args:
            batch: the whole batch.
            wanted: whether to include each distinct id, by table, bool `[unique ids]`.

        Raises:
            StoreError: `wanted` does not match the ids of the batch.
        """
        ids, bounds = batch.ids, batch.bounds
        wanted = Packed.of(wanted, np.bool_)
        if list(wanted.names) != list(ids.names) or list(wanted.counts) != list(ids.counts):
            raise StoreError(
                f"wanted has {dict(zip(wanted.names, wanted.counts, strict=True))} rows; give one flag for each of the "
                f"distinct ids, {dict(zip(ids.names, ids.counts, strict=True))}."
            )
        index = np.flatnonzero(wanted.buffer)
        starts = np.concatenate(([0], np.cumsum(ids.counts)))[:-1, None].astype(np.int64)
        before = np.searchsorted(index, starts + bounds)  # Wanted ids before each bound.
        part_bounds = np.ascontiguousarray(before - before[:, :1])
        part = Packed(ids.names, part_bounds[:, -1].tolist(), ids.buffer[index])
        return batch._replace(ids=part, bounds=part_bounds)

    def ids_of(self, batch: RoutedBatch, server: int) -> Packed[np.uint64]:
        """Returns the ids to request from one PS."""
        return batching.take_part(batch.ids, batch.bounds, server)

    def join(self, batch: RoutedBatch, answers: Sequence[Packed[np.float32]]) -> Packed[np.float32]:
        """Returns the rows of the distinct ids as stored, from the answers of all PSs."""
        if len(answers) == 1:
            return answers[0]
        ids = batch.ids
        words = [self._words[name] for name in ids.names]
        rows = Packed(ids.names, ids.counts, self._scratch.floats(sum(map(operator.mul, ids.counts, words))), words)
        for server, answer in enumerate(answers):
            batching.put_part(rows, batch.bounds, server, answer.buffer)
        return rows

    def split(self, batch: RoutedBatch, left_out: Packed[np.bool_] | None) -> SplitBatch:
        """Returns a batch without the rows that were left out, and with only these.

        Args:
            batch: the whole batch.
            left_out: whether each distinct id was left out, by table, bool `[unique ids]`; None if none was.

        Raises:
            StoreError: `left_out` does not match the ids of the batch.
        """
        if left_out is None:
            return SplitBatch(batch)
        late = self.part_of(batch, left_out)
        others = batching.complement(left_out)
        return SplitBatch(self.part_of(batch, others), batching.places_of(others), late, batching.places_of(left_out))

    def ids_to_refresh(
        self, split: SplitBatch, server: int, seen: Moment
    ) -> tuple[Packed[np.uint64], Moment, Packed[np.uint64] | None, int]:
        """Returns the arguments of `EmbeddingPS.refresh` for one PS."""
        late = None if split.late is None else self.ids_of(split.late, server)
        return self.ids_of(split.ahead, server), seen, late, split.ahead.buckets.version

    def join_fresh(self, split: SplitBatch, answers: Sequence[FreshRows]) -> FreshRows:
        """Returns the refreshed rows of a batch from the answers of all PSs. Places are among all its ids."""
        if len(answers) == 1 and split.late is None:
            return answers[0]
        parts: list[tuple[Packed[np.uint32], NDArray[Any]]] = []
        for server, answer in enumerate(answers):
            parts.append((self._places_in_batch(split, server, answer.places), answer.rows.buffer))
            if split.late is not None and split.late_places is not None and answer.late is not None:
                late = batching.take_part(split.late_places, split.late.bounds, server)
                parts.append((late, answer.late.buffer))
        ids = split.ahead.ids
        counts = np.array([own.counts for own, _ in parts], np.int64).T.reshape(len(ids), len(parts))
        ends = np.zeros((len(ids), len(parts) + 1), np.int64)
        np.cumsum(counts, axis=1, out=ends[:, 1:])
        sizes = ends[:, -1].tolist()
        words = [self._words[name] for name in ids.names]
        places = Packed(ids.names, sizes, np.empty(sum(sizes), np.uint32))
        rows = Packed(ids.names, sizes, self._scratch.floats(sum(map(operator.mul, sizes, words))), words)
        for number, (own, values) in enumerate(parts):
            batching.put_part(places, ends, number, own.buffer)
            batching.put_part(rows, ends, number, values)
        moments = [moment for answer in answers for moment in answer.seen]
        return FreshRows(places, cast("Packed[np.float32 | np.float16]", rows), moments)

    def _places_in_batch(self, split: SplitBatch, server: int, places: Packed[np.uint32]) -> Packed[np.uint32]:
        """Returns places among all ids of a batch, from places among those that one PS was asked to refresh."""
        first = np.repeat(split.ahead.bounds[:, server], places.counts).astype(np.uint32)
        ahead = Packed(places.names, places.counts, places.buffer + first)
        return ahead if split.ahead_places is None else batching.take_places(split.ahead_places, ahead)

    def gradients_for(self, batches: Sequence[tuple[RoutedBatch, Contribution]]) -> tuple[list[PackedGradients], int]:
        """Returns the gradients to push to each PS, summed over the batches, and the version of their bucket map.

        Raises:
            StoreError: gradients do not match the rows of their batch.
        """
        # If their maps differ, no PS has the oldest one, and all refuse the push.
        version = min((batch.buckets.version for batch, _ in batches), default=self.buckets.version)
        parts = [self._parts(batch, contribution) for batch, contribution in batches]
        if len(parts) == 1:
            return parts[0], version
        sums = [self._sum([part[server] for part in parts]) for server in range(self.buckets.servers)]
        return sums, version

    def _parts(self, batch: RoutedBatch, contribution: Contribution) -> list[PackedGradients]:
        """Splits one contribution by PS."""
        if contribution.part is not None:
            batch = self.part_of(batch, contribution.part)
        gradients, ids, bounds = contribution.gradients, batch.ids, batch.bounds
        if list(gradients) != ids.names:  # The loss does not depend on some tables.
            places = {name: place for place, name in enumerate(ids.names)}
            unknown = [name for name in gradients if name not in places]
            if unknown:
                raise StoreError(f"The batch has no table {unknown[0]!r}.", table=unknown[0])
            bounds = np.ascontiguousarray(bounds[[places[name] for name in gradients]])
            ids = Packed.of({name: ids[name] for name in gradients}, np.uint64)
        rows = self.plain(contribution)
        dims = [self._dims[name] for name in ids.names]
        if list(rows.counts) != list(ids.counts) or (dims and list(rows.widths or ()) != dims):
            raise StoreError(
                f"Gradients of {', '.join(ids.names)} must be [rows, dim] as looked up, "
                f"{list(zip(ids.counts, dims, strict=True))}; got {list(rows.counts)} rows of {rows.widths}."
            )
        return [
            PackedGradients(batching.take_part(ids, bounds, server), batching.take_part(rows, bounds, server))
            for server in range(batch.buckets.servers)
        ]

    def plain(self, contribution: Contribution) -> Packed[np.float32]:
        """Returns the gradients as float32.

        Raises:
            StoreError: they are malformed.
        """
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
            table_parts = [part[table] for part in parts if table in part]
            if len(table_parts) == 1:
                gradients[table] = table_parts[0]
            elif table_parts:
                gradients[table] = Gradients(*batching.merge_gradients(table_parts, self._pool, self._scratch))
        return PackedGradients.of(gradients)


def _truncated(column: IdColumn, most: int, last: bool) -> IdColumn:
    """Returns the first or last `most` ids of each sample, with their weights.

    Other ids are neither looked up nor admitted.
    """
    if column.offsets is None:
        return column
    lengths = np.diff(column.offsets)
    if not len(lengths) or lengths.max() <= most:
        return column
    index = np.arange(len(column.values))
    if last:
        included = index >= np.repeat(column.offsets[1:] - most, lengths)
    else:
        included = index < np.repeat(column.offsets[:-1] + most, lengths)
    offsets = np.concatenate(([0], np.cumsum(np.minimum(lengths, most)))).astype(np.int64)
    weights = None if column.weights is None else column.weights[included]
    return IdColumn(column.values[included], offsets, weights)
