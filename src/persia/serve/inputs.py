"""Counts what arrives at a server unlike in training, by column: missing values, separators, ids without rows."""

from __future__ import annotations

import re
import threading
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from persia.batching.batch import Batch
from persia.batching.frames import as_mapping, from_frame, is_arrow
from persia.batching.id_column import IdColumn
from persia.batching.ids import is_list, is_missing
from persia.batching.numbers import as_array, is_pair
from persia.metrics.drift import DriftReference
from persia.schema import Schema
from persia.types import BoolArray, Packed

__all__ = ["InputCounts"]

SAMPLED = 32
"""Maximum number of rows that are counted of a request."""

MAX_WAITING = 32
"""Maximum number of requests that wait to be counted; the oldest ones are dropped."""

MAX_BATCHES = 4
"""Maximum number of batches whose ids are looked up in one call of `count`."""

HALVED_AT = 100_000
MIN_ROWS = 100
SEPARATOR = re.compile(r"[|,;\t]")


class Lookup(Protocol):
    """The rows of a view; see `persia.serve.row_sources.RowLookup`."""

    def lookup(self, ids: Packed[np.uint64]) -> Any:
        """Returns whether each id has a row, by table, and the rows."""


class InputCounts:
    """Counts samples of raw requests. Thread-safe.

    A request only records its columns; `count` does the work, in the thread of updates. Counts are halved at 100,000
    rows of a column, so recent requests weigh more.

    Args:
        schema: names of features and columns.
    """

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._columns = frozenset(schema.feature_columns)
        self._plain = {f.column for f in schema.id_features if f.reads_ids and f.split is None}
        """Columns in which a separator may be a list that is read as one id."""
        self._tables = {f.name: f.table_name for f in schema.id_features}
        self._requests: deque[Mapping[str, Any]] = deque(maxlen=MAX_WAITING)
        self._batches: deque[Batch] = deque(maxlen=MAX_BATCHES)
        self._lock = threading.Lock()
        self._counts: dict[str, Counter[str]] = {}
        self._trained: dict[str, float] = {}
        self._result: Mapping[str, Mapping[str, float]] = {}

    @property
    def result(self) -> Mapping[str, Mapping[str, float]]:
        """Shares by column, as of the last `count`; see `ServeState.inputs`."""
        return self._result

    def load(self, reference: DriftReference | None) -> None:
        """Compares with these distributions of training from now on; None keeps the present ones."""
        if reference is None:
            return
        self._trained = {
            f.column: reference.lengths[f.name][0] / max(1, sum(reference.lengths[f.name]))
            for f in self._schema.id_features
            if f.name in reference.lengths and f.fill is None and f.tokens is None and not f.computed
        }

    def note_columns(self, columns: Mapping[str, Any]) -> None:
        """Records raw columns, as for `Batch.from_columns`, for `count`. Does not block."""
        self._requests.append(columns)

    def note_batch(self, batch: Batch) -> None:
        """Records a batch, whose ids `count` looks up. Does not block."""
        self._batches.append(batch)

    def count(self, rows: Lookup | None) -> None:
        """Counts what was recorded.

        Args:
            rows: the served rows; None leaves out the share of ids without a row.
        """
        with self._lock:
            while self._requests:
                columns = as_mapping(self._requests.popleft())
                for name in self._columns & columns.keys():
                    self._add(name, _counted(name, columns[name], name in self._plain))
            batches = [self._batches.popleft() for _ in range(len(self._batches))]
            if rows is not None:
                for batch in batches:
                    self._look_up(batch, rows)
            self._result = {name: shares for name in self._counts if (shares := self._shares(name))}

    def _look_up(self, batch: Batch, rows: Lookup) -> None:
        step = _step(len(batch))
        sample = batch if step == 1 else batch.take(np.arange(0, len(batch), step))
        for name, column in sample.id_features.items():
            ids = np.unique(column.values)
            if len(ids):
                found: BoolArray = rows.lookup(Packed([self._tables[name]], [len(ids)], ids))[0][self._tables[name]]
                self._add(name, Counter(ids=len(ids), unseen=int((~found).sum())))

    def _add(self, name: str, counts: Counter[str]) -> None:
        total = self._counts.setdefault(name, Counter())
        total.update(counts)
        if max(total["rows"], total["ids"]) >= HALVED_AT:
            self._counts[name] = Counter({what: count // 2 for what, count in total.items()})

    def _shares(self, name: str) -> dict[str, float]:
        """Returns the shares of a column that are not 0; empty below `MIN_ROWS` rows."""
        counts = self._counts[name]
        shares: dict[str, float] = {}
        if counts["rows"] >= MIN_ROWS:
            shares = {what: counts[what] / counts["rows"] for what in ("missing", "separator") if counts[what]}
            trained = self._trained.get(name, 0.0)
            if trained or ("missing" in shares and name in self._trained):
                shares["missing_in_training"] = trained
        if counts["unseen"] and counts["ids"] >= MIN_ROWS:
            shares["unseen"] = counts["unseen"] / counts["ids"]
        return shares


def _counted(name: str, column: Any, plain: bool) -> Counter[str]:
    """Counts rows, missing values and texts with a separator in a sample of a column."""
    if isinstance(column, IdColumn) or is_pair(column):
        offsets = column.offsets if isinstance(column, IdColumn) else column[1]
        if offsets is None:
            return Counter(rows=min(len(column), SAMPLED))
        lengths = np.diff(np.asarray(offsets))[:: _step(len(offsets) - 1)]
        return Counter(rows=len(lengths), missing=int((lengths == 0).sum()))
    values = _sample(name, column)
    missing = separator = 0
    for value in values:
        if type(value) is str:
            missing += not value
            separator += plain and SEPARATOR.search(value) is not None
        else:
            missing += is_missing(value) or (_is_sized(value) and not len(value))
    return Counter(rows=len(values), missing=missing, separator=separator)


def _sample(name: str, column: Any) -> Sequence[Any]:
    """Returns at most `SAMPLED` values of a column, spread over it."""
    column = from_frame(name, column[:: _step(len(column))])
    if is_arrow(column):
        values: list[Any] = column.to_pylist()
        return values
    return column if isinstance(column, (list, tuple)) else list(as_array(name, column).tolist())


def _is_sized(value: Any) -> bool:
    return isinstance(value, bytes) or is_list(value)


def _step(rows: int) -> int:
    return max(1, -(-rows // SAMPLED))
