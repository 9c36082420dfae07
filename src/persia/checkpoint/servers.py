"""What a checkpoint says of the embedding PSs that wrote it: how many, and the clocks of their shards."""

from __future__ import annotations

from typing import Any

from persia.checkpoint.format import StatePart
from persia.checkpoint.reader import CheckpointReader

__all__ = ["MOST_SHARDS", "clock_gaps", "numbered_states"]

MOST_SHARDS = 1024
"""Of a table in one PS: shard s of PS p is number p * MOST_SHARDS + s in a checkpoint."""


def numbered_states(reader: CheckpointReader, role: str) -> list[Any]:
    """The states `role-0`, `role-1`, ... as far as there are any."""
    names = {part.name for part in reader.manifest.parts if isinstance(part, StatePart)}
    states: list[Any] = []
    while (name := f"{role}-{len(states)}") in names:
        states.append(reader.state(name))
    return states


def clock_gaps(servers: list[Any], table: str) -> dict[int, int]:
    """By shard of the checkpoint: how far its clock is behind the one that is furthest.

    Stamps count the requests of their own shard; with its gap added, those of several can be compared, as if all had
    been asked alike.

    Args:
        servers: `numbered_states(reader, "server")`.
        table: its name.
    """
    clocks = {
        number * MOST_SHARDS + shard: int(values["clocks"][0])
        for number, state in enumerate(servers)
        for shard, values in enumerate(state.get(table, ()))
    }
    return {shard: max(clocks.values()) - clock for shard, clock in clocks.items()}
