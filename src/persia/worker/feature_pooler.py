"""Pools features at an embedding worker where their values take fewer bytes than rows."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from persia import batching
from persia.batching import RoutedBatch
from persia.errors import StoreError
from persia.schema import Schema
from persia.schema.pooled_features import poolable_features, values_name
from persia.types import Floats, FreshRows, Int64Array, Inverse, LookedUp, Packed, WireRows

__all__ = ["BufferedBatch", "FeaturePooler", "LookupState", "PoolAt"]

PoolAt = Literal["nn_worker", "embedding_worker", "auto"]
"""Where features are pooled. "auto": at the embedding worker, for each table and batch for which that sends less."""

SCALE_BYTES = 4

Rows = Packed[np.float32 | np.float16]
T = TypeVar("T")


class LookupState:
    """State of a batch between its lookup ahead and its push.

    Attributes:
        lock: held by a lookup ahead or a refresh from before it reads rows until these are stored. Calls may overlap
            with their repetitions; what is stored last has then been read last.
        pooled_rows: rows of tables whose features were pooled here, which a refresh pools again, float32
            `[unique ids, dim]` by table; empty if none were.
        recent: `recent` of the last lookup ahead; None before it.
        left_out: which rows it left out, also for its repetitions; None if none.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.pooled_rows: dict[str, Floats] = {}
        self.recent: int | None = None
        self.left_out: Packed[np.bool_] | None = None


class BufferedBatch(NamedTuple):
    """A registered batch, and the state of its lookup ahead."""

    batch: RoutedBatch
    state: LookupState


class _Feature(NamedTuple):
    """A feature that may be pooled here.

    Attributes:
        name: name of the feature.
        values: name of its values.
        pooling: how its rows are pooled.
    """

    name: str
    values: str
    pooling: Literal["sum", "mean", "sqrtn"]


