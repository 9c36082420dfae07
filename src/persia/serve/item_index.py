"""Nearest-neighbour search over the vectors of items, kept up to date from the log of changes."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from persia.batching.batch import Batch
from persia.checks import MAX_THREADS, check_choice, check_integer, plain, plain_fields
from persia.errors import ConfigError, DataError, MissingExtraError
from persia.nn.item_catalogue import (
    CHUNK,
    Catalogue,
    CurrentRows,
    ItemCatalogue,
    RowCatalogue,
    Towers,
    check_rows_are_items,
    key_of,
    only,
    towers_of,
)
from persia.schema import Schema
from persia.serve.index_state import IndexState, padded_mask
from persia.telemetry.logs import get_logger

if TYPE_CHECKING:
    from usearch.index import Index

__all__ = ["IndexOptions", "ItemIndex", "Retrieved"]

LOG = get_logger("persia.serve")

MIN_FRESH = 1024
"""Number of items outside the graph that never causes a rebuild."""

FRESH_SHARE = 8
"""The graph is rebuilt if more than one in this many items are outside it."""


class IndexOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of an `ItemIndex` that have defaults.

    Args:
        dtype: type of the vectors in the graph: "f32" or "f16". Integers are not offered: usearch scales each vector
            for them, which changes the order of products.
        connectivity: edges of a vector in the graph; more improve recall, and need more memory.
        expansion_add: number of candidates that are examined when a vector is added.
        expansion_search: number of candidates that are examined in a search; more improve recall, and take longer.
        threads: threads that build the graph.
    """

    dtype: str = "f32"
    connectivity: int = 16
    expansion_add: int = 128
    expansion_search: int = 128
    threads: int = 1

    def __post_init__(self) -> None:
        plain_fields(self)
        check_choice("dtype", self.dtype, ("f32", "f16"))
        for name in ("connectivity", "expansion_add", "expansion_search"):
            check_integer(name, getattr(self, name), 1, 1 << 16)
        check_integer("threads", self.threads, 1, MAX_THREADS)


class Retrieved(NamedTuple):
    """The nearest items of each user.

    Attributes:
        ids: uint64 `[users, k]`, nearest first; fewer columns if there are fewer items.
        scores: float32 `[users, k]`: products of the vectors of user and item, at most 1 for `TwoTower`.
        step: global step of the network that computed both.
    """

    ids: NDArray[np.uint64]
    scores: NDArray[np.float32]
    step: int


