"""Options of an embedding PS."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from persia import batching
from persia.services import MovableRows
from persia.store import EmbeddingStore, NativeStore
from persia.types import BucketMap

__all__ = ["ServerOptions"]


class ServerOptions(msgspec.Struct, frozen=True):
    """Options of an embedding PS.

    Args:
        nn_workers: number of NN workers that push, until `EmbeddingPS.switch` says another one.
        timeout: seconds that a push waits for the pushes of other NN workers, and after which callers give up; calls
            that wait for space for rows fail a little earlier.
        regions: directory, used by this PS alone, for rows that outlive its process, such as
            "/dev/shm/persia-example/ps-0"; None keeps rows in the memory of the process. Rows on disk outlive the
            process only with regions.
        neighbours: number of PSs of the same tables, including this one, that share the memory of this host.
        capacities: maximum rows in this PS of each table with a declared capacity, by name; see `persia.ps.shares`.
            None if it is the only PS, which stores all rows.
        store: creates the store, given the threads of the PS.
        overcommit: whether to accept tables whose capacity exceeds the memory of this host, with a warning.
        memory_rows: maximum rows in the memory of this PS of each table with `spill`, by name.
        buckets: the PS of each bucket of ids, unless the regions have a map. Requests are refused whose ids were routed
            by another version.
        rank: number of this PS in the map; None if its rows never move.
        peer: returns another PS by number, to which rows move; None if rows of this PS cannot move.
    """

    nn_workers: int = 1
    timeout: float = 600.0
    regions: str | None = None
    neighbours: int = 1
    capacities: Mapping[str, int] | None = None
    store: Callable[[batching.ThreadPool], EmbeddingStore] = NativeStore
    overcommit: bool = False
    memory_rows: Mapping[str, int] | None = None
    buckets: BucketMap = BucketMap.even(1)
    rank: int | None = None
    peer: Callable[[int], MovableRows] | None = None
