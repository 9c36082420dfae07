"""The items that can be retrieved: their features, and the items that use a changed row."""

from __future__ import annotations

import abc
import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from persia.batching.batch import Batch
from persia.batching.id_column import IdColumn
from persia.errors import ConfigError, DataError
from persia.nn.pooling import Embeddings
from persia.schema import Schema

__all__ = [
    "CHUNK",
    "Catalogue",
    "CurrentRows",
    "ItemCatalogue",
    "RowCatalogue",
    "TowerFeatures",
    "Towers",
    "check_rows_are_items",
    "item_features",
    "key_of",
    "only",
    "towers_of",
    "user_features",
    "with_towers",
]

CHUNK = 4096
"""Items whose vectors are computed at a time."""


class Towers(Protocol):
    """A network of two towers, such as `persia.nn.models.TwoTower` or `NextItem`, in evaluation mode.

    The higher the dot product of their vectors, the better an item fits a user.

    Dense features that a tower reads may be declared by `user_columns` and `item_columns`, int64 tensors with columns
    of `dense`, such as buffers; without them, a tower reads all dense features.

    Attributes:
        features: names of the user's and of the item's ID-type features.
    """

    features: tuple[tuple[str, ...], ...]

    def users(self, dense: Tensor, embeddings: Embeddings) -> Tensor:
        """Returns the users' vectors, float32 `[batch, dim]`."""

    def items(self, dense: Tensor, embeddings: Embeddings) -> Tensor:
        """Returns the items' vectors, float32 `[batch, dim]`."""


class TowerFeatures(NamedTuple):
    """Input of a tower.

    Attributes:
        ids: names of ID-type features.
        dense: names of dense features.
    """

    ids: tuple[str, ...]
    dense: tuple[str, ...]