class ItemIndex:
    """The vectors of items in a graph (HNSW, by usearch), searched by the vectors of users. Thread-safe.

    An item is in the index while its own id has a row. Vectors of items whose rows have changed are recomputed, and
    searched by brute force in addition to the graph until the graph is rebuilt. Searches and updates do not wait for
    each other. A new version of the network changes all vectors: the new vectors replace the old ones atomically.
    Vectors of users and items always come from the same version.

    Args:
        model: network of two towers in evaluation mode, such as `persia.nn.models.TwoTower`.
        schema: its input.
        items: the catalogue: rows with the item's features, as one batch or several. A user's features may be left out.
            None if the id is all that the model reads of an item: then each row of the item's table is one, and rows
            that are added later become items.
        rows: source of the rows.
        key: ID-type feature whose id identifies the item; by default the item's only one.
        options: precision and effort of the search.
        step: global step of the model.

    Raises:
        MissingExtraError: usearch is not installed.
        ConfigError: the model has no towers, or `key` or an option does not fit.
        DataError: the items do not fit the schema, or two have the same id.
    """

    def __init__(
        self,
        model: torch.nn.Module | Towers,
        schema: Schema,
        items: Batch | Iterable[Batch] | None,
        rows: CurrentRows,
        *,
        key: str | None = None,
        options: IndexOptions | None = None,
        step: int = 0,
    ) -> None:
        try:
            import usearch.index  # noqa: F401
        except ImportError as error:
            raise MissingExtraError(
                'ItemIndex needs usearch: pip install "persia-recsys[usearch]".', extra="usearch"
            ) from error
        towers = towers_of(model)
        features = towers.features[1]
        key = key_of(features, key)
        self._schema = schema
        self._rows = rows
        self._options = options or IndexOptions()
        self._catalogue: ItemCatalogue = _catalogue(towers, schema, items, rows, key)
        self._catalogue.using(self._catalogue.key_table, np.empty(0, np.uint64))  # Sorts it before changes come.
        self._lock = threading.Lock()  # Guards the masks of changes, and replacement of the state.
        self._building = threading.Lock()  # One graph is built at a time.
        self._refreshing = threading.Lock()  # Items keep their numbers while it is held.
        self._dirty = np.zeros(len(self._catalogue), np.bool_)
        """Items whose vectors must be recomputed."""
        self._dirty_in_build: NDArray[np.bool_] | None = None
        """Items whose vectors must be recomputed in the state that is being built."""
        self._arrived: list[NDArray[np.uint64]] = []
        """Ids that become items."""
        self._listed = True
        """Whether changes since the catalogue was made are known by id."""
        self._state = self._built(towers, step)

    def __len__(self) -> int:
        """Returns the number of items that can be found."""
        state = self._state
        return int(np.count_nonzero(~state.hidden & ~state.gone)) + int(np.count_nonzero(~state.gone[state.fresh]))

    @property
    def step(self) -> int:
        """Global step of the network that computed the vectors."""
        return self._state.step

    @property
    def crowded(self) -> bool:
        """Whether too many items have changed since the graph was built for fast searches: call `rebuild`."""
        return len(self._state.fresh) > max(MIN_FRESH, len(self) // FRESH_SHARE)

    @property
    def waiting(self) -> int:
        """Number of items whose vectors must be computed."""
        return int(np.count_nonzero(self._dirty)) + sum(map(len, list(self._arrived)))

    # --- changes ------------------------------------------------------------------------------------------------

    def note_changes(self, table: str, ids: NDArray[np.uint64], removed: NDArray[np.uint64]) -> None:
        """Records rows that have changed; `refresh` computes the vectors. Does not block.

        When this returns, searches no longer find items whose own row was removed.

        Args:
            table: name of the table.
            ids: uint64 `[n]`, rows that were set, after the rows in `removed` were removed.
            removed: uint64 `[m]`.
        """
        while True:
            catalogue = self._catalogue
            changed = [catalogue.using(table, part) for part in (ids, removed)]
            gone = catalogue.of_keys(table, np.setdiff1d(removed, ids))
            arrived = catalogue.unknown(table, ids)
            with self._lock:
                if self._catalogue is not catalogue:
                    continue  # Its items may have other numbers.
                if len(arrived):
                    self._arrived.append(arrived)
                for mask in (self._dirty, self._dirty_in_build):
                    if mask is not None:
                        for items in changed:
                            mask[items] = True
                self._state.gone[gone] = True
                return

    def note_all(self) -> None:
        """Records that any row may have changed. Does not block."""
        with self._lock:
            self._listed = not isinstance(self._catalogue, RowCatalogue)
            self._dirty[:] = True
            if self._dirty_in_build is not None:
                self._dirty_in_build[:] = True

    def refresh(self) -> int:
        """Computes the vectors of items whose rows have changed. Blocks; searches go on meanwhile.

        Returns:
            The number of items whose rows had changed.
        """
        with self._refreshing:
            self._grow()
            with self._lock:
                before, items = self._state, np.flatnonzero(self._dirty)
                self._dirty[:] = False
            if not len(items):
                return 0
            try:
                after = self._updated(before, items)
            except BaseException:
                with self._lock:
                    self._dirty[items] = True
                raise
            with self._lock:
                self._exchange(after, items)
        return len(items)

    def _grow(self) -> None:
        """Adds the ids that have arrived to the catalogue. Their vectors are to be computed."""
        catalogue = self._catalogue
        if not isinstance(catalogue, RowCatalogue):
            return
        table = catalogue.key_table
        with self._lock:
            parts, listed = self._arrived, self._listed
            self._arrived, self._listed = [], True
        try:
            ids = np.unique(
                np.concatenate([np.empty(0, np.uint64), *parts, *([] if listed else [self._rows.ids(table)])])
            )
        except BaseException:
            with self._lock:
                self._arrived, self._listed = parts + self._arrived, False
            raise
        new = catalogue.unknown(table, ids)
        if not len(new):
            return
        catalogue = catalogue.with_ids(new)
        # An id may arrive twice: a change that is noted with the earlier catalogue is in the rows by now.
        with self._lock:
            self._catalogue = catalogue
            self._dirty = padded_mask(self._dirty, len(catalogue), True)
            if self._dirty_in_build is not None:
                self._dirty_in_build = padded_mask(self._dirty_in_build, len(catalogue), True)
            self._state = self._state.padded(catalogue)

    def load(self, model: torch.nn.Module | Towers, step: int) -> None:
        """Computes all vectors with a version of the network, then replaces the old ones atomically. Blocks.

        Drops ids without a row from items that are the rows of a table.

        Args:
            model: the version; it must not change afterwards.
            step: its global step.

        Raises:
            ConfigError: it has other features.
        """
        towers = towers_of(model)
        if towers.features != self._state.towers.features:
            raise ConfigError("The towers of the new version have other features; make another index.", field="model")
        with self._building:
            with self._lock:
                self._dirty_in_build = np.zeros(len(self._catalogue), np.bool_)
            try:
                state = self._built(towers, step)
                while True:
                    with self._lock:
                        items = np.flatnonzero(self._dirty_in_build)
                        self._dirty_in_build[:] = False
                    if len(items):
                        state = self._updated(state, items)
                    if self._try_replace(state):
                        return
            finally:
                with self._lock:
                    self._dirty_in_build = None

    def rebuild(self) -> None:
        """Computes all vectors with the current version, and builds their graph. Blocks, as `load` does."""
        state = self._state
        self.load(state.towers, state.step)

    def _try_replace(self, state: IndexState) -> bool:
        """Replaces the state by one that was built, and returns True, unless rows have changed in between."""
        with self._refreshing:
            kept = self._kept(state)
            with self._lock:
                assert self._dirty_in_build is not None
                if len(state.keys) != len(self._catalogue) or self._dirty_in_build.any():
                    return False  # A row that was set after `_kept` is noted now, or arrives later as a new id.
                self._dirty[:] = False
                if kept is not None:
                    assert isinstance(self._catalogue, RowCatalogue)
                    self._catalogue = self._catalogue.subset(kept)
                    self._dirty = self._dirty[kept]
                    state = state.subset(kept)
                self._state = dataclasses.replace(state, gone=np.zeros(len(state.keys), np.bool_))
        return True

    def _kept(self, state: IndexState) -> NDArray[np.bool_] | None:
        """Returns the items that a state finds or whose ids have a row, bool `[items]`; None to keep all."""
        if not isinstance(self._catalogue, RowCatalogue):
            return None
        kept = ~state.hidden
        kept[state.numbers] = True
        kept[state.fresh] = True
        others = np.flatnonzero(~kept)
        for start in range(0, len(others), CHUNK):
            part = others[start : start + CHUNK]
            kept[part] = self._rows.found(self._catalogue.key_table, state.keys[part])
        return None if kept.all() else kept

    def _exchange(self, state: IndexState, items: NDArray[np.int64]) -> None:
        """Makes a state the current one. Its data of these items are newer than recorded removals."""
        gone = self._state.gone.copy()
        gone[items] &= self._dirty[items]
        self._state = dataclasses.replace(state, gone=gone)

    def _built(self, towers: Towers, step: int) -> IndexState:
        from usearch.index import Index

        options, catalogue = self._options, self._catalogue
        count = len(catalogue)
        hidden = np.ones(count, np.bool_)
        graph: Index | None = None
        numbers, dim, size = [np.empty(0, np.int64)], 1, 0
        for items, vectors in catalogue.vectors(towers.items, self._rows, np.arange(count)):
            if graph is None:
                dim = vectors.shape[1]
                graph = Index(
                    ndim=dim,
                    metric="ip",
                    dtype=options.dtype,
                    connectivity=options.connectivity,
                    expansion_add=options.expansion_add,
                    expansion_search=options.expansion_search,
                )
            graph.add(np.arange(size, size + len(items)), vectors.numpy(), threads=options.threads)
            numbers.append(items)
            size += len(items)
            hidden[items] = False
        if graph is None:
            graph = Index(ndim=dim, metric="ip", dtype="f32")
        none = np.empty(0, np.int64)
        nothing, gone = np.empty((0, dim), np.float32), np.zeros(count, np.bool_)
        return IndexState(
            towers, step, catalogue.keys, graph, np.concatenate(numbers), hidden, size, none, nothing, gone
        )

    def _updated(self, state: IndexState, items: NDArray[np.int64]) -> IndexState:
        """Returns a state with the current vectors of these items."""
        catalogue = self._catalogue
        state = state.padded(catalogue)
        hidden = state.hidden.copy()
        hidden[items] = True
        stays = ~np.isin(state.fresh, items)
        numbers, vectors = [state.fresh[stays]], [state.vectors[stays]]
        for part, values in catalogue.vectors(state.towers.items, self._rows, items):
            numbers.append(part)
            vectors.append(values.numpy())
        if not len(vectors[0]):  # A state without items has an arbitrary dim.
            numbers, vectors = (numbers[1:], vectors[1:]) if len(vectors) > 1 else (numbers, vectors)
        return dataclasses.replace(
            state,
            hidden=hidden,
            visible=int(np.count_nonzero(~hidden[state.numbers])),
            fresh=np.concatenate(numbers),
            vectors=np.concatenate(vectors),
        )

    # --- searches -----------------------------------------------------------------------------------------------

    def search(self, users: Batch, k: int) -> Retrieved:
        """Returns the `k` items whose vectors have the largest products with the users' vectors.

        The search of the graph is approximate; see `IndexOptions.expansion_search`. Blocks for the computation only.

        Args:
            users: rows with the user's features; the item's may be left out.
            k: number of items.

        Raises:
            DataError: a batch does not fit the schema, or a user's vector is not finite.
            ConfigError: `k` is not a positive whole number.
        """
        k = plain(k)
        check_integer("k", k, 1)
        if not isinstance(users, Batch):
            raise DataError(
                f"users are of type {type(users).__name__}; give a Batch, or to `Retriever.search` columns such as "
                "{'history': [[3, 4]]}."
            )
        state = self._state
        batch = only(self._schema, users, state.towers.features[0])
        with torch.inference_mode():
            queries = state.towers.users(*self._rows.read(batch, state.towers.features[0])).float().cpu().numpy()
        if not np.isfinite(queries).all():
            raise DataError("The vector of a user is not finite; check the dense features of the batch.")
        fresh_scores = (
            np.where(state.gone[state.fresh], -np.inf, queries @ state.vectors.T) if len(state.fresh) else None
        )
        items, scores = state.from_graph(queries, k)
        if fresh_scores is not None:
            items = np.concatenate([items, np.broadcast_to(state.fresh, fresh_scores.shape)], 1)
            scores = np.concatenate([scores, fresh_scores.astype(np.float32)], 1)
        count = min(k, int((scores > -np.inf).sum(1).min()))
        order = np.argsort(-scores, axis=1, kind="stable")[:, :count]
        nearest = np.take_along_axis(items, order, 1)
        return Retrieved(state.keys[nearest], np.take_along_axis(scores, order, 1), state.step)


def _catalogue(
    towers: Towers, schema: Schema, items: Batch | Iterable[Batch] | None, rows: CurrentRows, key: str
) -> ItemCatalogue:
    if items is not None:
        return Catalogue(schema, towers.features[1], items, key)
    check_rows_are_items(towers, schema, key)
    return RowCatalogue(schema, key, rows.ids(schema.feature(key).table_name))
