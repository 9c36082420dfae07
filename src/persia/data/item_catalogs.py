"""The items of a data set: their catalog, and draws from it with known probabilities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from persia.batching.batch import Batch
from persia.batching.id_column import IdColumn
from persia.data.reader import Reader
from persia.errors import ConfigError, DataError
from persia.schema import Schema
from persia.types import BoolArray, Floats, Ids, Int64Array

__all__ = [
    "IdSequence",
    "ItemCatalog",
    "ItemCounts",
    "ItemDraws",
    "check_binary",
    "check_catalog",
    "check_features",
    "counted_of",
    "events_of",
    "item_catalog",
    "positive",
    "single",
]

MERGED_ROWS = 1 << 16
"""Minimum number of items that `ItemCounts` collects before it merges them. Once it has more distinct items than that,
it collects as many as there are distinct ones."""

NARROW_IDS = 8
"""Ids whose range is at most this many times the number of items are found by one array over the range."""


@dataclass(frozen=True)
class ItemCatalog:
    """The items of a data set.

    Attributes:
        ids: ids by feature of the item, uint64 `[items]`; entry i of each array is of item i.
        counts: number of positive samples of each item, int64 `[items]`.

    Raises:
        ConfigError: there are no items, or an array has another dtype or shape, or a count is negative.
    """

    ids: Mapping[str, Ids]
    counts: Int64Array

    def __post_init__(self) -> None:
        if not isinstance(self.ids, Mapping) or not self.ids:
            raise ConfigError("ItemCatalog.ids has no feature; give a dict with the ids of each.", field="ids")
        items = len(self.counts) if isinstance(self.counts, np.ndarray) and self.counts.ndim == 1 else 0
        columns = [(f"ids[{name!r}]", ids, np.uint64) for name, ids in self.ids.items()]
        for name, array, dtype in [("counts", self.counts, np.int64), *columns]:
            if not isinstance(array, np.ndarray) or array.dtype != dtype or array.shape != (items,) or not items:
                actual = f"{array.dtype}{list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
                raise ConfigError(
                    f"ItemCatalog.{name} is {actual}; give {np.dtype(dtype)}[{items or 'items'}], one number for each "
                    "of one or more items.",
                    field=name,
                )
        if self.counts.min() < 0:
            at = int(self.counts.argmin())
            raise ConfigError(
                f"ItemCatalog.counts has {self.counts[at]} for item {at}; counts are 0 or more.", field="counts"
            )


def item_catalog(reader: Reader, features: Sequence[str], *, history: Sequence[str] | None = None) -> ItemCatalog:
    """Collects the items of the positive samples of a reader in one pass.

    Args:
        reader: the samples.
        features: the item's ID-type features, the parts of its identity.
        history: un-pooled features of the events before the item, one for each of `features`, whose items count as
            well: for data with a sample per user, whose events are in one history. With a sample for each event, leave
            it out, as each event would count again in all later histories of the user.

    Raises:
        ConfigError: a feature is unknown, or there is none, or `history` does not fit.
        DataError: a sample has no id, or several, of a feature; or no sample is positive.
    """
    check_features(reader.schema, features)
    counted = counted_of(reader.schema, features, history)
    check_binary(reader.schema)
    counts = ItemCounts(features, counted)
    for number, batch in enumerate(reader.batches()):
        counts.add(batch, number)
    catalog = counts.catalog()
    if catalog is None:
        raise DataError("No sample is positive, so there are no items; see the reader's labels.")
    return catalog


class ItemCounts:
    """Counts the items of samples. Not thread-safe.

    Its memory is bounded by the number of distinct items.

    Args:
        features: the item's features.
        history: features of the events before it, aligned with each other; without any, only items of samples count.
        positive_only: whether samples count that are positive only.
    """

    def __init__(
        self, features: Sequence[str], history: Sequence[IdSequence] = (), *, positive_only: bool = True
    ) -> None:
        self._features = tuple(features)
        self._history = tuple(history)
        self._positive_only = positive_only
        self._items = np.empty((0, len(features)), np.uint64)
        self._counts = np.empty(0, np.int64)
        self._pending: list[NDArray[np.uint64]] = []
        self._pending_rows = 0

    def add(self, batch: Batch, number: int) -> None:
        """Counts the items of a batch.

        Args:
            batch: the samples.
            number: number of the batch, for errors.

        Raises:
            DataError: a sample has no id, or several, of a feature; or there are no labels.
        """
        chosen = positive(batch, number) if self._positive_only else np.ones(len(batch), np.bool_)
        rows = np.stack([single(batch, name, number) for name in self._features], 1)[chosen]
        if self._history:
            of = batch if chosen.all() else batch.take(np.flatnonzero(chosen))
            rows = np.concatenate([rows, np.stack([each.values for each in events_of(of, self._history, number)], 1)])
        self._pending.append(rows)
        self._pending_rows += len(rows)
        # Merging as many rows as there are items bounds the memory by the items, and each row is sorted only a few
        # times, for any number of batches.
        if self._pending_rows >= max(MERGED_ROWS, len(self._items)):
            self._merge()

    def catalog(self) -> ItemCatalog | None:
        """Returns the items so far, in the order of their ids; None if there are none."""
        self._merge()
        if not len(self._items):
            return None
        return ItemCatalog({name: self._items[:, i].copy() for i, name in enumerate(self._features)}, self._counts)

    def _merge(self) -> None:
        known = len(self._items)
        rows = np.concatenate([self._items, *self._pending])
        if rows.shape[1] == 1:  # Whole numbers are sorted faster than rows.
            merged, inverse = np.unique(rows[:, 0], return_inverse=True)
            merged = merged[:, None]
        else:
            merged, inverse = np.unique(rows, axis=0, return_inverse=True)
        inverse = inverse.reshape(-1)
        total = np.bincount(inverse[known:], minlength=len(merged))
        total[inverse[:known]] += self._counts
        self._items, self._counts = merged, total.astype(np.int64)
        self._pending, self._pending_rows = [], 0


class ItemDraws:
    """Draws items of a catalog, and tells how probable each is. Thread-safe.

    Args:
        catalog: the items.
        features: the features of an item; the catalog has them.
        by: "uniform" draws all entries of the catalog alike, "popularity" in proportion to counts ** power.
        power: see `by`.
    """

    def __init__(
        self, catalog: ItemCatalog, features: Sequence[str], by: Literal["uniform", "popularity"], power: float
    ) -> None:
        self._ids = tuple(catalog.ids[name] for name in features)
        self._counts = catalog.counts
        self._by = by
        self._power = power
        vars(self)  # Here, as two threads that make it corrupt memory with CPython 3.11 (python/cpython#97922).

    def draw(self, rng: np.random.Generator, count: int) -> Int64Array:
        """Returns the positions of drawn items in the catalog, int64 `[count]`."""
        if self._by == "uniform":
            return rng.integers(0, len(self._counts), count)
        return np.searchsorted(self._bounds, rng.random(count), side="right").astype(np.int64)

    def ids(self, drawn: Int64Array) -> list[Ids]:
        """Returns the ids of items at positions of the catalog, uint64 `[n]` for each feature."""
        return [ids[drawn] for ids in self._ids]

    def log_q(self, items: Sequence[Ids]) -> Floats:
        """Returns the logarithm of the probability with which each item is drawn, float32 `[n]`.

        An item that cannot be drawn has the smallest probability of those that can: one that nobody has met yet is as
        rare as the rarest.

        Args:
            items: ids of the items, uint64 `[n]` for each feature.
        """
        index = self._index
        if index.by_id is not None:
            found: Floats = index.by_id.log_q[np.minimum(items[0] - index.by_id.first, index.by_id.last)]
            return found
        code, known = _find(index.levels[0].ids, items[0])
        for ids, level in zip(items[1:], index.levels[1:], strict=True):
            part, is_part = _find(level.ids, ids)
            code, is_code = _find(level.codes, code * len(level.ids) + part)
            known &= is_part & is_code
        return np.where(known, index.log_q[code], index.least)

    def log_q_of_drawn(self, drawn: Int64Array) -> Floats:
        """Returns `log_q` of items at positions of the catalog, float32 `[n]`, without finding them by their ids."""
        return self._index.of_entries[drawn]

    @cached_property
    def _weights(self) -> NDArray[np.float64]:
        if self._by == "uniform":
            return np.ones(len(self._counts))
        # Relative to the largest count, as powers of counts may exceed float64.
        weights: NDArray[np.float64] = (self._counts / self._counts.max()) ** self._power
        return weights

    @cached_property
    def _bounds(self) -> NDArray[np.float64]:
        """The cumulative probabilities of the items, without the last one, which is 1."""
        cumulative = np.cumsum(self._weights)
        bounds: NDArray[np.float64] = cumulative[:-1] / cumulative[-1]
        return bounds

    @cached_property
    def _index(self) -> _Index:
        levels, code = [], np.zeros(len(self._counts), np.int64)
        for ids in self._ids:
            of_feature, part = np.unique(ids, return_inverse=True)
            codes, code = np.unique(code * len(of_feature) + part.reshape(-1), return_inverse=True)
            code = code.reshape(-1)
            levels.append(_Level(of_feature, codes))
        # Entries of the same item, which a catalog made by hand may have, are drawn with the sum of their chances.
        share = np.bincount(code, self._weights) / self._weights.sum()
        least = share[share > 0].min()
        log_q, log_least = np.log(np.maximum(share, least)).astype(np.float32), np.float32(np.log(least))
        by_id = _by_id(levels[0].ids, log_q, log_least) if len(levels) == 1 else None
        return _Index(levels, log_q, log_least, log_q[code], by_id)


class _Level(NamedTuple):
    """Finds items by one more feature: sorted ids of it, and sorted codes of those prefixes that items have.

    The codes of the first feature are the positions of its ids.
    """

    ids: Ids
    codes: Int64Array


class _ById(NamedTuple):
    """log(q) of all ids from `first` on, float32 `[last + 1]`; the entry `last` is of all ids outside of the range."""

    first: np.uint64
    last: np.uint64
    log_q: Floats


def _by_id(ids: Ids, log_q: Floats, least: np.float32) -> _ById | None:
    """Returns log(q) by id; None if the ids are spread too widely.

    Args:
        ids: sorted distinct ids.
        log_q: of each.
        least: of all other ids.
    """
    span = int(ids[-1]) - int(ids[0]) + 1
    if span > NARROW_IDS * len(ids):
        return None
    by_id = np.full(span + 1, least, np.float32)
    by_id[ids - ids[0]] = log_q
    return _ById(ids[0], np.uint64(span), by_id)  # Below `first`, the difference of unsigned numbers is large.


class _Index(NamedTuple):
    """Finds items: the levels of their features, log(q) of each item, float32 `[items]`, and the least of these.

    `of_entries` is log(q) of each entry of the catalog; `by_id` is None unless it replaces the levels.
    """

    levels: list[_Level]
    log_q: Floats
    least: np.float32
    of_entries: Floats
    by_id: _ById | None


def _find(values: NDArray[np.generic], of: NDArray[np.generic]) -> tuple[Int64Array, BoolArray]:
    """Returns the position of each number among sorted ones, or any if it is not among them, and whether it is."""
    at = np.minimum(np.searchsorted(values, of), len(values) - 1)
    return at, values[at] == of


class IdSequence(NamedTuple):
    """An un-pooled feature: its name, and how many ids of a sample count, from which end."""

    name: str
    most: int
    last: bool


def counted_of(schema: Schema, features: Sequence[str], history: Sequence[str] | None) -> tuple[IdSequence, ...]:
    """Returns the features of a history; none for None.

    Raises:
        ConfigError: there is not one un-pooled feature for each feature of the item, or they differ in length.
    """
    if history is None:
        return ()
    if isinstance(history, str) or len(history) != len(features):
        raise ConfigError(
            f"Invalid history = {history!r}; expected a list with one un-pooled feature for each of {list(features)}.",
            field="history",
        )
    counted = []
    for name in history:
        feature = schema.feature(name)
        if feature.pooling is not None or feature.max_length is None:
            raise ConfigError(
                f"history: feature {name!r} is pooled; name one with pooling=None, whose ids are the events.",
                field="history",
            )
        counted.append(IdSequence(name, feature.max_length, feature.keep == "last"))
    if len({each[1:] for each in counted}) > 1:
        raise ConfigError(
            f"history: {', '.join(history)} differ in max_length or keep; aligned sequences have the same.",
            field="history",
        )
    return tuple(counted)


def events_of(batch: Batch, history: Sequence[IdSequence], number: int) -> list[IdColumn]:
    """Returns the ids of each sample's events that count, for each feature of a history.

    Args:
        batch: the samples.
        history: the features.
        number: number of the batch, for errors.

    Raises:
        DataError: features of the history have different numbers of ids.
    """
    columns: list[IdColumn] = []
    for each in history:
        column = batch.id_features[each.name]
        starts = np.arange(len(column) + 1) if column.offsets is None else column.offsets
        limited = np.diff(starts)
        if limited.max(initial=0) <= each.most:  # All events count.
            offsets = starts
            columns.append(IdColumn(column.values, offsets))
        else:
            limited = np.minimum(limited, each.most)
            begins = starts[1:] - limited if each.last else starts[:-1]
            offsets = np.zeros(len(limited) + 1, np.int64)
            np.cumsum(limited, out=offsets[1:])
            index = np.arange(offsets[-1]) + np.repeat(begins - offsets[:-1], limited)
            columns.append(IdColumn(column.values[index], offsets))
        first = columns[0].offsets
        if first is not None and first is not offsets and not np.array_equal(first, offsets):
            row = int((np.diff(first) != limited).argmax())
            raise DataError(
                f"Features {history[0].name!r} and {each.name!r} of the history have different numbers of ids at row "
                f"{row} of batch {number}; they list the same events.",
                feature=each.name,
                row=row,
            )
    return columns


def check_binary(schema: Schema) -> None:
    """Raises ConfigError if a label is not binary, as a negative sample has no value of it."""
    for label in schema.targets:
        if label.kind != "binary":
            raise ConfigError(
                f"Label({label.name!r}) is of kind {label.kind!r}, of which a negative sample has no value; sample "
                "negatives for binary labels only.",
                field="labels",
            )


def check_catalog(catalog: ItemCatalog, features: Sequence[str], by: str) -> None:
    """Raises ConfigError if a catalog lacks a feature, or has no popular items though they are to be drawn."""
    for name in features:
        if name not in catalog.ids:
            raise ConfigError(f"The catalog lacks feature {name!r}; it has {list(catalog.ids)}.", field=name)
    if by != "uniform" and not catalog.counts.any():
        raise ConfigError(
            'All counts of the catalog are 0, so popularity is undefined; set by = "uniform".', field="catalog"
        )


def check_features(schema: Schema, features: Sequence[str]) -> None:
    """Raises ConfigError for features that negatives cannot replace."""
    if isinstance(features, str) or not features:
        raise ConfigError(f"Invalid features = {features!r}; expected a list of the item's features.", field="features")
    for name in features:
        schema.feature(name)


def positive(batch: Batch, number: int) -> BoolArray:
    """Returns which samples are positive."""
    if not batch.labels.shape[1]:
        raise DataError(f"Batch {number} has no labels, which mark positive samples; read them.", batch=number)
    chosen: BoolArray = np.asarray((batch.labels > 0).any(1))
    return chosen


def single(batch: Batch, name: str, number: int) -> Ids:
    """Returns the ids of a feature that has one for each sample."""
    column = batch.id_features[name]
    if column.weights is not None:
        raise DataError(
            f"Feature {name!r} of the item has weights of its ids, which a negative would lack; declare it without "
            "weights.",
            feature=name,
        )
    if column.offsets is None:
        return column.values
    lengths = np.diff(column.offsets)
    if (lengths != 1).any():
        row = int((lengths != 1).argmax())
        raise DataError(
            f"Feature {name!r} of the item has {lengths[row]} ids at row {row} of batch {number}; an item has one id "
            "of each of its features.",
            feature=name,
            row=row,
        )
    return column.values