class FeaturePooler:
    """Decides which features of a batch are pooled here, pools them, and sums their gradients by row. Thread-safe.

    The values of a pooled feature take the place of the rows of its table, by `values_name`: a row for each sample.

    Args:
        schema: features and tables.
        pool_at: where features are pooled.
        compressed: whether rows and values are sent as float16 with a scale.
        threads: number of threads.
    """

    def __init__(self, schema: Schema, pool_at: PoolAt, compressed: bool, threads: int) -> None:
        self._tables = schema.resolved_tables()
        self._features = {
            table: [_Feature(f.name, values_name(f), cast("Literal['sum']", f.pooling)) for f in features]
            for table, features in (poolable_features(schema) if pool_at != "nn_worker" else {}).items()
        }
        self._always = pool_at == "embedding_worker"
        self._compressed = compressed
        self._pool = batching.ThreadPool(threads if self._features else 1)
        self._scratch = batching.Scratch()

    def applies(self, batch: RoutedBatch) -> bool:
        """Returns whether some features of a batch that is trained are pooled here."""
        return bool(self._chosen(batch, pushed=True))

    def looked_up(
        self, batch: RoutedBatch, rows: Packed[np.float32], state: LookupState | None, *, pushed: bool
    ) -> LookedUp:
        """Returns the answer to a lookup, not compressed, with the values of features that are pooled here.

        Args:
            batch: the batch.
            rows: rows of its ids, as stored.
            state: gets the rows of pooled features, under its lock; None if the batch is not refreshed.
            pushed: whether gradients will be pushed.
        """
        if not (tables := self._chosen(batch, pushed=pushed)):
            return LookedUp(cast("Rows", rows), batch.narrow, batch.wide, batch.offsets, weights=batch.weights)
        own = self._decoded(tables, rows)
        if state is not None:
            state.pooled_rows = own = {table: part.copy() for table, part in own.items()}
        values = self._values(batch, own)
        names = {feature.name for table in tables for feature in self._features[table]}
        return LookedUp(
            cast("Rows", Packed.of({**_without(rows, tables), **values}, np.float32)),
            Packed.of(_without(batch.narrow, names), np.uint16),
            Packed.of(_without(batch.wide, names), np.uint32),
            Packed.of(_without(batch.offsets, names), np.int64),
            weights=None if batch.weights is None else Packed.of(_without(batch.weights, names), np.float32),
            pooled={table: len(batch.ids[table]) for table in tables},
        )

    def refreshed(self, batch: RoutedBatch, state: LookupState, fresh: FreshRows) -> FreshRows:
        """Returns refreshed rows with the new values of pooled features, for the samples whose ids have changed.

        Args:
            batch: the batch.
            state: has the rows of its pooled features, which change under its lock.
            fresh: its rows that have changed, as stored.
        """
        kept = state.pooled_rows
        if not kept:
            return fresh
        changed = self._decoded(list(kept), cast("Packed[np.float32]", fresh.rows))
        for table, own in kept.items():
            own[fresh.places[table]] = changed[table]
        values = self._values(batch, kept)
        places: dict[str, NDArray[np.uint32]] = dict(_without(fresh.places, kept))
        rows: dict[str, WireRows] = dict(_without(fresh.rows, kept))
        inverse = batch.inverse
        for table, own in kept.items():
            flags = np.zeros(len(own), bool)
            flags[fresh.places[table]] = True
            for name, of_values, _ in self._features[table]:
                samples = _samples_of(flags[inverse[name]], batch.offsets.get(name))
                places[of_values], rows[of_values] = samples, values[of_values][samples]
        return fresh._replace(places=Packed.of(places, np.uint32), rows=cast("Rows", Packed.of(rows, np.float32)))

    def pools(self, gradients: Iterable[str]) -> bool:
        """Returns whether some of these names are of values of pooled features."""
        return not self._tables.keys() >= set(gradients)

    def row_gradients(self, batch: RoutedBatch, gradients: Packed[np.float32]) -> Packed[np.float32]:
        """Returns gradients by table: those of values are summed by row, in the order of an NN worker's sums.

        Args:
            batch: the batch.
            gradients: gradients by table, or by the name of values.

        Raises:
            StoreError: the gradients of values do not have their shape.
        """
        tables = [t for t, features in self._features.items() if any(f.values in gradients for f in features)]
        features = [(table, feature) for table in tables for feature in self._features[table]]
        given: list[Floats | None] = []
        inverse = batch.inverse
        for table, feature in features:
            gradient = gradients.get(feature.values)
            expected = (_samples(batch, inverse[feature.name], feature.name), self._tables[table].dim)
            if gradient is not None and gradient.shape != expected:
                raise StoreError(
                    f"Gradients of feature {feature.name!r}, which was pooled, must be {list(expected)}; got "
                    f"{list(gradient.shape)}.",
                    feature=feature.name,
                )
            given.append(gradient)
        shapes = [(len(batch.ids[table]), self._tables[table].dim) for table in tables]
        sums = batching.pool_backward(shapes, self._plans(batch, tables), given, self._pool, self._scratch)
        others = _without(gradients, [feature.values for _, feature in features])
        return Packed.of({**others, **dict(zip(tables, sums, strict=True))}, np.float32)

    def _chosen(self, batch: RoutedBatch, *, pushed: bool) -> list[str]:
        """Returns the tables whose features are pooled here, by the bytes of the answer, and of a push that follows."""
        if self._always:
            return list(self._features)
        chosen, inverse = [], batch.inverse
        for name, features in self._features.items():
            table = self._tables[name]
            value = 2 * table.dim + SCALE_BYTES if self._compressed else 4 * table.dim
            row = value if table.dtype == "float32" else 2 * table.dim
            gradient = value if table.trainable and pushed else 0
            indices = sum(_index_bytes(batch, inverse[feature.name], feature.name) for feature in features)
            samples = sum(_samples(batch, inverse[feature.name], feature.name) for feature in features)
            if samples * (value + gradient) < len(batch.ids[name]) * (row + gradient) + indices:
                chosen.append(name)
        return chosen

    def _decoded(self, tables: Sequence[str], rows: Packed[np.float32]) -> dict[str, Floats]:
        """Returns the rows of some tables as float32."""
        decoded: dict[str, Floats] = {table: rows[table] for table in tables}
        if stored := {table: part for table, part in decoded.items() if self._tables[table].dtype != "float32"}:
            part = cast("Rows", Packed.of(stored, np.float32))
            decoded.update(batching.plain_packed(part, None, self._tables, self._scratch).items())
        return decoded

    def _values(self, batch: RoutedBatch, rows: Mapping[str, Floats]) -> dict[str, Floats]:
        pooled = batching.pool_forward(list(rows.values()), self._plans(batch, list(rows)), self._pool)
        names = [feature.values for table in rows for feature in self._features[table]]
        return dict(zip(names, pooled.values, strict=True))

    def _plans(self, batch: RoutedBatch, tables: Sequence[str]) -> list[batching.FeaturePlan]:
        inverse, offsets = batch.inverse, batch.offsets
        weights: Mapping[str, Floats] = {} if batch.weights is None else batch.weights
        return [
            batching.FeaturePlan(number, inverse[name], offsets.get(name), pooling, None, weights.get(name))
            for number, table in enumerate(tables)
            for name, _, pooling in self._features[table]
        ]


def _samples(batch: RoutedBatch, inverse: Inverse, feature: str) -> int:
    ends = batch.offsets.get(feature)
    return len(inverse) if ends is None else len(ends) - 1


def _index_bytes(batch: RoutedBatch, inverse: Inverse, feature: str) -> int:
    parts: list[NDArray[np.generic] | None] = [inverse, batch.offsets.get(feature)]
    if batch.weights is not None:
        parts.append(batch.weights.get(feature))
    return sum(part.nbytes for part in parts if part is not None)


def _without(arrays: Mapping[str, T], names: Iterable[str]) -> dict[str, T]:
    left_out = set(names)
    return {name: array for name, array in arrays.items() if name not in left_out}


def _samples_of(changed: NDArray[np.bool_], offsets: Int64Array | None) -> NDArray[np.uint32]:
    """Returns the samples of which an id has changed, ascending."""
    if offsets is None:
        return np.flatnonzero(changed).astype(np.uint32)
    before = np.concatenate(([0], np.cumsum(changed, dtype=np.int64)))
    return np.flatnonzero(before[offsets[1:]] > before[offsets[:-1]]).astype(np.uint32)
