"""Counts of ids that are not admitted yet: sketches of the shards that wrote a checkpoint, for other shards."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from persia.checkpoint.reader import CheckpointReader
from persia.checkpoint.servers import server_pieces

__all__ = ["SKETCH_ROWS", "AdmissionSketches"]

SKETCH_ROWS = 4
"""Rows of a sketch, as in `cpp/include/persia/layout.hpp`."""

Sketch = NDArray[np.uint16]
"""Counters `[SKETCH_ROWS, width]`, the width a power of two. An id has one in each row, at its hash modulo the width;
its count is the smallest of them."""


class AdmissionSketches:
    """The sketches of all shards that wrote a checkpoint, to continue with any number of PSs, shards and counters.

    A shard takes the larger one of each two counters that its ids may have had. So no count becomes too low, as in one
    sketch; more become too high, as more ids share a counter, and then ids are admitted early.

    Args:
        reader: of the checkpoint.
    """

    def __init__(self, reader: CheckpointReader) -> None:
        self._merged: dict[str, dict[int, list[Sketch]]] = {}
        """By table and number of shards in a PS: a sketch for each shard, merged over the PSs with this number.

        The shard of an id in its PS is its hash modulo their number, whatever the PS.
        """
        for (_, table), group in itertools.groupby(_sketches(reader), key=operator.itemgetter(0)):
            sketches = [sketch for _, sketch in group]
            known = self._merged.setdefault(table, {})
            before = known.get(len(sketches))
            known[len(sketches)] = sketches if before is None else list(map(_larger, before, sketches))

    def __contains__(self, table: str) -> bool:
        return table in self._merged

    def of_shard(self, table: str, shard: int, shards: int, counters: int) -> Sketch:
        """Returns the sketch of a shard, uint16 `[counters]`, row by row.

        Args:
            table: name of the table, which has sketches in the checkpoint.
            shard: number of the shard in its PS.
            shards: number of shards in the PS.
            counters: size of the sketch.
        """
        sketch = np.zeros((SKETCH_ROWS, counters // SKETCH_ROWS), np.uint16)
        for known, sources in self._merged[table].items():
            common = min(shards, known)  # Both are powers of two.
            for source in sources[shard % common :: common]:
                np.maximum(sketch, _resized(source, sketch.shape[1]), out=sketch)
        return sketch.reshape(-1)

    def used(self, table: str) -> float:
        """Returns the share of the counters of a table that are not 0."""
        sketches = [sketch for sources in self._merged[table].values() for sketch in sources]
        return float(np.mean([np.count_nonzero(sketch) / sketch.size for sketch in sketches]))


def _sketches(reader: CheckpointReader) -> Iterator[tuple[tuple[int, str], Sketch]]:
    """Yields the sketches of all shards: number of the PS and table, and counters, in the order of shards."""
    pieces = (
        (server, piece) for server, pieces in server_pieces(reader) for piece in pieces if piece["array"] == "sketch"
    )
    for (server, table, _), group in itertools.groupby(pieces, key=lambda p: (p[0], p[1]["table"], p[1]["shard"])):
        yield (server, table), np.concatenate([piece["values"] for _, piece in group]).reshape(SKETCH_ROWS, -1)


def _larger(one: Sketch, other: Sketch) -> Sketch:
    width = max(one.shape[1], other.shape[1])
    return np.maximum(_resized(one, width), _resized(other, width))


def _resized(sketch: Sketch, width: int) -> Sketch:
    """Returns a sketch of another width in which no count is lower."""
    have = sketch.shape[1]
    if have <= width:
        return np.tile(sketch, (1, width // have))
    folded: Sketch = sketch.reshape(SKETCH_ROWS, have // width, width).max(axis=1)
    return folded