class CurrentRows(Protocol):
    """The current rows of tables. Thread-safe."""

    def read(self, batch: Batch, features: Sequence[str]) -> tuple[Tensor, Embeddings]:
        """Returns dense features `[batch, n]` and embeddings of some ID-type features, on the network's device."""

    def ids(self, table: str) -> NDArray[np.uint64]:
        """Returns the ids that have a row, uint64 `[n]`, in any order. Needed if all rows of a table are items."""

    def found(self, table: str, ids: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Returns whether each id has a row, bool `[n]`."""


Tower: TypeAlias = Callable[[Tensor, Embeddings], Tensor]


class _Usage(NamedTuple):
    """The items that use each id of a table: `items[i]` has `ids[i]`. Sorted by id, with an entry for each item."""

    ids: NDArray[np.uint64]
    items: NDArray[np.int64]


class ItemCatalogue(abc.ABC):
    """Items, numbered from 0, each identified by an id of a table. Immutable.

    Attributes:
        features: names of the items' ID-type features.
        keys: id of each item, uint64 `[items]`.
        key_table: table of these ids.
    """

    features: tuple[str, ...]
    keys: NDArray[np.uint64]
    key_table: str

    def __len__(self) -> int:
        return len(self.keys)

    @abc.abstractmethod
    def batch(self, items: NDArray[np.int64]) -> Batch:
        """Returns the features of items, int64 `[n]`, as a batch with all features of the schema."""

    @abc.abstractmethod
    def using(self, table: str, ids: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Returns the numbers of the items that use any of these ids, in any order, possibly with duplicates."""

    def of_keys(self, table: str, ids: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Returns the numbers of the items whose own ids are among these ids of a table."""
        if table != self.key_table:
            return np.empty(0, np.int64)
        items = self.using(table, ids)
        return items[np.isin(self.keys[items], ids)]

    def unknown(self, table: str, ids: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Returns those of some ids of a table that become items if they have rows, uint64 `[n]`."""
        return np.empty(0, np.uint64)

    def vectors(
        self, tower: Tower, rows: CurrentRows, items: NDArray[np.int64]
    ) -> Iterator[tuple[NDArray[np.int64], Tensor]]:
        """Yields numbers of items, and their vectors, float32 `[n, dim]` on the CPU, some thousands at a time.

        Skips items whose id has no row, and items whose vector is not finite.
        """
        for start in range(0, len(items), CHUNK):
            part = items[start : start + CHUNK]
            part = part[rows.found(self.key_table, self.keys[part])]
            if not len(part):
                continue
            with torch.inference_mode():
                vectors = tower(*rows.read(self.batch(part), self.features)).float().cpu()
            finite = vectors.isfinite().all(1)
            yield part[finite.numpy()], vectors[finite]


class Catalogue(ItemCatalogue):
    """Items with their features; an item is identified by an id of one feature.

    Args:
        schema: schema of the model.
        features: names of the items' ID-type features.
        items: rows with these features, and with the dense features; other features are ignored.
        key: the ID-type feature whose id identifies the item; each id occurs once.

    Attributes:
        keys: uint64 `[items]`.
        key_table: table of `key`.

    Raises:
        ConfigError: `key` is not a feature of the items.
        DataError: there are no items, an item lacks a feature or has not one id for `key`, or an id of `key` is a
            duplicate.
    """

    def __init__(self, schema: Schema, features: Sequence[str], items: Batch | Iterable[Batch], key: str) -> None:
        key = key_of(features, key)
        batches = [items] if isinstance(items, Batch) else list(items)
        self._rows = Batch.concat([only(schema, batch, features) for batch in batches])
        self.key_table = schema.feature(key).table_name
        self.keys = _keys(self._rows.id_features[key], key)
        self.features = tuple(features)
        self._table_of = {name: schema.feature(name).table_name for name in features}

    @functools.cached_property
    def _usage(self) -> dict[str, _Usage]:
        """By table, the items that use each id. Evaluations do not need it."""
        parts: dict[str, list[_Usage]] = {}
        for name, table in self._table_of.items():
            parts.setdefault(table, []).append(_usage(self._rows.id_features[name]))
        return {table: _merged_usage(of_table) for table, of_table in parts.items()}

    def batch(self, items: NDArray[np.int64]) -> Batch:
        """See `ItemCatalogue.batch`."""
        return self._rows.take(items)

    def using(self, table: str, ids: NDArray[np.uint64]) -> NDArray[np.int64]:
        """See `ItemCatalogue.using`."""
        usage = self._usage.get(table)
        if usage is None or not len(ids):
            return np.empty(0, np.int64)
        first, last = np.searchsorted(usage.ids, ids, "left"), np.searchsorted(usage.ids, ids, "right")
        counts = last - first
        ends = np.cumsum(counts)
        places: NDArray[np.int64] = np.arange(ends[-1]) + np.repeat(first - (ends - counts), counts)
        return usage.items[places]


class RowCatalogue(ItemCatalogue):
    """Items that have no other feature than their id: the rows of a table.

    Args:
        schema: schema of the model.
        key: the ID-type feature of the item.
        ids: distinct ids, uint64 `[n]`.
    """

    def __init__(self, schema: Schema, key: str, ids: NDArray[np.uint64]) -> None:
        self.features = (key,)
        self.keys = ids
        self.key_table = schema.feature(key).table_name
        self._schema = schema
        self._order = np.argsort(ids)
        self._sorted = ids[self._order]

    def batch(self, items: NDArray[np.int64]) -> Batch:
        """See `ItemCatalogue.batch`."""
        rows, (key,) = len(items), self.features
        dense, labels = np.zeros((rows, self._schema.dense_width), np.float32), np.empty((rows, 0), np.float32)
        return only(self._schema, Batch({key: IdColumn(self.keys[items])}, dense, labels), self.features)

    def using(self, table: str, ids: NDArray[np.uint64]) -> NDArray[np.int64]:
        """See `ItemCatalogue.using`."""
        if table != self.key_table:
            return np.empty(0, np.int64)
        places, known = self._places(ids)
        return self._order[places[known]]

    def unknown(self, table: str, ids: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """See `ItemCatalogue.unknown`."""
        return ids[~self._places(ids)[1]] if table == self.key_table else ids[:0]

    def _places(self, ids: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Returns places in the sorted ids, and whether they have the id, both `[n]`."""
        if not len(self):
            return np.zeros(len(ids), np.int64), np.zeros(len(ids), np.bool_)
        places = np.minimum(np.searchsorted(self._sorted, ids), len(self) - 1)
        return places, self._sorted[places] == ids

    def with_ids(self, ids: NDArray[np.uint64]) -> RowCatalogue:
        """Returns these items, with the same numbers, and new ones behind. The new ids ascend."""
        places = np.searchsorted(self._sorted, ids)  # A few ids among millions: sorting all would take longer.
        numbers = np.arange(len(self), len(self) + len(ids))
        return self._of(
            np.concatenate([self.keys, ids]),
            np.insert(self._order, places, numbers),
            np.insert(self._sorted, places, ids),
        )

    def subset(self, kept: NDArray[np.bool_]) -> RowCatalogue:
        """Returns some of these items, bool `[items]`, in the same order with new numbers."""
        numbers = np.cumsum(kept) - 1
        of_order = kept[self._order]
        return self._of(self.keys[kept], numbers[self._order[of_order]], self._sorted[of_order])

    def _of(self, keys: NDArray[np.uint64], order: NDArray[np.int64], ascending: NDArray[np.uint64]) -> RowCatalogue:
        """Returns other items of the same table."""
        result = copy.copy(self)
        result.keys, result._order, result._sorted = keys, order, ascending
        return result


def check_rows_are_items(towers: Towers, schema: Schema, key: str) -> None:
    """Raises ConfigError unless the model reads nothing of an item but its id, so that each row of a table is one."""
    features = item_features(towers, schema)
    if features.ids != (key,) or features.dense or schema.feature(key).pooling is None:
        raise ConfigError(
            f"The item has the features {', '.join((*features.ids, *features.dense))}, but a row of table "
            f"{schema.feature(key).table_name!r} says one id only; give `items`, with the features of each.",
            field="items",
        )


def towers_of(model: torch.nn.Module | Towers) -> Towers:
    """Returns a model as a network of two towers.

    Raises:
        ConfigError: it has no towers, or is in training mode.
    """
    towers = with_towers(model)
    if isinstance(model, torch.nn.Module) and model.training:
        raise ConfigError("The model is in training mode; call `model.eval()` first.", field="model")
    return towers


def with_towers(model: torch.nn.Module | Towers) -> Towers:
    """Returns a model, in any mode, as a network of two towers.

    Raises:
        ConfigError: it has no towers.
    """
    if not all(hasattr(model, name) for name in ("features", "users", "items")):
        raise ConfigError(
            f"{type(model).__name__} has no towers; give a NextItem, a TwoTower, or a module with `features`, `users` "
            "and `items`.",
            field="model",
        )
    return cast("Towers", model)


def key_of(features: Sequence[str], key: str | None) -> str:
    """Returns the ID-type feature that identifies an item: the item's only one unless `key` names another.

    Raises:
        ConfigError: the item has several, and none is named; or the one named is not the item's.
    """
    if key is None and len(features) != 1:
        raise ConfigError(
            f"The item has the features {', '.join(features)}; say which one identifies it, such as "
            f"key={features[0]!r}.",
            field="key",
        )
    key = features[0] if key is None else key
    if key not in features:
        raise ConfigError(
            f"key = {key!r} is no ID-type feature of the item; the model has {', '.join(features)}.", field="key"
        )
    return key


def user_features(towers: Towers, schema: Schema) -> TowerFeatures:
    """Returns the features of the user's tower."""
    return TowerFeatures(tuple(towers.features[0]), _dense(towers, "user_columns", schema))


def item_features(towers: Towers, schema: Schema) -> TowerFeatures:
    """Returns the features of the item's tower."""
    return TowerFeatures(tuple(towers.features[1]), _dense(towers, "item_columns", schema))


def _dense(towers: Towers, columns: str, schema: Schema) -> tuple[str, ...]:
    """Returns the dense features of a tower: the features of its columns, or all features if it declares none."""
    positions = getattr(towers, columns, None)
    if positions is None:
        return schema.dense_names
    read = set(positions.tolist())
    return tuple(
        name for name, place in schema.dense_slices.items() if not read.isdisjoint(range(place.start, place.stop))
    )


def only(schema: Schema, batch: Batch, features: Sequence[str]) -> Batch:
    """Returns a batch with these ID-type features, the dense features, and no ids in all other features.

    Raises:
        DataError: it lacks one of the features, or does not fit the schema.
    """
    missing = [name for name in features if name not in batch.id_features]
    if missing:
        raise DataError(f"The batch lacks the features {', '.join(missing)}; give their ids.", feature=missing[0])
    rows = len(batch)
    nothing = IdColumn(np.empty(0, np.uint64), np.zeros(rows + 1, np.int64))
    columns = {f.name: batch.id_features[f.name] if f.name in features else nothing for f in schema.id_features}
    result = Batch(columns, batch.dense, np.empty((rows, 0), np.float32))
    result.validate(schema, require_labels=False)
    return result


def _keys(column: IdColumn, key: str) -> NDArray[np.uint64]:
    if column.offsets is not None and not (np.diff(column.offsets) == 1).all():
        row = int(np.flatnonzero(np.diff(column.offsets) != 1)[0])
        raise DataError(f"Item {row} has not one id of {key!r}; give each item one, which identifies it.", feature=key)
    keys = column.values.astype(np.uint64, copy=True)
    ids, counts = np.unique(keys, return_counts=True)
    if (counts > 1).any():
        twice = int(ids[counts > 1][0])
        raise DataError(f"Two items have the id {twice} of {key!r}; give each item once.", feature=key)
    return keys


def _usage(column: IdColumn) -> _Usage:
    lengths = 1 if column.offsets is None else np.diff(column.offsets)
    return _Usage(column.values, np.repeat(np.arange(len(column)), lengths))


def _merged_usage(parts: Sequence[_Usage]) -> _Usage:
    ids, items = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.argsort(ids, kind="stable")
    return _Usage(ids[order], items[order])
