"""Reads the state of embedding PSs from a checkpoint: their number, and the state of their shards besides rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from persia.checkpoint.format import RowsPart, StatePart
from persia.checkpoint.reader import CheckpointReader

__all__ = [
    "CAPACITY_SCOPE",
    "MOST_SHARDS",
    "clock_gaps",
    "config_of_cluster",
    "numbered",
    "server_count",
    "server_pieces",
]

CAPACITY_SCOPE = "cluster"
"""Recorded as `capacity_scope`: capacities are of all PSs together. Without it, as in version 0.1, they are per PS."""

DEFAULT_CAPACITY = 1 << 30
"""Capacity of tables that declared none, in checkpoints without `capacity_scope`."""

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
    for link in reader.links:
        numbers |= {part.shard // MOST_SHARDS for part in link.manifest.parts if isinstance(part, RowsPart)}
    return max(numbers, default=0) + 1


def config_of_cluster(reader: CheckpointReader) -> dict[str, Any]:
    """Returns the saved configuration with capacities of all PSs together, and with `capacity_scope`.

    Capacities that were recorded per PS are multiplied by the number of PSs that wrote the checkpoint, so that all
    rows fit. A configuration without tables is returned as it is.
    """
    config = reader.config
    schema = config.get("schema")
    if config.get("capacity_scope") == CAPACITY_SCOPE or not isinstance(schema, dict):
        return config
    if not isinstance(tables := schema.get("tables"), list):
        return config
    servers = server_count(reader)
    converted = [_of_cluster(table, servers) for table in tables]
    return {**config, "schema": {**schema, "tables": converted}, "capacity_scope": CAPACITY_SCOPE}


def _of_cluster(table: Any, servers: int) -> Any:
    """Returns a recorded table with its capacity in all PSs; what is no table is left to those who convert it."""
    if not isinstance(table, dict):
        return table
    capacity = table.get("capacity")
    if capacity == DEFAULT_CAPACITY:
        capacity = None
    return {**table, "capacity": capacity * servers if isinstance(capacity, int) else capacity}


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
