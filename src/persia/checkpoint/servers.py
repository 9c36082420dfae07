"""Reads the state of embedding PSs from a checkpoint: their number, and the state of their shards besides rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from persia.checkpoint.format import RowsPart, StatePart
from persia.checkpoint.reader import CheckpointReader

__all__ = ["MOST_SHARDS", "clock_gaps", "numbered", "server_count", "server_pieces"]

MOST_SHARDS = 1024
"""Maximum number of shards of a table in one PS: shard s of PS p is number p * MOST_SHARDS + s in a checkpoint."""


def numbered(reader: CheckpointReader, role: str) -> list[tuple[int, str]]:
    """Lists number and name of the states `role-0.0`, `role-0.1`, `role-1.0` or `role-0`, ..., in order."""
    found: list[tuple[int, int, str]] = []
    for part in reader.manifest.parts:
        if isinstance(part, StatePart) and part.name.startswith(f"{role}-"):
            number, _, place = part.name.removeprefix(f"{role}-").partition(".")
            if number.isdecimal() and (place or "0").isdecimal():
                found.append((int(number), int(place or 0), part.name))
    return [(number, name) for number, _, name in sorted(found)]


def server_count(reader: CheckpointReader) -> int:
    """Returns the number of PSs that wrote a checkpoint."""
    numbers = {number for number, _ in numbered(reader, "server")}
    numbers |= {part.shard // MOST_SHARDS for part in reader.manifest.parts if isinstance(part, RowsPart)}
    return max(numbers, default=0) + 1


def server_pieces(reader: CheckpointReader) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Yields the number of a PS and the pieces of its state (see `EmbeddingPS.export_state`), one part at a time."""
    for number, name in numbered(reader, "server"):
        if "." in name:
            yield number, reader.state(name)


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
        table: {shard: max(found.values()) - clock for shard, clock in found.items()} for table, found in clocks.items()
    }
