"""Follows the bucket map of the embedding PSs (docs/reference/moves.md, rule 5)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from persia.batching import RoutedBatch
from persia.errors import ClosedError, ConfigError, StaleMapError
from persia.membership.directory import UNREACHABLE
from persia.retry import Backoff, Deadline, retry
from persia.services import EmbeddingPS
from persia.types import BucketMap
from persia.worker.routing import Router

__all__ = ["MapFollower", "map_of"]

T = TypeVar("T")

FOLLOW = Backoff(0.01, 0.5)
"""Pauses of calls that are refused: PSs may serve no requests while rows move."""


class MapFollower:
    """The embedding PSs of an embedding worker, and the bucket map by which it sorts ids. Thread-safe.

    Args:
        servers: the embedding PSs, by partition.
        router: sorts ids by the bucket map of these PSs.
        newest_map: returns the newest bucket map of the PSs, and the PSs of this map; None if the map never changes.
        timeout: maximum seconds for which a refused call is repeated.
    """

    def __init__(
        self,
        servers: Sequence[EmbeddingPS],
        router: Router,
        newest_map: Callable[[], tuple[BucketMap, Sequence[EmbeddingPS]]] | None,
        timeout: float,
    ) -> None:
        self._servers = list(servers)
        self._router = router
        self._newest_map = newest_map
        self._timeout = timeout
        self._lock = threading.Lock()

    def adopt(self, servers: Sequence[EmbeddingPS]) -> None:
        """Continues with the current bucket map of the PSs, while no batch is between its lookup and its push.

        Registered batches are sorted by the map at their next lookup. A batch that was looked up before cannot be
        pushed or refreshed: the PSs refuse it, as `StaleMapError`.

        Args:
            servers: the PSs of the map. The first one is asked for it.

        Raises:
            ConfigError: the PSs are more or fewer than in their bucket map.
            StaleMapError: their map is earlier than that of this embedding worker.
        """
        buckets = map_of(servers)
        if buckets.version < self._router.buckets.version:
            raise StaleMapError(
                f"The embedding PSs have bucket map {buckets.version}, and this embedding worker has bucket map "
                f"{self._router.buckets.version}, a later one. Adopt a map once all PSs have it.",
                routed=self._router.buckets.version,
                current=buckets.version,
            )
        self._servers = list(servers)
        self._router.buckets = buckets

    def follow_map(self, version: int) -> None:
        """Continues with the newest bucket map of the PSs; see `persia.services.EmbeddingWorker`.

        Raises:
            StaleMapError: no PS has a map of this version, or this embedding worker cannot follow.
        """

        def check() -> None:
            if (current := self._router.buckets.version) < version:
                raise StaleMapError(
                    f"This embedding worker has bucket map {current}, and bucket map {version} is in force. Wait until "
                    "the PSs have adopted it.",
                    routed=current,
                    current=version,
                )

        self._by_map(check)

    def _by_map(self, call: Callable[[], T]) -> T:
        """Makes calls whose ids are routed by the map; again by the newer map while a PS refuses them (rule 5)."""
        if self._newest_map is None:
            return call()
        return retry(call, transient=self._follows, deadline=Deadline(self._timeout), backoff=FOLLOW)

    def _follows(self, error: Exception) -> bool:
        """Returns whether a call may succeed by the newest map of the PSs, after adopting it. Never an older one."""
        if not isinstance(error, StaleMapError | ClosedError) or self._newest_map is None:  # Closed: it has left.
            return False
        try:
            buckets, servers = self._newest_map()
        except UNREACHABLE:  # Until the deadline of the call that was refused.
            return True
        with self._lock:
            if buckets.version > self._router.buckets.version:
                self._servers = list(servers)
                self._router.buckets = buckets
        return True

    def _stale(self, sorted_for: int, version: int, servers: int) -> StaleMapError:
        current = self._router.buckets.version
        return StaleMapError(
            f"A batch is sorted for {sorted_for} embedding PSs, by bucket map {version}, and there are {servers} now, "
            f"with bucket map {current}. Look it up again.",
            routed=version,
            current=current,
        )

    def _in_order(self, batch: RoutedBatch) -> RoutedBatch:
        """Returns a batch, sorted by the current bucket map."""
        return batch if batch.buckets.version == self._router.buckets.version else self._router.sort_again(batch)


def map_of(servers: Sequence[EmbeddingPS]) -> BucketMap:
    """Returns the bucket map of the PSs. Raises ConfigError if they are not as many as in the map."""
    buckets = servers[0].buckets()
    if buckets.servers != len(servers):
        raise ConfigError(
            f"An embedding worker has {len(servers)} embedding PSs, and their bucket map has {buckets.servers}. Start "
            "all roles of a run with the same number of PSs, each with "
            f"ServerOptions(buckets=BucketMap.even({len(servers)})).",
            field="servers",
        )
    return buckets
