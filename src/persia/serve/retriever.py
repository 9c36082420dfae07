"""`Retriever`: an index of items that follows a `Predictor`."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from persia.batching.batch import Batch
from persia.batching.input_rules import apply_rules
from persia.errors import ClosedError
from persia.nn.item_catalogue import TowerFeatures, item_features, towers_of, user_features
from persia.nn.pooling import Embeddings
from persia.schema import Schema
from persia.serve.item_files import read_items
from persia.serve.item_index import IndexOptions, ItemIndex, Retrieved
from persia.serve.predictor import Predictor
from persia.serve.schema_parts import check_user_columns, schema_of_columns, with_all_dense
from persia.telemetry.logs import get_logger
from persia.types import Ids

__all__ = ["Retriever", "RetrieverState"]

LOG = get_logger("persia.serve")


class RetrieverState(NamedTuple):
    """State of a `Retriever`.

    Attributes:
        step: global step of the network that computed the vectors.
        items: number of items that can be found.
        waiting: number of items whose vectors must be recomputed.
        problem: why the index is not up to date; empty if nothing is wrong.
    """

    step: int
    items: int
    waiting: int
    problem: str


class _Changes:
    """Notes which rows change while an index is built, and passes them on to it from then on. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._notes: list[Callable[[ItemIndex], None]] = []
        self._index: ItemIndex | None = None

    def note_changes(self, table: str, ids: Ids, removed: Ids) -> None:
        """See `ChangeListener`."""
        self._note(lambda index: index.note_changes(table, ids, removed))

    def note_all(self) -> None:
        """See `ChangeListener`."""
        self._note(ItemIndex.note_all)

    def pass_on(self, index: ItemIndex) -> None:
        """Notes at an index what has changed, and what a notice that is under way says later."""
        with self._lock:
            self._index = index
            for note in self._notes:
                note(index)

    def _note(self, note: Callable[[ItemIndex], None]) -> None:
        with self._lock:
            if self._index is None:
                self._notes.append(note)
            else:
                note(self._index)


class _ServedRows:
    """The rows that a predictor currently serves, for an index.

    Args:
        predictor: predictor that serves the rows.
        stop: once set, reading raises ClosedError, which aborts building an index.
    """

    def __init__(self, predictor: Predictor, stop: threading.Event) -> None:
        self._predictor = predictor
        self._stop = stop

    def read(self, batch: Batch, features: Sequence[str]) -> tuple[Tensor, Embeddings]:
        if self._stop.is_set():
            raise ClosedError("The retriever is closed.")
        view = self._predictor.current()
        # Features that are not pooled would be zeros for thousands of items.
        part = Batch({name: batch.id_features[name] for name in features}, batch.dense, batch.labels)
        with view.in_use():
            dense, _, embeddings = view.readers.of(features).read(part, view.rows)
        return dense, embeddings

    def ids(self, table: str) -> Ids:
        return self._predictor.ids(table)

    def found(self, table: str, ids: Ids) -> NDArray[np.bool_]:
        return self._predictor.embeddings(table, ids)[0]


