"""Embedding PSs in a checkpoint: the state of their shards besides rows, and what they cannot do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from persia.checkpoint.format import MOST_SHARDS, StatePart
from persia.checkpoint.reader import CheckpointReader

__all__ = ["by_problem", "clock_gaps", "server_pieces"]

NAMED = 4
"""Maximum number of problems in a warning."""


def server_pieces(reader: CheckpointReader, only: int | None = None) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Yields the number of a PS and the pieces of its state (see `EmbeddingPS.export_state`), one part at a time.

    The states are `server-0.0`, `server-0.1`, `server-1.0`, ...: the number of the PS, and of the part.

    Args:
        reader: of the checkpoint.
        only: number of the PS whose state to read; None for all.
    """
    parts: list[tuple[int, int, str]] = []
    for part in reader.manifest.parts:
        if isinstance(part, StatePart) and part.name.startswith("server-"):
            number, _, place = part.name.removeprefix("server-").partition(".")
            if number.isdecimal() and place.isdecimal() and only in (None, int(number)):
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


def by_problem(problems: Mapping[int, str]) -> str:
    """Returns a text with the problems, and for each the PSs that have it."""
    servers: dict[str, list[int]] = {}
    for server, problem in sorted(problems.items()):
        servers.setdefault(problem, []).append(server)
    texts = [f"PS {', '.join(map(str, which))} {problem}" for problem, which in servers.items()]
    more = len(texts) - NAMED
    return "; ".join([*texts[:NAMED], *([f"and {more} other problems"] if more > 0 else [])])
