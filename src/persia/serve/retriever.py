"""`Retriever`: an index of items that follows a `Predictor`."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from types import TracebackType

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from persia.batching.batch import Batch
from persia.errors import ClosedError
from persia.nn.pooling import Embeddings
from persia.schema import Schema
from persia.serve.predictor import Predictor
from persia.serve.retrieval import IndexOptions, ItemIndex, Retrieved
from persia.types import Ids

__all__ = ["Retriever"]

LOG = logging.getLogger("persia.serve")


class _ServedRows:
    """The rows that a predictor serves at present, for an index."""

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor

    def read(self, batch: Batch) -> tuple[Tensor, Embeddings]:
        view = self._predictor.current()
        with view.in_use():
            dense, _, embeddings = view.readers.whole.read(batch, view.rows)
        return dense, embeddings

    def found(self, table: str, ids: Ids) -> NDArray[np.bool_]:
        return self._predictor.embeddings(table, ids)[0]


class Retriever:
    """Finds the nearest items of users, with the rows and the network that a predictor serves. Thread-safe.

    Two threads keep the index up to date: one computes the vectors of items whose rows have changed, the other builds
    the index again when there is a new version of the network, of which it leaves out those that come too fast. Removed
    items are not found any more once the predictor has applied their removal.

        with Predictor(url) as predictor, Retriever(predictor, items, key="item") as retriever:
            found = retriever.search(users, 100)

    Args:
        predictor: started before this is, and closed after it. Its network is a `TwoTower`, or has such towers.
        items: the catalogue; see `ItemIndex`.
        key: ID-type feature that identifies an item; see `ItemIndex`.
        options: of the index.
        seconds: between two looks for changes.
    """

    def __init__(
        self,
        predictor: Predictor,
        items: Batch | Iterable[Batch],
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

    # --- start and close ----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Computes the vectors of all items, and follows the predictor from then on. Blocks for the computation.

        Raises:
            MissingExtraError: usearch is not installed.
            ConfigError: the network has no towers, or `key` does not fit.
            DataError: the items do not fit the schema.
            ClosedError: the predictor has not started.
        """
        view = self._predictor.current()
        self._version = view.epoch, view.network.step
        index = ItemIndex(
            view.network.module,
            view.schema,
            self._items,
            _ServedRows(self._predictor),
            key=self._key,
            options=self._options,
            step=view.network.step,
        )
        self._predictor.listen(index)
        index.note_all()  # What has changed while it was built.
        index.refresh()
        self._index = index
        self._stop.clear()
        for name, work in (("persia-index", self.refresh), ("persia-index-build", self.rebuild)):
            thread = threading.Thread(target=self._follow, args=(work,), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def close(self) -> None:
        """Ends the threads, once what they compute at present is done."""
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def __enter__(self) -> Retriever:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _follow(self, work: Callable[[], None]) -> None:
        failing = False
        while not self._stop.wait(self._seconds):
            try:
                work()
                failing = False
            except Exception as error:  # It serves what it has, and tries again.
                if not failing:
                    LOG.warning("The index of items is not up to date: %s", error)
                failing = True

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
    def index(self) -> ItemIndex:
        """The index.

        Raises:
            ClosedError: it has not been built.
        """
        if self._index is None:
            raise ClosedError("The retriever has not started; call start(), or use it in a with statement.")
        return self._index

    def search(self, users: Batch, k: int) -> Retrieved:
        """Returns the nearest items of users; see `ItemIndex.search`."""
        return self.index.search(users, k)
