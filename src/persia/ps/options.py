"""Options of an embedding PS."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from persia import batching
from persia.store import EmbeddingStore, NativeStore

__all__ = ["ServerOptions"]


class ServerOptions(msgspec.Struct, frozen=True):
    """Options of an embedding PS.

    Args:
        nn_workers: number of NN workers that push.
        timeout: seconds that a push waits for those of the other NN workers, and after which callers give up; calls
            that wait for space for rows fail a little earlier.
        regions: directory of this PS alone for rows that outlive its process, such as "/dev/shm/persia-example/ps-0";
            None keeps rows in the memory of the process. Rows on disk outlive it with the regions, not without.
        neighbours: number of PSs of the same tables, this one included, that share the memory of this host.
        capacities: rows that this PS keeps of each table with a declared capacity, by name; see `persia.ps.shares`.
            None if it is the only PS, which keeps all.
        store: makes the store, given the threads of the PS.
        overcommit: accept tables whose capacity exceeds the memory of this host, with a warning.
        memory_rows: likewise, rows in memory of each table with `spill`.
    """

    nn_workers: int = 1
    timeout: float = 600.0
    regions: str | None = None
    neighbours: int = 1
    capacities: Mapping[str, int] | None = None
    store: Callable[[batching.ThreadPool], EmbeddingStore] = NativeStore
    overcommit: bool = False
    memory_rows: Mapping[str, int] | None = None
