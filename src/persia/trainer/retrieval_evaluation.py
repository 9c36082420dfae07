"""Evaluation of retrieval: each sample's item is ranked among all items, exactly, in blocks."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from persia.batching.batch import Batch
from persia.batching.id_column import IdColumn
from persia.batching.items import check_data, checked_items
from persia.errors import ConfigError, DataError, DivergedError
from persia.metrics import RetrievalFigures, RetrievalMetrics
from persia.metrics.checks import check_cutoffs
from persia.nn.catalogue_ranks import CatalogueRanks
from persia.nn.collection import EmbeddingCollection
from persia.nn.dense_step import DenseStep
from persia.nn.item_catalogue import (
    CHUNK,
    Catalogue,
    RowCatalogue,
    TowerFeatures,
    Towers,
    check_rows_are_items,
    key_of,
    only,
    towers_of,
    user_features,
    with_towers,
)
from persia.nn.row_access import RowAccess
from persia.schema import IdFeature, Schema
from persia.trainer.evaluation import Evaluator
from persia.trainer.sample_values import single_ids
from persia.types import Floats, Ids, Int64Array

__all__ = ["RetrievalEvaluator", "RetrievalOptions", "check_retrieval", "no_chosen_items"]

USERS = 1 << 16
"""Users that are ranked together. Each such group reads all items once."""

PADDING_FLOATS = 1 << 22
"""Maximum size of the features that are not pooled, of items that are looked up together."""

CHECKED = 1 << 20
"""Ids whose rows are asked for at a time."""


class RetrievalOptions(NamedTuple):
    """Options of `Trainer.evaluate_retrieval`.

    Attributes:
        key: ID-type feature that identifies an item; None for the item's only one.
        at: values of k.
        leave_out: ID-type features whose ids do not compete for their sample.
    """

    key: str | None
    at: Sequence[int]
    leave_out: Sequence[str]


class RetrievalEvaluator:
    """Ranks the items of samples among all items; read-only. Used by the training thread.

    Args:
        evaluator: puts network and collection into evaluation mode.
        network: has the towers; its replicas merge metrics.
        embeddings: looks up rows.
        device: of the network.
    """

    def __init__(
        self, evaluator: Evaluator, network: DenseStep, embeddings: EmbeddingCollection, device: torch.device
    ) -> None:
        self._evaluator = evaluator
        self._network = network
        self._embeddings = embeddings
        self._device = device
        self._rows = RowAccess(embeddings.schema, embeddings.connection.servers)

    def evaluate(
        self,
        data: Iterable[Batch],
        items: Batch | Iterable[Batch] | None,
        options: RetrievalOptions,
        *,
        may_be_empty: bool = False,
    ) -> RetrievalFigures:
        """Returns metrics on data; see `Trainer.evaluate_retrieval`. All NN workers call it, each for its batches."""
        check_data("data", data)
        at = check_cutoffs("at", options.at)
        schema = self._embeddings.schema
        with self._evaluator.evaluation_mode():
            towers = towers_of(self._network.model)
            key = key_of(towers.features[1], options.key)
            leave_out = _checked_names(schema, key, options.leave_out)
            samples = _Samples(schema, user_features(towers, schema), key, leave_out)
            self._embeddings.await_pushes()
            competing = self._items(towers, key, items)
            metrics = RetrievalMetrics(len(competing), at)
            connection = self._embeddings.connection
            own = islice(checked_items(iter(data)), connection.rank, None, connection.nn_workers)
            with contextlib.closing(self._embeddings.prefetch(samples.of(own))) as batches:
                users: list[_Users] = []
                for batch in batches:
                    vectors = _checked("users", towers.users(batch.dense, self._embeddings(batch)))
                    users.append(samples.next(vectors))
                    if sum(len(part.ids) for part in users) >= USERS:
                        self._rank(towers, competing, users, metrics)
                        users = []
            if users:
                self._rank(towers, competing, users, metrics)
        result = metrics.merged(self._network.replicas.gather).result()
        if not result.rows and not may_be_empty:
            raise no_chosen_items()
        return result

    def _items(self, towers: Towers, key: str, items: Batch | Iterable[Batch] | None) -> _Items:
        """Returns the items that compete."""
        schema = self._embeddings.schema
        table = schema.feature(key).table_name
        if items is not None:
            given = Catalogue(schema, towers.features[1], items, key)
            parts = [given.keys[at : at + CHECKED] for at in range(0, len(given), CHECKED)]
            found = np.concatenate([self._rows.contains({table: ids})[table] for ids in parts])
            order = np.argsort(given.keys, kind="stable")
            order = order[found[order]]
            competing = _Items(given.keys[order], lambda part: given.batch(order[part]))
        else:
            check_rows_are_items(towers, schema, key)
            catalogue = RowCatalogue(schema, key, self._rows.all_ids(table))
            competing = _Items(catalogue.keys, catalogue.batch)
        if not len(competing):
            raise DataError(
                f"No item has a row in table {table!r}, so there is nothing to retrieve; train first, or load a "
                "checkpoint.",
                table=table,
            )
        return competing

    def _vectors(self, towers: Towers, items: _Items, positions: Int64Array) -> Iterator[Tensor]:
        """Yields the vectors of the items at some positions, some thousands at a time."""
        schema, features = self._embeddings.schema, towers.features[1]
        few = _rows_at_a_time(schema)
        for start in range(0, len(positions), CHUNK):
            batch = items.batch(positions[start : start + CHUNK])
            if all(_is_row(schema.feature(name), batch.id_features[name]) for name in features):
                dense = torch.from_numpy(batch.dense).to(self._device)
                embeddings = {name: self._read(name, batch.id_features[name].values) for name in features}
                yield _checked("items", towers.items(dense, embeddings))
                continue
            parts = [batch.slice(at, at + few) for at in range(0, len(batch), few)]
            with contextlib.closing(self._embeddings.prefetch(parts)) as prepared:
                for part in prepared:
                    yield _checked("items", towers.items(part.dense, self._embeddings(part)))

    def _read(self, feature: str, ids: Ids) -> Tensor:
        """Returns the rows of a feature's ids, float32 `[n, dim]`: its embeddings, if each item has one id."""
        values = self._rows.read(self._embeddings.schema.feature(feature).table_name, ids, False).values
        return torch.from_numpy(np.asarray(values, np.float32)).to(self._device)

    def _rank(self, towers: Towers, items: _Items, parts: list[_Users], metrics: RetrievalMetrics) -> None:
        """Ranks the items of some users, and adds the ranks to the metrics."""
        vectors = torch.cat([part.vectors for part in parts])
        positions = items.positions(np.concatenate([part.ids for part in parts]))
        left_out = _pairs(items, parts)
        distinct, places = np.unique(positions[positions >= 0], return_inverse=True)
        chosen = torch.zeros_like(vectors)
        if len(distinct):
            of_items = torch.cat(list(self._vectors(towers, items, distinct)))
            rows = torch.from_numpy(np.flatnonzero(positions >= 0)).to(vectors.device)
            chosen[rows] = of_items[torch.from_numpy(places).to(vectors.device)]
        ranks = CatalogueRanks(
            vectors, chosen, torch.from_numpy(positions), torch.from_numpy(left_out), max(metrics.at)
        )
        start = 0
        for block in self._vectors(towers, items, np.arange(len(items))):
            ranks.add(start, block)
            start += len(block)
        above, equal, top = ranks.result()
        metrics.update(above.numpy(), equal.numpy(), top.numpy(), np.concatenate([part.weights for part in parts]))


