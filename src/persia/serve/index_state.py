"""The vectors of items at one moment, as searches of an `ItemIndex` read them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from persia.nn.item_catalogue import ItemCatalogue, Towers

if TYPE_CHECKING:
    from usearch.index import Index

__all__ = ["IndexState", "padded_mask"]


@dataclass(frozen=True)
class IndexState:
    """The data of a search. Only `gone` ever changes, from False to True, so that searches need no lock.

    Attributes:
        towers: the network.
        step: its global step.
        keys: id of each item, uint64 `[items]`.
        graph: graph of vectors, by position in `numbers`.
        numbers: numbers of the items in the graph, int64 `[n]`.
        hidden: items that the graph has no current vector for, bool `[items]`: not in it, changed since, or removed.
        visible: number of items in the graph that are not hidden.
        fresh: numbers of items that have changed since the graph was built, `[n]`.
        vectors: vectors of the fresh items, float32 `[n, dim]`.
        gone: items whose rows were removed since the state was created, bool `[items]`. Searches skip them immediately.
            Not shared between states: a search in an earlier state must not see removals of a later one.
    """

    towers: Towers
    step: int
    keys: NDArray[np.uint64]
    graph: Index
    numbers: NDArray[np.int64]
    hidden: NDArray[np.bool_]
    visible: int
    fresh: NDArray[np.int64]
    vectors: NDArray[np.float32]
    gone: NDArray[np.bool_]

    def from_graph(self, queries: NDArray[np.float32], k: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Returns numbers and scores of the nearest items in the graph; scores of hidden and removed items are -inf.

        Args:
            queries: vectors of users, float32 `[users, dim]`.
            k: number of items that are wanted.
        """
        size, count, wanted = len(self.graph), k, min(k, self.visible)
        if not wanted:
            return np.empty((len(queries), 0), np.int64), np.empty((len(queries), 0), np.float32)
        while True:
            count = min(count, size)
            matches = self.graph.search(queries, count, threads=1)
            positions = np.asarray(matches.keys).reshape(len(queries), -1).astype(np.int64)
            scores = 1 - np.asarray(matches.distances, np.float32).reshape(len(queries), -1)
            counts = getattr(matches, "counts", None)
            if counts is not None:  # Keys beyond these counts are undefined.
                absent = np.arange(positions.shape[1]) >= np.asarray(counts).reshape(-1, 1)
                positions[absent], scores[absent] = 0, -np.inf
            items = self.numbers[positions]
            scores[self.hidden[items] | self.gone[items]] = -np.inf
            if count == size or (scores > -np.inf).sum(1).min() >= wanted:
                return items, scores
            count *= 2  # Some were hidden.

    def padded(self, catalogue: ItemCatalogue) -> IndexState:
        """Returns a state of the items of a catalogue, of which new ones are not in the graph."""
        count = len(catalogue)
        if len(self.gone) == count:
            return self
        hidden, gone = padded_mask(self.hidden, count, True), padded_mask(self.gone, count, False)
        return dataclasses.replace(self, keys=catalogue.keys, hidden=hidden, gone=gone)

    def subset(self, kept: NDArray[np.bool_]) -> IndexState:
        """Returns a state of some items, bool `[items]`, among them all that have a vector. They get new numbers."""
        number = np.cumsum(kept) - 1
        return dataclasses.replace(
            self,
            keys=self.keys[kept],
            numbers=number[self.numbers],
            hidden=self.hidden[kept],
            fresh=number[self.fresh],
            gone=self.gone[kept],
        )


def padded_mask(mask: NDArray[np.bool_], count: int, value: bool) -> NDArray[np.bool_]:
    """Returns a mask with a value for each of `count` items, of which the last ones are new."""
    return mask if len(mask) == count else np.concatenate([mask, np.full(count - len(mask), value)])
