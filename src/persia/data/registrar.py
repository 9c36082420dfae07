"""Registers batches with embedding workers in turn."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from persia.batching.batch import Batch
from persia.errors import DeadlineError, PersiaError
from persia.membership.directory import RETRIABLE, Directory, ServingMember
from persia.services import EmbeddingWorker
from persia.types import BatchId, Feed

__all__ = ["Registrar"]


class Registrar:
    """Decides which embedding worker gets a batch (docs/reference/protocol.md, section 4). For one thread.

    Args:
        workers: the embedding workers.
        accumulation_steps: number of consecutive batches of an NN worker that go to the same embedding worker.
        timeout: maximum seconds to register one batch.
    """

    def __init__(self, workers: Directory[EmbeddingWorker], accumulation_steps: int, timeout: float) -> None:
        self.doing = ""
        """The embedding worker that is registering a batch, or the embedding workers that refused it; for errors."""
        self._workers = workers
        self._group = accumulation_steps
        self._timeout = timeout

    def lost(self, batch_id: int) -> bool:
        """Returns whether the embedding worker of a batch id is gone. Thread-safe."""
        rank, incarnation, _ = BatchId.unpack(batch_id)
        return self._workers.roster().gone(rank, incarnation)

    def register(self, feed: Feed, number: int, batch: Batch, cancelled: Callable[[], bool]) -> int | None:
        """Registers a batch with the next embedding worker in turn, or the first one after it that accepts the batch.

        Returns:
            The batch id; None if cancelled.

        Raises:
            DeadlineError: no embedding worker accepted it in time; names them.
        """
        turn, rank = divmod(number - feed.start, feed.nn_workers)
        turn = turn // self._group * feed.nn_workers + rank
        refusals: dict[str, str] = {}
        self.doing = "no embedding worker is alive"

        def register(member: ServingMember[EmbeddingWorker]) -> int:
            self.doing = f"embedding worker {member.rank} (incarnation {member.incarnation})"
            try:
                return member.service.register(batch.id_features)
            except RETRIABLE as error:
                refusals[self.doing] = f"{self.doing}: {error}"
                self.doing = "; ".join(refusals.values())
                raise

        try:
            return self._workers.call_any(register, turn, self._timeout, "register", cancelled)
        except RETRIABLE as error:
            if cancelled():
                return None
            raise DeadlineError(
                f"No embedding worker took batch {number} of data loader {feed.loader} within {self._timeout:g} s: "
                f"{self.doing}.",
                number=number,
                seconds=self._timeout,
            ) from error

    def release(self, batch_id: int) -> None:
        """Releases a batch at its embedding worker; if the call fails, the entry expires there."""
        rank, incarnation, _ = BatchId.unpack(batch_id)
        member = self._workers.roster().members.get(rank)
        if member is not None and member.incarnation == incarnation:
            with contextlib.suppress(PersiaError):
                member.service.release(batch_id)
