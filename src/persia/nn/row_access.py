"""Reads and sets embedding rows by id, outside the training loop."""

from __future__ import annotations

import functools
import itertools
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from persia import batching
from persia.batching.computed_ids import mapped_ids
from persia.batching.id_columns import id_column
from persia.errors import ClosedError, ConfigError, DataError, StaleMapError
from persia.retry import Deadline, retry
from persia.rpc.fan_out import call_all
from persia.schema import IdFeature, IdKind, IdMapping, Quotient, Schema, Table
from persia.services import EmbeddingPS
from persia.types import BoolArray, BucketMap, Floats, Ids, Int64Array, Packed, RowsSet, RowState, StoredRows
from persia.types.half_floats import LARGEST

__all__ = ["RowAccess"]

S = TypeVar("S", bound=np.generic)
T = TypeVar("T")

MOVE_SECONDS = 60.0
"""Maximum time for which PSs may serve no requests while rows move to other PSs."""

CHUNK_BYTES = 64 << 20
"""Approximate size of a message: bounds memory, and the time for which a shard is locked."""

MOST_STATE = 2
"""Maximum number of floats of optimizer state per float of embedding."""


class RowAccess:
    """Reads and sets rows of all tables, at all embedding PSs. Calls block.

    Args:
        schema: features and tables.
        servers: the embedding PSs, by partition.
    """

    def __init__(self, schema: Schema, servers: Sequence[EmbeddingPS]) -> None:
        self._schema = schema
        self._tables = schema.resolved_tables()
        self._servers = servers
        vars(self)  # Here, as two threads that make it corrupt memory with CPython 3.11 (python/cpython#97922).

    @functools.cached_property
    def _buckets(self) -> BucketMap:
        """The PS of each bucket of ids."""
        return self._servers[0].buckets()

    def _by_map(self, call: Callable[[BucketMap], T]) -> T:
        """Makes a call whose ids are routed by the map; again by the newer map while rows move to other PSs."""

        def refused(error: Exception) -> bool:
            if isinstance(error, ClosedError):  # Its PS has left; or all connections are closed, which this call meets.
                self._servers[0].buckets()
            elif not isinstance(error, StaleMapError):
                return False
            self.__dict__.pop("_buckets", None)
            return True

        return retry(lambda: call(self._buckets), transient=refused, deadline=Deadline(MOVE_SECONDS))

    def read(self, table: str, ids: ArrayLike, state: bool) -> StoredRows:
        """Reads rows by id, as they are now: nothing is admitted, touched or counted.

        During a training pass, gradients in flight may or may not be in them.

        Args:
            table: name of the table.
            ids: a uint64 array `[n]` of ids; or a column of values (numbers, texts), which are mapped to ids as
                `Batch.from_columns` does. They may repeat.
            state: also read the optimizer's state.

        Raises:
            ConfigError: there is no such table.
            DataError: a value is not one id.
        """
        declared = self._table(table)
        keys = self.ids(table, ids)
        return self._by_map(lambda buckets: self._read(buckets, declared, keys, state))

    def _read(self, buckets: BucketMap, declared: Table, keys: Ids, state: bool) -> StoredRows:
        table = declared.name
        rounds = list(self._rounds(buckets, declared, keys)) or [[(self._servers[0], np.empty(0, np.int64))]]
        parts: list[StoredRows] = []
        version = buckets.version
        for asked in rounds:
            parts += call_all(
                [functools.partial(s.read_rows, table, keys[places], state, version) for s, places in asked]
            )
        order = np.concatenate([places for asked in rounds for _, places in asked])
        states = [part.state for part in parts if part.state is not None]
        return StoredRows(
            keys,
            _ordered(order, [part.found for part in parts]),
            _ordered(order, [part.values for part in parts]),
            RowState(
                _ordered(order, [state.values for state in states]),
                _ordered(order, [state.update_count for state in states]),
                _ordered(order, [state.last_step for state in states]),
            )
            if states
            else None,
        )

    def set(self, table: str, ids: ArrayLike, values: ArrayLike, state: RowState | None) -> RowsSet:
        """Inserts or overwrites rows by id; they become the most recently used ones, without admission.

        Call it while no NN worker trains: each row is replaced as a whole, but an update of it at the same moment may
        be lost, and gradients of batches looked up before are applied to the new values. A call may be repeated.

        Args:
            table: name of the table.
            ids: as for `read`, distinct.
            values: `[n, dim]`, finite, within the table's `value_bound`.
            state: of the optimizer. None keeps that of existing rows; new rows get the initial state.

        Raises:
            ConfigError: there is no such table.
            DataError: an argument is not valid; nothing has changed.
            StoreError: `state` is of another optimizer.
        """
        declared = self._table(table)
        keys = self.ids(table, ids)
        rows = _checked_values(declared, keys, values)
        checked = None if state is None else _checked_state(declared, len(keys), state)
        return self._by_map(lambda buckets: self._set(buckets, declared, keys, rows, checked))

    def _set(self, buckets: BucketMap, declared: Table, keys: Ids, rows: Floats, checked: RowState | None) -> RowsSet:
        done = RowsSet(0, 0, 0)
        for asked in self._rounds(buckets, declared, keys):
            calls = [
                functools.partial(
                    server.set_rows,
                    secrets.randbits(63),
                    declared.name,
                    keys[places],
                    rows[places],
                    None if checked is None else _state_at(checked, places),
                    buckets.version,
                )
                for server, places in asked
            ]
            done = RowsSet(*map(sum, zip(done, *call_all(calls), strict=True)))
        return done

    def ids(self, table: str, ids: ArrayLike) -> Ids:
        """Returns ids: arrays of uint64 as they are, other columns as readers map them for features of the table.

        Raises:
            ConfigError: there is no such table.
            DataError: a value is not one id, or features of the table map values in several ways, or to ages.
        """
        self._table(table)
        if isinstance(ids, np.ndarray) and ids.dtype == np.uint64 and ids.ndim == 1:
            return np.ascontiguousarray(ids)
        features = [f for f in self._schema.id_features if f.table_name == table]
        if ages := [f.name for f in features if f.age_since is not None]:
            raise DataError(
                f"Ids of table {table!r} are magnitudes of ages (age_since of {ages[0]!r}), which depend on two times. "
                "Give the magnitudes themselves, as an array of uint64.",
                table=table,
            )
        mapped = any(f.mapping is not None for f in features)
        ways = {f.name: self._way(f) for f in features if mapped or not f.cross}
        if len(set(ways.values())) > 1:
            said = (f"{name}: {mapping or kind}" for name, (kind, mapping) in ways.items())
            raise DataError(
                f"Values for table {table!r} are ambiguous: its features map them to ids in several ways "
                f"({', '.join(said)}). Give ids, as an array of uint64.",
                table=table,
            )
        # A table that only crosses read: numbers are their ids.
        name, (kind, mapping) = next(iter(ways.items()), (table, ("auto", None)))
        if kind == "auto" and isinstance(mapping, Quotient):
            kind = "number"  # Other values would be hashed, and their hashes divided.
        column = id_column(name, ids, kind)
        if column.offsets is not None:
            raise DataError(
                f"Rows of table {table!r} need one id each; give a list or an array [n] without missing values.",
                table=table,
            )
        return column.values if mapping is None else mapped_ids(mapping, column.values)

    def _way(self, feature: IdFeature) -> tuple[IdKind, IdMapping | None]:
        """Returns how the values of a feature become ids; a mapped one has the ids of the feature that it maps."""
        source = feature if feature.of is None else self._schema.feature(feature.of)
        return source.kind, feature.mapping

    def contains(self, ids: Mapping[str, Ids]) -> dict[str, BoolArray]:
        """Returns by table whether each id has a row; one call to each PS."""
        return self._by_map(lambda buckets: self._contains(buckets, ids))

    def _contains(self, buckets: BucketMap, ids: Mapping[str, Ids]) -> dict[str, BoolArray]:
        servers = self._servers_of(buckets)
        if len(servers) == 1:
            return dict(servers[0].contains(Packed.of(ids, np.uint64), buckets.version))
        present = {table: np.zeros(len(of_table), np.bool_) for table, of_table in ids.items()}
        owners = {table: batching.owners(table, of_table, buckets) for table, of_table in ids.items()}
        owned = [
            {table: np.flatnonzero(owner == number) for table, owner in owners.items()}
            for number in range(len(servers))
        ]
        asked = [Packed.of({table: ids[table][at] for table, at in places.items()}, np.uint64) for places in owned]
        answers = call_all(
            [
                functools.partial(server.contains, ids_of_server, buckets.version)
                for server, ids_of_server in zip(servers, asked, strict=True)
            ]
        )
        for places, answer in zip(owned, answers, strict=True):
            for table, at in places.items():
                present[table][at] = answer[table]
        return present

    def all_ids(self, table: str) -> Ids:
        """Returns the ids that have a row in a table, ascending, uint64 `[rows]`.

        Reads all rows of the table once, about 64 MiB at a time. Call it while no rows move to other PSs.

        Raises:
            ConfigError: there is no such table.
        """
        self._table(table)
        parts = [chunk.arrays["ids"] for server in self._servers for chunk in server.export_rows(table)]
        return np.unique(np.concatenate([np.empty(0, np.uint64), *parts]))

    def statistics(self) -> dict[str, dict[str, int]]:
        """Returns counters of the tables, summed over the PSs."""
        total: dict[str, dict[str, int]] = {}
        for answer in call_all([functools.partial(server.statistics) for server in self._servers]):
            for table, counters in answer.items():
                totals = total.setdefault(table, {})
                for name, value in counters.items():
                    totals[name] = totals.get(name, 0) + value
        return total

    def _servers_of(self, buckets: BucketMap) -> Sequence[EmbeddingPS]:
        """Returns the PSs of a map. Raises StaleMapError while this process does not know all of them yet."""
        servers = list(self._servers)
        if len(servers) != buckets.servers:
            raise StaleMapError(
                f"Bucket map {buckets.version} has {buckets.servers} embedding PSs, and this process knows "
                f"{len(servers)}. Use a newer map.",
                routed=buckets.version,
                current=buckets.version,
            )
        return servers

    def _table(self, name: str) -> Table:
        if name not in self._tables:
            raise ConfigError(f"There is no table {name!r}; the schema has {', '.join(self._tables)}.", field="table")
        return self._tables[name]

    def _rounds(self, buckets: BucketMap, table: Table, ids: Ids) -> Iterator[list[tuple[EmbeddingPS, Int64Array]]]:
        """Yields PSs to ask at the same time, with places of ids that each owns; many places take several rounds."""
        most = max(1, CHUNK_BYTES // (17 + 4 * (1 + MOST_STATE) * table.dim))
        servers = self._servers_of(buckets)
        owner = batching.owners(table.name, ids, buckets)
        owned = [np.flatnonzero(owner == number) for number in range(len(servers))]
        for start in itertools.count(0, most):
            asked = [
                (server, places[start : start + most])
                for server, places in zip(servers, owned, strict=True)
                if start < len(places)
            ]
            if not asked:
                return
            yield asked


def _state_at(state: RowState, places: Int64Array) -> RowState:
    return RowState(state.values[places], state.update_count[places], state.last_step[places])


def _ordered(order: Int64Array, parts: Sequence[NDArray[S]]) -> NDArray[S]:
    """Concatenates the parts, with element i at `order[i]`."""
    joined = np.concatenate(parts)
    result = np.empty_like(joined)
    result[order] = joined
    return result


def _checked_values(table: Table, ids: Ids, values: ArrayLike) -> Floats:
    if len(ids) != len(np.unique(ids)):
        at = np.setdiff1d(np.arange(len(ids)), np.unique(ids, return_index=True)[1])[0]
        raise DataError(
            f"Duplicate id {ids[at]} for table {table.name!r} at position {at}; give each row once.",
            table=table.name,
            row=int(at),
        )
    rows = _floats(table, "values", values)
    if rows.shape != (len(ids), table.dim):
        raise DataError(
            f"Values for table {table.name!r} have shape {list(rows.shape)}; give float32 [{len(ids)}, {table.dim}], "
            "an embedding for each id.",
            table=table.name,
        )
    bound = table.value_bound
    if bound and rows.size and np.abs(rows).max() > bound:
        at = int((np.abs(rows) > bound).any(1).argmax())
        raise DataError(
            f"Values for table {table.name!r} exceed its value_bound = {bound:g} at row {at} (id {ids[at]}); "
            "clip them.",
            table=table.name,
            row=at,
        )
    if rows.size and np.abs(rows).max() > LARGEST[table.dtype]:
        at = int((np.abs(rows) > LARGEST[table.dtype]).any(1).argmax())
        wider = "bfloat16" if table.dtype == "float16" and np.abs(rows).max() <= LARGEST["bfloat16"] else "float32"
        raise DataError(
            f"Values for table {table.name!r} exceed {LARGEST[table.dtype]:g}, the largest number of {table.dtype}, at "
            f"row {at} (id {ids[at]}); scale them down, or declare the table with dtype = '{wider}'.",
            table=table.name,
            row=at,
        )
    return rows


def _checked_state(table: Table, count: int, state: RowState) -> RowState:
    if not isinstance(state, RowState):
        raise DataError(
            f"The state for table {table.name!r} is a {type(state).__name__}; give a RowState, such as the `state` of "
            "`rows(..., state=True)`.",
            table=table.name,
        )
    values = _floats(table, "state.values", state.values)
    counts, steps = np.asarray(state.update_count), np.asarray(state.last_step)
    if values.ndim != 2 or {len(values), *counts.shape, *steps.shape} != {count} or counts.ndim != 1 or steps.ndim != 1:
        raise DataError(
            f"The state for table {table.name!r} has shapes {list(values.shape)}, {list(counts.shape)} and "
            f"{list(steps.shape)}; give [{count}, width], [{count}] and [{count}].",
            table=table.name,
        )
    for name, array in (("update_count", counts), ("last_step", steps)):
        if array.dtype.kind not in "iu" or (array.size and not 0 <= array.min() <= array.max() < 1 << 32):
            raise DataError(f"state.{name} for table {table.name!r} is not uint32; correct it.", table=table.name)
    return RowState(values, counts.astype(np.uint32), steps.astype(np.uint32))


def _floats(table: Table, name: str, values: ArrayLike) -> Floats:
    """Returns the values as float32, checked to be finite."""
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
    try:
        with np.errstate(over="ignore"):
            rows = np.ascontiguousarray(values, np.float32)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{name} for table {table.name!r} are not numbers ({error}); give an array of numbers.", table=table.name
        ) from error
    if not np.isfinite(rows).all():
        at = np.argwhere(~np.isfinite(rows))[0].tolist()
        raise DataError(
            f"{name} for table {table.name!r} are not finite at {at}; they must fit float32, without NaN.",
            table=table.name,
            row=at[0] if at else 0,
        )
    return rows
