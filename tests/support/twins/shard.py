"""One shard of a table of the reference store: which ids have a row, how rows change, and which row is evicted."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from persia.errors import StoreError
from persia.store.protocol import Spill
from persia.store.table_config import TTL_UNITS, TableConfig
from support.twins import optimizers as reference_optim
from support.twins.random_rows import Sketch, admission_draw, initial_embedding
from support.twins.values import as_words, nearest, nearest_embedding, round_update, rounding_key

__all__ = ["COUNTERS", "KEPT_MARKS", "TIER_COUNTS", "ReferenceRow", "ReferenceShard"]

COUNTERS = (
    "lookups", "hits", "misses", "admitted", "rejected", "evicted", "applied", "absent", "nonfinite", "duplicates",
)  # fmt: skip

TIER_COUNTS = ("spilled", "read", "promoted", "compacted")

KEPT_MARKS, MARKS_OF_TTL, PARTS_OF_TTL, SWEEP, LISTED = 32, 16, 64, 4, 8


@dataclass
class ReferenceRow:
    """A row and the numbers that a store keeps of it. Values are float32, and numbers of the dtype of the table."""

    id: int
    embedding: NDArray[np.float32]
    state: NDArray[np.float32]
    update_count: int = 0
    last_step: int = 0
    stamp: int = 0
    epoch: int = 0
    """Number of the snapshot after which the row last changed."""


@dataclass
class _Pass:
    removed: list[int]
    rows: Iterator[tuple[int, NDArray[np.float32]]]


@dataclass
class _Snapshot:
    epoch: int
    rows: Iterator[ReferenceRow]
    evicted: list[int]


class ReferenceShard:
    """Rows of a share of the ids, up to a capacity, in the order in which they were inserted.

    Args:
        config: of the table.
        capacity: maximum number of rows.
        memory_rows: maximum number of rows in memory; as many as `capacity` without rows on disk.
        cold: keeps rows on disk, in the order in which they came there; None without.
    """

    def __init__(
        self,
        config: TableConfig,
        capacity: int,
        memory_rows: int | None = None,
        cold: MutableMapping[int, ReferenceRow] | None = None,
    ) -> None:
        self.config = config
        self.capacity = capacity
        self.memory_rows = capacity if memory_rows is None else memory_rows
        self.cold = cold
        self.tier_counts = dict.fromkeys(TIER_COUNTS, 0)
        self.rows: list[ReferenceRow] = []
        self.index: dict[int, int] = {}
        """Place in `rows` by id."""
        self.clock = 0
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.applied: set[tuple[int, int]] = set()
        """Pushes by (client, sequence)."""
        self.pushes = 0
        """How many of them the table has seen, before it was exported and imported included."""
        self.sketch = Sketch(capacity) if config.admission != "all" else None
        self.keeps_last_steps = False
        self.age, self.age_unit = 0, 0
        self.marks_made = 0
        self.marks: list[tuple[int, int]] = []
        """Ages and the clocks that belonged to them: the last `KEPT_MARKS`."""
        self.left_before = 0
        """Rows with lower stamps have left."""
        self.sweep = self.sweep_places = 0
        self.left: list[int] = []
        self.epoch = 1
        self.changes_since = 0
        self.evicted: list[int] = []
        self.evicted_limit = 0
        self.snapshot: _Snapshot | None = None
        self.published: dict[int, NDArray[np.float32]] | None = None
        """Embeddings by id, as of the last pass over changes; None if there was none."""
        self.changes: _Pass | None = None

    def find(self, id_: int) -> ReferenceRow | None:
        """Returns the row of an id, if there is one that has not left."""
        place = self.index.get(id_)
        row = self.rows[place] if place is not None else self._read(id_)
        return None if row is None or self.has_left(row) else row

    @property
    def size(self) -> int:
        """The number of rows."""
        return len(self.rows) + len(self.cold or ())

    def all_rows(self) -> list[ReferenceRow]:
        """Returns all rows that have not left, those in memory first."""
        rows = [*self.rows, *(self.cold.values() if self.cold is not None else ())]
        return [row for row in rows if not self.has_left(row)]

    def has_left(self, row: ReferenceRow) -> bool:
        """Returns whether a row was last met longer ago than the time to live."""
        return row.stamp < self.left_before

    def pass_time(self, by: int) -> None:
        """See `EmbeddingStore.advance_clock`."""
        ttl = self.config.ttl
        if not ttl:
            return
        unit = TTL_UNITS[self.config.ttl_unit]
        if self.age_unit != unit:
            self.age, self.age_unit, self.marks_made, self.marks = 0, unit, 0, []
        before, granule = self.age, max(1, ttl // PARTS_OF_TTL)
        self.age += by
        if self.marks and self.age // granule == before // granule:
            return
        due = [clock + 1 for age, clock in self.marks if self.age - age >= ttl]
        if max(due, default=0) > self.left_before:
            self.left_before = max(due)
            self.sweep_places = len(self.rows)
        if not self.marks or self.age - self.marks[-1][0] >= max(1, ttl // MARKS_OF_TTL):
            self.marks = [*self.marks, (self.age, self.clock)][-KEPT_MARKS:]
            self.marks_made += 1

    def lookup(self, id_: int) -> NDArray[np.float32]:
        """Returns the embedding of an id in training, which may get a row by that."""
        self.counters["lookups"] += 1
        self._promote(id_)
        row = self.find(id_)
        self.counters["misses" if row is None else "hits"] += 1
        if row is None:
            if not self._admits(id_):
                self.counters["rejected"] += 1
                return np.zeros(self.config.dim, np.float32)
            self.counters["admitted"] += 1
            embedding = nearest_embedding(initial_embedding(self.config, id_), self.config)
            row = ReferenceRow(id_, embedding, self.config.initial_state)
            self._insert(row)
        self._touch(row)
        return row.embedding

    def update(self, id_: int, gradient: NDArray[np.float32], lr: float, step: int) -> str:
        """Applies a gradient, and returns the name of its counter."""
        self._promote(id_)
        row = self.find(id_)
        if row is None:
            return "absent"
        if not np.isfinite(gradient).all():
            return "nonfinite"
        self._touch(row)
        count, embedding, state = row.update_count + 1, row.embedding.copy(), row.state.copy()
        reference_optim.apply(self.config, embedding, state, gradient, lr, count)
        if not (np.isfinite(embedding).all() and np.isfinite(state).all()):
            return "nonfinite"
        key = rounding_key(self.config, id_, step, as_words(row.embedding, self.config))
        round_update(self.config, key, count, embedding, state)
        row.embedding[:], row.state[:], row.update_count = embedding, state, count
        row.last_step = step if self.keeps_last_steps else 0
        return "applied"

    def put(self, row: ReferenceRow) -> None:
        """Replaces the row of an id or inserts it, unless the shard is full and all its rows are as recent."""
        row.embedding = nearest_embedding(row.embedding, self.config)
        row.state = nearest(row.state, self.config.state_dtype)
        row.last_step *= self.keeps_last_steps
        row.stamp = max(row.stamp, self.left_before, self.marks[-1][1] + 1 if self.marks else 0)
        row.epoch = self.epoch
        self._promote(row.id)
        place = self.index.get(row.id)
        full = self.cold is None and len(self.rows) == self.capacity
        if place is not None:
            self.rows[place] = row
        elif full and self.rows[self._oldest()].stamp >= row.stamp:
            self.counters["evicted"] += 1
        else:
            self._insert(row)

    def remove_ids(self, ids: Sequence[int]) -> int:
        """Removes the rows of ids, in their order."""
        self.check_idle()
        removed = 0
        for id_ in ids:
            if (place := self.index.get(id_)) is not None:
                self._take_out(place)
            elif id_ in (self.cold or ()):
                del self.cold[id_]
            else:
                continue
            removed += 1
        self._forget_places()
        return removed

    def remove(self, chosen: Callable[[int], bool]) -> int:
        """Removes the rows of some ids, from the last place on."""
        self.check_idle()
        places = [place for place, row in enumerate(self.rows) if chosen(row.id)]
        cold = [id_ for id_ in self.cold or () if chosen(id_)]
        removed = len(cold)
        for place in reversed(places):
            if place < len(self.rows):  # Otherwise it was removed as a last row that had expired.
                self._take_out(place)
                removed += 1
        for id_ in cold:
            del self.cold[id_]
        if removed:
            self._forget_places()
        return removed

    def _take_out(self, place: int) -> None:
        """Removes a row, whose place the last row gets that has not expired."""
        del self.index[self.rows[place].id]
        last = self.rows.pop()
        while len(self.rows) > place and self.cold is None and self.has_left(last):
            del self.index[last.id]
            last = self.rows.pop()
        if len(self.rows) > place:
            self.rows[place] = last
            self.index[last.id] = place

    def _forget_places(self) -> None:
        self.forget_changes()
        self.sweep, self.left = 0, []
        self.sweep_places = len(self.rows) if self.left_before else 0

    def _admits(self, id_: int) -> bool:
        if self.sketch is None:
            return True
        occurrence = self.sketch.add(id_)
        if self.config.admission == "min_frequency":
            return occurrence >= self.config.admission_value
        return admission_draw(self.config, id_, occurrence) < self.config.admission_value

    def _insert(self, row: ReferenceRow) -> None:
        """Inserts a row. In a full shard it evicts the least recently used one, as `MemoryRows::acquire` in C++."""
        own = self.index.get(row.id)
        if own is not None:  # It has expired.
            self.rows[own] = row
            return
        place = self._left()
        if place is not None:
            self._note_removal(self.rows[place].id)
        elif len(self.rows) < self.memory_rows:
            place = len(self.rows)
            self.rows.append(row)
        else:
            place = self._oldest()
            self._move_out(self.rows[place])
        self.rows[place] = row
        self.index[row.id] = place
        if self.cold is not None and self.size > self.capacity:
            oldest = next(iter(self.cold), None)
            if oldest is not None:
                del self.cold[oldest]
                self.counters["evicted"] += 1
                self._note_eviction(oldest)

    def _move_out(self, row: ReferenceRow) -> None:
        """Evicts a row, or moves it to disk."""
        if self.cold is None:
            self.counters["evicted"] += 1
            self._note_removal(row.id)
        elif self.has_left(row):
            self._note_removal(row.id)
        else:
            del self.index[row.id]
            self.cold[row.id] = row
            self.tier_counts["spilled"] += 1

    def _read(self, id_: int) -> ReferenceRow | None:
        """Returns a row on disk, if there is one."""
        if self.cold is None or id_ not in self.cold:
            return None
        self.tier_counts["read"] += 1
        return self.cold[id_]

    def _promote(self, id_: int) -> None:
        """Moves a row on disk to memory, if there is one; one that has left is removed."""
        row = self._read(id_)
        if row is None or self.cold is None:
            return
        del self.cold[id_]
        if self.has_left(row):
            self._note_eviction(id_)
        else:
            self._insert(row)
            self.tier_counts["promoted"] += 1

    def _left(self) -> int | None:
        """Lists the places of rows that have left, looking at a few in turn, and returns one of the list."""
        for _ in range(SWEEP):
            if not self.sweep_places or len(self.left) > len(self.rows) // LISTED:
                break
            self.sweep_places -= 1
            if self.sweep >= len(self.rows):
                self.sweep = 0
            if self.has_left(self.rows[self.sweep]):
                self.left.append(self.sweep)
            self.sweep += 1
        for _ in range(min(SWEEP, len(self.left))):
            place = self.left.pop()
            if self.has_left(self.rows[place]):
                return place
        return None

    def _oldest(self) -> int:
        return min(range(len(self.rows)), key=lambda place: (self.rows[place].stamp, place))

    def _note_removal(self, id_: int) -> None:
        del self.index[id_]
        self._note_eviction(id_)

    def _note_eviction(self, id_: int) -> None:
        if len(self.evicted) < self.evicted_limit:
            self.evicted.append(id_)
        else:
            self.forget_changes()

    def _touch(self, row: ReferenceRow) -> None:
        row.stamp, row.epoch = self.clock, self.epoch

    def forget_changes(self) -> None:
        """Ends the record of evicted ids: the next snapshot has to take all rows."""
        self.changes_since, self.evicted, self.evicted_limit = 0, [], 0

    def begin_snapshot(self, epoch: int, since: int, spill: Spill, taken: Callable[[int], bool]) -> None:
        """Copies the rows changed since an earlier snapshot, of the ids that are taken."""
        rows: Iterator[ReferenceRow]
        before = self.left_before
        if spill.live and self.cold is None:  # A generator looks at a row when it is read.
            places = map(self.rows.__getitem__, range(len(self.rows)))
            rows = (row for row in places if row.epoch >= since and row.stamp >= before)
        else:
            rows = iter([copy.deepcopy(row) for row in self.all_rows() if row.epoch >= since])
        evicted = [id_ for id_ in self.evicted if taken(id_)]
        self.snapshot = _Snapshot(epoch, (row for row in rows if taken(row.id)), evicted)
        self.epoch = self.changes_since = epoch
        self.evicted, self.evicted_limit = [], spill.evicted_limit

    def check_snapshot(self, since: int) -> None:
        """Raises `StoreError` if `begin_snapshot` is impossible."""
        self.check_idle()
        if since and since != self.changes_since:
            raise StoreError(f"what has changed since epoch {since} is not known")

    def check_idle(self) -> None:
        """Raises `StoreError` during a snapshot."""
        if self.snapshot is not None:
            raise StoreError("a checkpoint is being read from these rows: wait for its end")

    def snapshot_of(self, epoch: int) -> _Snapshot:
        """Returns the snapshot of this number. Raises `StoreError` if it is not the current one."""
        if self.snapshot is None or self.snapshot.epoch != epoch:
            raise StoreError("there is no such snapshot of this shard: it was ended")
        return self.snapshot

    def begin_changes(self, whole: bool, removed_limit: int) -> bool:
        """Compares all rows with those of the last pass; see `EmbeddingStore.begin_changes`."""
        known = self.published is not None and self.changes is None
        if not whole and not known:
            return False
        before = {} if whole or self.published is None else self.published
        now = {row.id: row.embedding.copy() for row in self.all_rows()}
        removed = [id_ for id_ in before if id_ not in now]
        if len(removed) > removed_limit:
            return False
        changed = [(i, row) for i, row in now.items() if i not in before or before[i].tobytes() != row.tobytes()]
        self.published, self.changes = now, _Pass(removed, iter(changed))
        return True

    def take_changes(self, max_rows: int) -> tuple[list[int], list[tuple[int, NDArray[np.float32]]]]:
        """Returns removed ids, and the next rows of the pass: no more than `max_rows`, and fewer at its end."""
        if self.changes is None:
            raise StoreError("what has changed is not known any more: begin with all rows")
        removed, self.changes.removed = self.changes.removed, []
        rows = list(itertools.islice(self.changes.rows, max_rows))
        if len(rows) < max_rows:
            self.changes = None
        return removed, rows

    def end_changes(self) -> None:
        """Forgets what was published."""
        self.published = self.changes = None