def check_retrieval(model: torch.nn.Module, schema: Schema, leave_out: Sequence[str]) -> None:
    """Checks that a model can be evaluated among all rows of its item's table, before it is trained.

    Raises:
        ConfigError: it has no towers, its item has more than an id, or `leave_out` names no histories of items.
    """
    towers = with_towers(model)
    key = key_of(towers.features[1], None)
    check_rows_are_items(towers, schema, key)
    _checked_names(schema, key, leave_out)


def no_chosen_items() -> DataError:
    """Returns the error for data to evaluate without a sample that counts."""
    return DataError(
        "The data to evaluate have no sample whose label is above 0, so there is no item to rank. Check the path, the "
        "filter and the label of the reader; an iterator that was read before has no batch left."
    )


class _Users(NamedTuple):
    """Samples of a batch.

    Attributes:
        vectors: of the users, float32 `[n, dim]` on the device.
        ids: of their items, uint64 `[n]`.
        weights: float32 `[n]`.
        left_out_rows: rows of the pairs of a sample and an id that does not compete, int64 `[pairs]`.
        left_out_ids: ids of these pairs, uint64 `[pairs]`.
    """

    vectors: Tensor
    ids: Ids
    weights: Floats
    left_out_rows: Int64Array
    left_out_ids: Ids


