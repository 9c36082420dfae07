"""One function on all NN workers: it is sent, what it asks for is done, and what it returns or raises is collected."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from typing import Any

import ray

from persia.cluster.ray.nn_worker import CLUSTER, Outcome
from persia.cluster.ray.plan import TITLES
from persia.cluster.ray.processes import Process, Processes
from persia.errors import DeadlineError, PersiaError, RoleDiedError, StalePushError
from persia.services import Tokens

__all__ = ["ANEW", "CONSEQUENCES", "Recovery", "Replacement", "pickled", "results"]

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


POLL_SECONDS = 0.5
GRACE_SECONDS = 3.0
"""When an NN worker fails, others fail because of it, perhaps earlier: so long the cause may take to be known."""


def pickled(function: Callable[[], Any], cluster: object) -> bytes:
    """A function with all that it refers to; where it refers to the cluster, an NN worker puts its own view of it."""

    class Pickler(ray.cloudpickle.CloudPickler):  # type: ignore[misc]
        def persistent_id(self, thing: Any) -> str | None:
            return CLUSTER if thing is cluster else None

    file = BytesIO()
    Pickler(file).dump(function)
    return file.getvalue()


def results(
    processes: Processes,
    calls: Mapping[Any, Process],
    operations: Mapping[str, Callable[..., Any]],
    replacing: Replacement | None = None,
    halting: Callable[[], bool] = lambda: False,
) -> dict[int, Any]:
    """What the function returns on each NN worker, by rank.

    Args:
        processes: all of the cluster.
        calls: what Ray returned for the call of each NN worker.
        operations: what the function may ask of this process.
        halting: asked now and then whether NN workers are to be told to end after their steps.
        replacing: who is asked whether the others go on when an NN worker has died; None if they do not.

    Raises:
        RoleDiedError: a process has died.
        Exception: what the function has raised, on the NN worker that was the first to fail.
    """
    # One that is left from the last run stays: it would take the first request of this one.
    for worker in calls.values():
        worker.asking = worker.asking or worker.handle.next_request.remote(POLL_SECONDS)
    outcomes: dict[int, Outcome] = {}
    grace: float | None = None
    dead: set[int] = set()
    while len(outcomes) + len(dead) < len(calls):
        if halting():  # Each time: one that has just begun anew does not know.
            for worker in calls.values():
                worker.handle.halt.remote()
        waiting = [c for c, w in calls.items() if w.rank not in outcomes and w.rank not in dead]
        asking = {w.asking: w for w in calls.values() if w.rank not in dead}
        done, _ = ray.wait([*waiting, *asking], timeout=POLL_SECONDS)
        for reference in done:
            try:
                if reference in calls:
                    outcomes[calls[reference].rank] = ray.get(reference)
                else:
                    worker = asking[reference]
                    request = ray.get(reference)
                    worker.asking = worker.handle.next_request.remote(POLL_SECONDS)
                    if request is not None:
                        worker.handle.answer.remote(request.number, _done(request, operations))
            except ray.exceptions.RayActorError as error:
                ended = calls.get(reference) or asking[reference]
                if not processes.await_failure(GRACE_SECONDS):
                    raise RoleDiedError(f"{ended.title} has died: {error}", role=ended.role, rank=ended.rank) from error
                break
        for death in processes.failures():
            left = len(calls) - len(dead) - 1
            if replacing is None or death.fields["role"] != "nn_worker" or not left or not replacing.spared(death):
                processes.check()
            dead.add(death.fields["rank"])
            processes.forget_failures("nn_worker", death.fields["rank"])
        if replacing is not None:
            replacing.poll()
        if grace is None and any(outcome.error is not None for outcome in outcomes.values()):
            grace = time.monotonic() + GRACE_SECONDS
        if grace is not None and time.monotonic() > grace:
            break
    _raise_first(processes, outcomes, len(calls))
    return {rank: outcomes[rank].value for rank in sorted(outcomes)}


def _done(request: Any, operations: Mapping[str, Callable[..., Any]]) -> Outcome:
    try:
        return Outcome(operations[request.operation](*request.arguments))
    except Exception as error:
        return Outcome(None, error)


def _raise_first(processes: Processes, outcomes: Mapping[int, Outcome], nn_workers: int) -> None:
    """Raises what is most likely the cause: that a collective has lost a peer is a consequence."""
    failed = [(rank, outcome.error, outcome.trace) for rank, outcome in outcomes.items() if outcome.error]
    if not failed:
        return
    if nn_workers > 1 and processes.await_failure(POLL_SECONDS):
        processes.check()
    failed.sort(key=lambda f: (not isinstance(f[1], PersiaError), isinstance(f[1], RuntimeError)))
    rank, error, trace = failed[0]
    error.add_note(f"Raised on {TITLES['nn_worker']} {rank}:\n{trace}")
    raise error


ANEW = ("nn_worker", "dense_ps")
"""Roles that begin anew, together, when one of them has died."""

MADE_GOOD = (*ANEW, "embedding_ps")
"""Roles whose death for good an attempt tells of."""

CONSEQUENCES = (RoleDiedError, DeadlineError, StalePushError)
"""What NN workers raise because something has died."""


class Recovery:
    """What is known of one attempt.

    Args:
        lapses: deaths of embedding PSs that return; in asynchronous modes they are out of phase then.
    """

    def __init__(self, lapses: Sequence[RoleDiedError]) -> None:
        self._lapses = lapses
        self.replacing: Replacement | None = None
        self.kept: Any = None

    def keep(self, state: Any) -> None:
        """Takes what NN workers give to `Connection.keep`."""
        self.kept = state

    @property
    def spared(self) -> list[RoleDiedError]:
        """Of NN workers that the others went on without."""
        return list(self.replacing.deaths.values()) if self.replacing is not None else []

    def deaths(self, error: Exception) -> list[RoleDiedError]:
        """Which deaths an attempt has failed by, to be made good; none if it is not to be repeated.

        Args:
            error: one of CONSEQUENCES.
        """
        if isinstance(error, RoleDiedError):
            if any(fields["role"] not in MADE_GOOD for fields in (error.fields, *error.fields.get("later", []))):
                return []
            return [error] if error.fields["role"] == "embedding_ps" else self.spared or [error]
        return self.spared or (list(self._lapses) if isinstance(error, StalePushError) else [])
