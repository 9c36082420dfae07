"""Reads the state of the shards of embedding PSs besides rows from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from persia.checkpoint.format import StatePart
from persia.checkpoint.reader import CheckpointReader

__all__ = [
    "MOST_SHARDS",
    "clock_gaps",
    "server_pieces",
]

MOST_SHARDS = 1024
"""Maximum number of shards of a table in one PS: shard s of PS p is number p * MOST_SHARDS + s in a checkpoint."""


def server_pieces(reader: CheckpointReader) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Yields the number of a PS and the pieces of its state (see `EmbeddingPS.export_state`), one part at a time.

    The states are `server-0.0`, `server-0.1`, `server-1.0`, ...: the number of the PS, and of the part.
    """
    parts: list[tuple[int, int, str]] = []
    for part in reader.manifest.parts:
        if isinstance(part, StatePart) and part.name.startswith("server-"):
            number, _, place = part.name.removeprefix("server-").partition(".")
            if number.isdecimal() and place.isdecimal():
                parts.append((int(number), int(place), part.name))
    for server, _, name in sorted(parts):
        yield server, reader.state(name)


def clock_gaps(reader: CheckpointReader) -> dict[str, dict[int, int]]:
    """Returns, by table and shard, how far the shard's clock is behind the most advanced one.

    Stamps count the requests of their own shard. Adding the gap makes stamps of different shards comparable.
    """
    clocks: dict[str, dict[int, int]] = {}
    for number, pieces in server_pieces(reader):
        for piece in pieces:
            if piece["array"] == "clocks" and piece["start"] == 0:
                shard = number * MOST_SHARDS + piece["shard"]
                clocks.setdefault(piece["table"], {})[shard] = int(piece["values"][0])
    return {
        table: {shard: max(shards.values()) - clock for shard, clock in shards.items()}
        for table, shards in clocks.items()
    }
