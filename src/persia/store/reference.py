"""The slow, readable twin of the native store: same results, one row at a time.

Eviction order, admission, start values and updates agree with :class:`persia.store.NativeStore` to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from persia.store import reference_optim
from persia.store.config import TableConfig
from persia.store.protocol import Rows
from persia.store.reference_random import Sketch, admission_draw, initial_embedding, shard_of
from persia.types import RowsSet, RowState, UpdateCounts

__all__ = ["ReferenceStore"]

_COUNTERS = (
    "lookups", "hits", "misses", "admitted", "rejected", "evicted", "applied", "absent", "nonfinite", "duplicates",
)  # fmt: skip


@dataclass
class _Row:
    id: int
    embedding: NDArray[np.float32]
    state: NDArray[np.float32]
    update_count: int = 0
    last_step: int = 0
    stamp: int = 0


@dataclass
class _Shard:
    config: TableConfig
    capacity: int
    rows: list[_Row] = field(default_factory=list)
    index: dict[int, int] = field(default_factory=dict)
    clock: int = 0
    counters: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_COUNTERS, 0))
    applied: set[tuple[int, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.sketch = Sketch(self.capacity)

    def find(self, id_: int) -> _Row | None:
        number = self.index.get(id_)
        return None if number is None else self.rows[number]

    def lookup(self, id_: int) -> NDArray[np.float32]:
        self.counters["lookups"] += 1
        row = self.find(id_)
        self.counters["misses" if row is None else "hits"] += 1
        if row is None:
            if not self._admits(id_):
                self.counters["rejected"] += 1
                return np.zeros(self.config.dim, np.float32)
            self.counters["admitted"] += 1
            row = self._insert(id_)
        row.stamp = self.clock
        return row.embedding

    def _admits(self, id_: int) -> bool:
        if self.config.admission == "all":
            return True
        occurrence = self.sketch.add(id_)
        if self.config.admission == "min_frequency":
            return occurrence >= self.config.admission_value
        return admission_draw(self.config, id_, occurrence) < self.config.admission_value

    def _insert(self, id_: int) -> _Row:
        row = _Row(id_, initial_embedding(self.config, id_), reference_optim.initial_state(self.config))
        if len(self.rows) < self.capacity:
            number = len(self.rows)
            self.rows.append(row)
        else:
            number = min(range(self.capacity), key=lambda n: (self.rows[n].stamp, n))
            del self.index[self.rows[number].id]
            self.rows[number] = row
            self.counters["evicted"] += 1
        self.index[id_] = number
        return row

    def put(self, row: _Row) -> None:
        """Replaces the row of its id, or takes the place of one that is less recent, if there is no other."""
        number = self.index.get(row.id, len(self.rows))
        if number == self.capacity:
            number = min(range(self.capacity), key=lambda n: (self.rows[n].stamp, n))
            self.counters["evicted"] += 1
            if self.rows[number].stamp >= row.stamp:
                return
            del self.index[self.rows[number].id]
        if number == len(self.rows):
            self.rows.append(row)
        self.rows[number] = row
        self.index[row.id] = number

    def update(self, id_: int, gradient: NDArray[np.float32], lr: float, step: int) -> str:
        row = self.find(id_)
        if row is None:
            return "absent"
        if not np.isfinite(gradient).all():
            return "nonfinite"
        row.update_count += 1
        row.last_step = step
        row.stamp = self.clock
        reference_optim.apply(self.config, row.embedding, row.state, gradient, lr, row.update_count)
        return "applied"


class ReferenceStore:
    """See :class:`persia.store.NativeStore`; not thread-safe, remembers every push."""

    def __init__(self) -> None:
        self._tables: list[tuple[TableConfig, list[_Shard]]] = []

    def create_table(self, config: TableConfig) -> int:
        """Adds an empty table and returns its number."""
        count = config.resolved_shards
        capacities = [config.capacity // count + (i < config.capacity % count) for i in range(count)]
        self._tables.append((config, [_Shard(config, capacity) for capacity in capacities]))
        return len(self._tables) - 1

    def _split(self, table: int, ids: NDArray[np.uint64]) -> list[tuple[_Shard, list[int]]]:
        """Positions of ids by shard, shards without any left out."""
        shards = self._tables[table][1]
        positions: list[list[int]] = [[] for _ in shards]
        for position, id_ in enumerate(ids):
            positions[shard_of(int(id_), len(shards))].append(position)
        return [(shard, mine) for shard, mine in zip(shards, positions, strict=True) if mine]

    def lookup(
        self, tables: Sequence[int], ids: Sequence[NDArray[np.uint64]], train: bool
    ) -> list[NDArray[np.float32]]:
        """Per table, embeddings float32 [n, dim] of ids uint64 [n]."""
        result = []
        for table, keys in zip(tables, ids, strict=True):
            out = np.zeros((len(keys), self._tables[table][0].dim), np.float32)
            for shard, positions in self._split(table, keys):
                shard.clock += train
                for position in positions:
                    id_ = int(keys[position])
                    row = shard.find(id_)
                    if train:
                        out[position] = shard.lookup(id_)
                    elif row is not None:
                        out[position] = row.embedding
            result.append(out)
        return result

    def update(
        self,
        tables: Sequence[int],
        ids: Sequence[NDArray[np.uint64]],
        gradients: Sequence[NDArray[np.float32]],
        lrs: Sequence[float],
        step: int,
        client: int = 0,
        sequence: int = 0,
    ) -> list[UpdateCounts]:
        """Applies gradients in order; a push (client, sequence) once per shard."""
        result = []
        for table, keys, values, lr in zip(tables, ids, gradients, lrs, strict=True):
            counts = dict.fromkeys(("applied", "absent", "nonfinite", "duplicates"), 0)
            for shard, positions in self._split(table, keys):
                push = (client, sequence)
                if all(push) and push in shard.applied:
                    counts["duplicates"] += len(positions)
                    shard.counters["duplicates"] += len(positions)
                    continue
                shard.applied.add(push)
                shard.clock += 1
                for position in positions:
                    outcome = shard.update(int(keys[position]), values[position], lr, step)
                    counts[outcome] += 1
                    shard.counters[outcome] += 1
            result.append(UpdateCounts(*counts.values()))
        return result

    def export_rows(self, table: int, shard: int) -> Rows:
        """All rows of a shard, in row order."""
        config, shards = self._tables[table]
        rows = shards[shard].rows
        return Rows(
            np.array([row.id for row in rows], np.uint64),
            np.array([row.embedding for row in rows], np.float32).reshape(len(rows), config.dim),
            np.array([row.state for row in rows], np.float32).reshape(len(rows), config.state_width),
            np.array([row.update_count for row in rows], np.uint32),
            np.array([row.last_step for row in rows], np.uint32),
            np.array([row.stamp for row in rows], np.uint32),
        )

    def set_rows(
        self, table: int, ids: NDArray[np.uint64], values: NDArray[np.float32], state: RowState | None
    ) -> RowsSet:
        """Inserts or overwrites rows, as :func:`persia.ps.row_access.set_rows` does."""
        config, shards = self._tables[table]
        stamp = max(shard.clock for shard in shards) + 1
        evicted = self.statistics(table)["evicted"]
        replaced = 0
        for shard, positions in self._split(table, ids):
            kept = {position: shard.find(int(ids[position])) for position in positions}
            replaced += sum(row is not None for row in kept.values())
            shard.clock = stamp
            for position in positions:
                row, before = _Row(int(ids[position]), values[position].copy(), np.empty(0, np.float32)), kept[position]
                if state is not None:
                    row.state = state.values[position].copy()
                    row.update_count, row.last_step = int(state.update_count[position]), int(state.last_step[position])
                elif before is not None:
                    row.state, row.update_count, row.last_step = before.state, before.update_count, before.last_step
                else:
                    row.state = reference_optim.initial_state(config)
                row.stamp = stamp
                shard.put(row)
        return RowsSet(len(ids) - replaced, replaced, self.statistics(table)["evicted"] - evicted)

    def size(self, table: int) -> int:
        """Rows in a table."""
        return sum(len(shard.rows) for shard in self._tables[table][1])

    def statistics(self, table: int) -> dict[str, int]:
        """Counts since creation, as in the native store."""
        return {name: sum(shard.counters[name] for shard in self._tables[table][1]) for name in _COUNTERS}
