"""Registers batches with embedding workers in turn, with failover."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from persia.batching.batch import Batch
from persia.errors import ClosedError, DeadlineError, MovedError, PeerRestartedError, PersiaError, StaleBatchError
from persia.services import EmbeddingWorker
from persia.types import BatchId, Feed

__all__ = ["Registrar", "WorkerPeer"]

ANEW_SECONDS = 0.5
"""Pause in seconds after all embedding workers have rejected a batch."""

_ELSEWHERE = (MovedError, DeadlineError, StaleBatchError, ClosedError, PeerRestartedError)


class WorkerPeer(NamedTuple):
    """An embedding worker, as a data loader sees it.

    Attributes:
        rank: see `types.Member`.
        incarnation: likewise.
        service: the embedding worker or a stub of it.
        leaving: whether it takes no further batches.
    """

    rank: int
    incarnation: int
    service: EmbeddingWorker
    leaving: bool = False


class Registrar:
    """Registers batches with embedding workers in turn (docs/reference/protocol.md, section 4).

    Args:
        changed: notified when `peers` are replaced.
        peers: the embedding workers, by rank.
        accumulation_steps: consecutive batches of an NN worker that go to the same one.
        timeout: seconds that one batch may take.
    """

    def __init__(
        self, changed: threading.Condition, peers: Sequence[WorkerPeer], accumulation_steps: int, timeout: float
    ) -> None:
        self.peers = tuple(peers)
        self.doing = ""
        self._changed = changed
        self._group = accumulation_steps
        self._timeout = timeout

    def knows(self, batch_id: int) -> bool:
        """Whether the embedding worker of a batch id is there."""
        return self._find(batch_id) is not None

    def register(self, feed: Feed, number: int, batch: Batch, cancelled: Callable[[], bool]) -> int | None:
        """Registers with the one whose turn it is, or the next that takes it; None if cancelled meanwhile.

        Raises:
            DeadlineError: none took it in time; names them.
        """
        began = time.monotonic()
        refused: dict[tuple[int, int], str] = {}
        while not cancelled():
            peers = self.peers
            peer = self._choose(feed, number, refused)
            if peer is not None:
                self.doing = f"embedding worker {peer.rank} (incarnation {peer.incarnation})"
                try:
                    return peer.service.register(batch.id_features)
                except _ELSEWHERE as error:
                    refused[peer[:2]] = f"{self.doing}: {error}"
                continue
            self.doing = "; ".join(refused.values()) or "no embedding worker is alive"
            left = began + self._timeout - time.monotonic()
            if left <= 0:
                raise DeadlineError(
                    f"No embedding worker took batch {number} of data loader {feed.loader} within "
                    f"{time.monotonic() - began:.1f} s: {self.doing}.",
                    number=number,
                    seconds=self._timeout,
                )
            with self._changed:
                # Not longer, since an embedding worker may take batches again without a change of the membership.
                self._changed.wait_for(functools.partial(self._replaced, peers, cancelled), min(left, ANEW_SECONDS))
            if left > ANEW_SECONDS:
                refused.clear()
        return None

    def release(self, batch_id: int) -> None:
        """Has a batch forgotten; if that fails, its entry expires."""
        peer = self._find(batch_id)
        if peer is not None:
            with contextlib.suppress(PersiaError):
                peer.service.release(batch_id)

    def _replaced(self, peers: Sequence[WorkerPeer], cancelled: Callable[[], bool]) -> bool:
        return cancelled() or self.peers is not peers

    def _choose(self, feed: Feed, number: int, refused: dict[tuple[int, int], str]) -> WorkerPeer | None:
        alive = [peer for peer in self.peers if not peer.leaving]
        turn, rank = divmod(number - feed.start, feed.nn_workers)
        first = turn // self._group * feed.nn_workers + rank
        turns = (alive[(first + i) % len(alive)] for i in range(len(alive)))
        return next((peer for peer in turns if peer[:2] not in refused), None)

    def _find(self, batch_id: int) -> WorkerPeer | None:
        rank, incarnation, _ = BatchId.unpack(batch_id)
        return next((peer for peer in self.peers if peer[:2] == (rank, incarnation)), None)
