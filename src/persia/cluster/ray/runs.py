"""One function on all NN workers: it is sent, what it asks for is done, and what it returns or raises is collected."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from io import BytesIO
from typing import Any

import ray

from persia.cluster.ray.nn_worker import CLUSTER, Outcome
from persia.cluster.ray.plan import TITLES
from persia.cluster.ray.processes import Process, Processes
from persia.cluster.ray.replacing import Replacement
from persia.errors import PersiaError, RoleDiedError

__all__ = ["pickled", "results"]

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