class Retriever:
    """Finds the nearest items of users, with the rows and the network that a predictor serves. Thread-safe.

    Two threads keep the index up to date: one computes the vectors of items whose rows have changed, the other rebuilds
    the index for a new version of the network; it skips versions that arrive too fast. Searches no longer find removed
    items once the predictor has applied their removal.

        with Predictor(url) as predictor, Retriever(predictor, items, key="item") as retriever:
            nearest = retriever.search(users, 100)

    Args:
        predictor: predictor, started before and closed after this. Its network is a `TwoTower`, or has such towers.
        items: the catalogue; see `ItemIndex`. Or the path or URL of Parquet files with the items' features. None if
            each row of the item's table is an item: items that are published later can be found, too.
        key: ID-type feature that identifies an item; see `ItemIndex`.
        options: options of the index.
        seconds: interval of polling for changes.
    """

    def __init__(
        self,
        predictor: Predictor,
        items: Batch | Iterable[Batch] | str | os.PathLike[str] | None = None,
        *,
        key: str | None = None,
        options: IndexOptions | None = None,
        seconds: float = 1.0,
    ) -> None:
        self._predictor = predictor
        self._items = items
        self._key = key
        self._options = options
        self._seconds = seconds
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._version: tuple[int, int] = (-1, -1)
        self._index: ItemIndex | None = None
        self._problems: dict[str, str] = {}
        """Error of each thread; empty if it has none."""

    # --- start and close ----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Computes the vectors of all items, and follows the predictor from then on. Blocks for the computation.

        Raises:
            MissingExtraError: usearch is not installed.
            ConfigError: the network has no towers, or `key` does not fit.
            DataError: the items do not fit the schema, or their files cannot be read.
            ClosedError: the predictor has not started, or `stop` was called.
        """
        view = self._predictor.current()
        self._version = view.epoch, view.network.step
        items = self._items
        if isinstance(items, str | os.PathLike):
            features = item_features(towers_of(view.network.module), view.schema)
            items = read_items(items, view.schema, features, view.network.input_rules)
        meanwhile = _Changes()
        self._predictor.listen(meanwhile)
        try:
            index = ItemIndex(
                view.network.module,
                view.schema,
                items,
                _ServedRows(self._predictor, self._stop),
                key=self._key,
                options=self._options,
                step=view.network.step,
            )
            self._predictor.listen(index)  # Changes that both hear are computed once more, and none is missed.
        finally:
            self._predictor.unlisten(meanwhile)
        try:
            meanwhile.pass_on(index)
            index.refresh()
        except BaseException:
            self._predictor.unlisten(index)
            raise
        self._index = index
        for name, work in (("persia-index", self.refresh), ("persia-index-build", self.rebuild)):
            thread = threading.Thread(target=self._follow, args=(name, work, self._stop), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """Makes the threads, and a `start` in another thread, stop soon. Does not block; call `close` afterwards."""
        self._stop.set()

    def close(self) -> None:
        """Ends the threads. Later searches raise ClosedError."""
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        if self._index is not None:
            self._predictor.unlisten(self._index)
        self._stop = threading.Event()  # Allows another `start`.

    def __enter__(self) -> Retriever:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _follow(self, name: str, work: Callable[[], None], stop: threading.Event) -> None:
        while not stop.wait(self._seconds):
            try:
                work()
                self._problems[name] = ""
            except Exception as error:  # Serves the current index, and retries.
                if stop.is_set():
                    return
                if not self._problems.get(name):
                    LOG.warning("The index of items is not up to date: %s", error)
                self._problems[name] = str(error) or type(error).__name__

    def refresh(self) -> None:
        """Computes the vectors of items whose rows have changed. A thread does so every `seconds`. Blocks."""
        self.index.refresh()

    def rebuild(self) -> None:
        """Rebuilds the index if there is a new version of the network, or too many items have changed. Blocks."""
        view = self._predictor.current()
        version = view.epoch, view.network.step
        if version != self._version:
            self.index.load(view.network.module, view.network.step)
            self._version = version
        elif self.index.crowded:
            self.index.rebuild()

    # --- searches -----------------------------------------------------------------------------------------------

    @property
    def schema(self) -> Schema:
        """The input of the network."""
        return self._predictor.schema

    @property
    def user_features(self) -> TowerFeatures:
        """The features that the vector of a user is computed from."""
        view = self._predictor.current()
        return user_features(towers_of(view.network.module), view.schema)

    def state(self) -> RetrieverState | None:
        """Returns the state of the index; None before it has been built."""
        index = self._index
        if index is None:
            return None
        problem = next(filter(None, list(self._problems.values())), "")
        return RetrieverState(index.step, len(index), index.waiting, problem)

    @property
    def index(self) -> ItemIndex:
        """The index.

        Raises:
            ClosedError: it has not been built.
        """
        if self._index is None:
            raise ClosedError("The retriever has not started; call start(), or use it in a with statement.")
        return self._index

    def search(self, users: Batch | Mapping[str, Any], k: int) -> Retrieved:
        """Returns the nearest items of users; see `ItemIndex.search`.

        Args:
            users: as for `ItemIndex.search`; or raw columns of the user's features, such as {"history": [[3, 4]]} for
                one user, which are converted as by `Predictor.batch`.
            k: number of items.

        Raises:
            DataError: the users do not fit the schema; names the feature.
            ConfigError: `k` is not a positive whole number.
            ClosedError: the index has not been built.
        """
        index = self.index
        return index.search(self._users(users) if isinstance(users, Mapping) else users, k)

    def _users(self, columns: Mapping[str, Any]) -> Batch:
        """Returns users whose raw columns are given, with zeros for the dense features of items."""
        view, features = self._predictor.current(), self.user_features
        check_user_columns(view.schema, features, columns)
        schema = schema_of_columns(view.schema, columns)
        users = Batch.from_columns(schema, apply_rules(view.network.input_rules, columns), require_labels=False)
        self._predictor.note_columns(columns)
        return with_all_dense(users, schema.dense_names, view.schema)