class _Samples:
    """Samples with a chosen item. What is not needed on the device waits here while batches are looked up.

    Args:
        schema: of the batches.
        features: features of the user.
        key: feature of the chosen item.
        leave_out: features whose ids do not compete.
    """

    def __init__(self, schema: Schema, features: TowerFeatures, key: str, leave_out: Sequence[str]) -> None:
        self._schema = schema
        self._features = features
        self._key = key
        self._leave_out = leave_out
        self._waiting: deque[_Users] = deque()

    def of(self, data: Iterable[object]) -> Iterator[Batch]:
        """Yields batches of the user's features. Another thread may draw them."""
        for position, batch in enumerate(data):
            if not isinstance(batch, Batch):
                raise DataError(
                    f"Batch {position} was fed to embedding workers, and its ids are not here; evaluate `Batch`es.",
                    batch=position,
                )
            batch = self._completed(batch)
            batch.validate(self._schema, require_labels=False)
            labels = batch.labels[:, 0] if batch.labels.shape[1] else np.ones(len(batch), np.float32)
            rows = np.flatnonzero(labels > 0)  # NaN, a missing label, is not.
            if not len(rows):
                continue
            weights = labels if batch.weights is None else labels * batch.weights
            chosen = batch.take(rows)
            columns = [chosen.id_features[name] for name in self._leave_out]
            numbers = [_sample_numbers(column) for column in columns]
            self._waiting.append(
                _Users(
                    torch.empty(0),
                    single_ids(self._key, chosen, "identify items", "Rank"),
                    weights[rows].astype(np.float32),
                    np.concatenate([np.empty(0, np.int64), *numbers]),
                    np.concatenate([np.empty(0, np.uint64), *(column.values for column in columns)]),
                )
            )
            yield only(self._schema, chosen, self._features.ids)

    def _completed(self, batch: Batch) -> Batch:
        """Returns a batch in which features that ranking does not read are empty: it may lack them.

        So a reader without the drawn items of `shared_negatives` fits a model that was trained with them. Dense
        features may be missing from the end, where readers add their own.
        """
        schema, dense = self._schema, batch.dense
        read = {*self._features.ids, self._key, *self._leave_out}
        nothing = IdColumn(np.empty(0, np.uint64), np.zeros(len(batch) + 1, np.int64))
        columns = {name: column for name, column in batch.id_features.items() if name in read}
        columns |= {feature.name: nothing for feature in schema.id_features if feature.name not in read}
        ends = {name: place.stop for name, place in schema.dense_slices.items()}
        width = dense.shape[1] if dense.ndim == 2 else -1
        if (
            width < schema.dense_width
            and width in (0, *ends.values())
            and all(ends[name] <= width for name in self._features.dense)
        ):
            dense = np.pad(dense, ((0, 0), (0, schema.dense_width - width)))
        return dataclasses.replace(batch, id_features=columns, dense=dense)

    def next(self, vectors: Tensor) -> _Users:
        """Returns the samples of the oldest batch of `of` that were not returned yet, with their vectors."""
        return self._waiting.popleft()._replace(vectors=vectors)


class _Items:
    """The items that compete, by ascending id.

    Args:
        ids: uint64 `[items]`, ascending.
        batch: returns the features of the items at some positions, int64 `[n]`.
    """

    def __init__(self, ids: Ids, batch: Callable[[Int64Array], Batch]) -> None:
        self._ids = ids
        self._batch = batch

    def __len__(self) -> int:
        return len(self._ids)

    def positions(self, ids: Ids) -> Int64Array:
        """Returns the positions of ids, int64 `[n]`; -1 for ids that do not compete."""
        places = np.minimum(np.searchsorted(self._ids, ids), len(self._ids) - 1)
        return np.where(self._ids[places] == ids, places, -1).astype(np.int64)

    def batch(self, positions: Int64Array) -> Batch:
        """Returns the features of the items at some positions, int64 `[n]`."""
        return self._batch(positions)


def _is_row(feature: IdFeature, column: IdColumn) -> bool:
    """Returns whether each embedding of a feature is one row as it is stored."""
    return feature.pooling is not None and column.offsets is None and column.weights is None


def _rows_at_a_time(schema: Schema) -> int:
    """Returns how many items are looked up together: features that are not pooled have zeros for each."""
    dims = {name: table.dim for name, table in schema.resolved_tables().items()}
    width = sum(dims[f.table_name] * (f.max_length or 1) for f in schema.id_features if f.pooling is None)
    return max(1, min(CHUNK, PADDING_FLOATS // max(1, width)))


def _pairs(items: _Items, parts: Sequence[_Users]) -> Int64Array:
    """Returns the pairs of a user and a position of an item that does not compete, int64 `[2, pairs]`."""
    starts = np.cumsum([0, *(len(part.ids) for part in parts)])
    users = np.concatenate([part.left_out_rows + start for part, start in zip(parts, starts, strict=False)])
    positions = items.positions(np.concatenate([part.left_out_ids for part in parts]))
    pairs: Int64Array = np.stack([users, positions])[:, positions >= 0]
    return pairs


def _sample_numbers(column: IdColumn) -> Int64Array:
    """Returns the number of the sample of each id."""
    lengths = 1 if column.offsets is None else np.diff(column.offsets)
    return np.repeat(np.arange(len(column)), lengths)


def _checked_names(schema: Schema, key: str, names: Sequence[str]) -> tuple[str, ...]:
    """Returns the features whose ids do not compete.

    Raises:
        ConfigError: there is no such feature, or its ids are no items.
    """
    if isinstance(names, str):
        raise ConfigError(
            f"leave_out = {names!r} is one text; give a list of features, [{names!r}].", field="leave_out"
        )
    table = schema.feature(key).table_name
    of_items = [feature.name for feature in schema.id_features if feature.table_name == table and feature.name != key]
    for name in names:
        if name not in of_items:
            raise ConfigError(
                f"leave_out has {name!r}, whose ids are no items; "
                + (f"features of table {table!r} are {', '.join(of_items)}." if of_items else "leave it out."),
                field="leave_out",
            )
    return tuple(names)


def _checked(what: str, vectors: Tensor) -> Tensor:
    """Returns vectors as float32. Raises DivergedError unless all are finite."""
    bad = int((~vectors.isfinite()).any(1).sum())
    if bad:
        raise DivergedError(
            f"{bad} of {len(vectors)} vectors of {what} are not finite. The model has diverged: go back to a "
            "checkpoint, or lower the learning rates."
        )
    return vectors.float()
