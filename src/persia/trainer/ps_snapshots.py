"""Snapshots of the PSs for a checkpoint, and their state besides rows, taken while nothing trains."""

from __future__ import annotations

import functools
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from persia.errors import CheckpointError, PersiaError
from persia.rpc.fan_out import call_all, try_all
from persia.services import EmbeddingPS, SnapshotInfo
from persia.types import BucketMap

__all__ = ["begin_snapshots", "end_snapshots", "held_states"]

HELD_BYTES = 64 << 20
"""Maximum memory for the PSs' state besides rows while a checkpoint is written; more is written immediately."""


def begin_snapshots(
    servers: Sequence[EmbeddingPS], since: Sequence[Mapping[str, int]] | None, directory: str, *, live: bool
) -> tuple[str, list[SnapshotInfo], BucketMap]:
    """Begins a snapshot on all PSs: of changed rows if all of them know which, else of all rows.

    Args:
        servers: all PSs.
        since: `SnapshotInfo.numbers` of an earlier snapshot, by PS; None for all rows.
        directory: of the checkpoint.
        live: see `EmbeddingPS.begin_snapshot`.

    Returns:
        The name of the snapshots, what each PS says of its own, and the map by which all of them own their rows.

    Raises:
        CheckpointError: the PSs have different maps, or are not all PSs of their map.
    """
    place = "" if "://" in directory else os.path.abspath(directory)
    known = since or [{} for _ in servers]
    name = secrets.token_hex(8)
    try:
        maps = _maps(servers)
        _check_count(servers, maps[0])
        infos = [server.begin_snapshot(name, s, place, live) for server, s in zip(servers, known, strict=True)]
        maps += _maps(servers)  # Versions only rise, so what is equal before and after was so meanwhile.
        _check_equal(maps)
    except BaseException:
        end_snapshots(servers, name)
        raise
    if len({info.whole for info in infos}) == 1:
        return name, infos, maps[0]
    end_snapshots(servers, name)
    return begin_snapshots(servers, None, directory, live=live)


def end_snapshots(servers: Sequence[EmbeddingPS], name: str) -> None:
    """Ends the snapshots of this name."""
    # A PS that is gone has no snapshot either.
    try_all([functools.partial(server.end_snapshot, name) for server in servers], PersiaError)


def held_states(servers: Iterable[EmbeddingPS]) -> list[tuple[str, list[dict[str, Any]]]] | None:
    """Returns parts of the PSs' state, to be written later; None if that needs too much memory."""
    held: list[tuple[str, list[dict[str, Any]]]] = []
    nbytes = 0
    for number, server in enumerate(servers):
        for part, pieces in enumerate(server.export_state()):
            nbytes += sum(piece.values.nbytes for piece in pieces)
            if nbytes > HELD_BYTES:
                return None
            held.append((f"server-{number}.{part}", [piece._asdict() for piece in pieces]))
    return held


def _maps(servers: Sequence[EmbeddingPS]) -> list[BucketMap]:
    return call_all([server.buckets for server in servers])


def _check_count(servers: Sequence[EmbeddingPS], buckets: BucketMap) -> None:
    if len(servers) != buckets.servers:
        raise CheckpointError(
            f"Bucket map {buckets.version} has {buckets.servers} embedding PSs, and this process knows {len(servers)}: "
            "rows are moving to other PSs. Save again once they have moved.",
            versions=[buckets.version],
        )


def _check_equal(maps: Sequence[BucketMap]) -> None:
    versions = sorted({buckets.version for buckets in maps})
    if len(versions) > 1:
        raise CheckpointError(
            f"The embedding PSs have bucket maps {versions[0]} and {versions[-1]}: rows are moving to other PSs. "
            "Save again once they have moved.",
            versions=versions,
        )
