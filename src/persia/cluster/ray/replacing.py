"""NN workers that die while the others train on: their tokens are drawn again, and others take their places."""

from __future__ import annotations

import logging
from collections.abc import Callable

import ray

from persia.cluster.ray.processes import Process, Processes
from persia.errors import RoleDiedError
from persia.services import Tokens

__all__ = ["Replacement"]

LOG = logging.getLogger("persia.cluster")


class Replacement:
    """The NN workers of one attempt that are spared the death of others. For one thread.

    In an asynchronous segment nobody needs a dead NN worker. While its successor starts, which takes seconds, the
    others train; then the segment ends, and all begin anew.

    Args:
        processes: of the cluster.
        tokens: the lists.
        generation: of the NN workers.
        start: starts an NN worker of a rank.
        timeout: seconds that this may take.
    """

    def __init__(
        self, processes: Processes, tokens: Tokens, generation: int, start: Callable[[int], Process], timeout: float
    ) -> None:
        self._processes = processes
        self._tokens = tokens
        self._generation = generation
        self._start = start
        self._timeout = timeout
        self._coming: list[Process] = []
        self.deaths: dict[int, RoleDiedError] = {}
        """By rank, of those that the others went on without."""

    def spared(self, death: RoleDiedError) -> bool:
        """Whether the others go on without it; then a successor is started."""
        rank = death.fields["rank"]
        if not self._tokens.cancel(self._generation, rank):
            return False
        LOG.warning("%s\nThe other NN workers train on until it is replaced.", death.message)
        self.deaths[rank] = death
        self._coming.append(self._start(rank))
        return True

    def poll(self) -> None:
        """Ends the segment once all successors are there.

        Raises:
            DeadlineError: one is late.
            RoleDiedError: one could not start.
        """
        if not self._coming:
            return
        ready, _ = ray.wait([p.readiness for p in self._coming], num_returns=len(self._coming), timeout=0)
        if len(ready) == len(self._coming):
            self._processes.await_ready(self._coming, self._timeout)
            self._coming.clear()
            self._tokens.stop()
