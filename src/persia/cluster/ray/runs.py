"""Runs a function on all NN workers: sends it, serves its requests, and collects its results and errors."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from typing import Any

import ray

from persia.cluster.ray.nn_worker import CLUSTER, Outcome
from persia.cluster.ray.processes import Process, Processes
from persia.errors import ConfigError, DeadlineError, PersiaError, RoleDiedError, StalePushError
from persia.retry import Deadline
from persia.services import NNWorkersChange, TokenService
from persia.telemetry.logs import get_logger
from persia.types import TITLES

__all__ = ["CONSEQUENCES", "RESTARTED", "Departure", "Recovery", "Replacement", "pickled", "results"]

LOG = get_logger("persia.cluster")

POLL_SECONDS = 0.5
GRACE_SECONDS = 3.0
"""Time to wait for the cause of a failure: NN workers may fail because of it before it is reported."""

NOTICE_SECONDS = 30.0
"""Time to wait for the cause of a death: calls fail earlier, and the successor of a PS may reject pushes."""

SURVIVAL_SECONDS = 30.0
"""Time for the others to return their state after the death of an NN worker with which they averaged gradients."""

RESTARTED = ("nn_worker", "dense_ps")
"""Roles that restart together after a death."""

RECOVERABLE = (*RESTARTED, "embedding_ps")
"""Roles whose permanent death an attempt returns."""

CONSEQUENCES = (RoleDiedError, DeadlineError, StalePushError)
"""Errors of NN workers that follow from a death."""


class Replacement:
    """Replaces dead NN workers while the others continue, within one attempt. Not thread-safe.

    An asynchronous phase does not need a dead NN worker. The others train while its successor starts, which takes
    seconds; then the phase ends, and all restart.

    Args:
        processes: processes of the cluster.
        tokens: the token scheduler.
        generation: generation of the NN workers.
        start: starts the NN worker of a rank.
        timeout: deadline in seconds.
    """

    def __init__(
        self,
        processes: Processes,
        tokens: TokenService,
        generation: int,
        start: Callable[[int], Process],
        timeout: float,
    ) -> None:
        self._processes = processes
        self._tokens = tokens
        self._generation = generation
        self._start = start
        self._timeout = timeout
        self._starting: list[Process] = []
        self.deaths: dict[int, RoleDiedError] = {}
        """Deaths, by rank, of NN workers without which the others have continued."""
        self.deadline: Deadline | None = None
        """By when the others return; None if they go on with their phase."""

    def replace(self, death: RoleDiedError, others: int = 1) -> bool:
        """Starts the successor of a dead NN worker if the others can continue; returns whether they continue.

        Args:
            death: the death.
            others: number of the other NN workers.
        """
        rank = death.fields["rank"]
        if not self._tokens.cancel(self._generation, rank):
            return False
        LOG.warning("%s\nThe other NN workers continue until it is replaced.", death.message)
        try:
            self._starting.append(self._start(rank))
        except ConfigError as error:  # The next attempt waits for a host.
            LOG.warning("The others cannot continue without it: %s", error.message)
            return False
        self.deaths[rank] = death
        return True

    def poll(self) -> None:
        """Ends the phase once all successors have started.

        Raises:
            DeadlineError: a successor is late.
            RoleDiedError: a successor could not start.
        """
        if not self._starting:
            return
        ready, _ = ray.wait([p.readiness for p in self._starting], num_returns=len(self._starting), timeout=0)
        if len(ready) == len(self._starting):
            self._processes.await_ready(self._starting, self._timeout)
            self._starting.clear()
            self._tokens.stop()


class Departure(Replacement):
    """Lets the others end their phase, and continue without dead NN workers. Not thread-safe.

    Args:
        processes: see `Replacement`.
        tokens: see `Replacement`.
        generation: see `Replacement`.
        release: begins a generation of a number of NN workers at the PSs: pushes that wait for the dead one fail.
    """

    def __init__(
        self, processes: Processes, tokens: TokenService, generation: int, release: Callable[[int], object]
    ) -> None:
        super().__init__(processes, tokens, generation, _no_successor, 0.0)
        self._release = release

    def replace(self, death: RoleDiedError, others: int = 1) -> bool:
        """Ends the phase of the other NN workers. Returns True: they continue, or else fail soon."""
        rank = death.fields["rank"]
        LOG.warning("%s\nThe other NN workers end their phase, and continue without it.", death.message)
        self.deaths[rank] = death
        if self._tokens.cancel(self._generation, rank):
            self._tokens.stop()
        else:
            self.deadline = Deadline(SURVIVAL_SECONDS)
            self._release(others)
        return True


def _no_successor(rank: int) -> Process:
    raise NotImplementedError(f"NN worker {rank} is not replaced")


def pickled(function: Callable[[], Any], cluster: object) -> bytes:
    """Pickles a function and its references. NN workers substitute their own view for the cluster."""

    class Pickler(ray.cloudpickle.CloudPickler):  # type: ignore[misc]
        def persistent_id(self, obj: Any) -> str | None:
            return CLUSTER if obj is cluster else None

    file = BytesIO()
    Pickler(file).dump(function)
    return file.getvalue()


def results(
    processes: Processes,
    calls: Mapping[Any, Process],
    operations: Mapping[str, Callable[..., Any]],
    replacement: Replacement | None = None,
    halting: Callable[[], bool] = lambda: False,
    changing: Callable[[], NNWorkersChange | None] = lambda: None,
) -> dict[int, Any]:
    """Returns the results of the function on each NN worker, by rank.

    Args:
        processes: all processes of the cluster.
        calls: Ray references of the calls of the NN workers.
        operations: operations that this process serves for the function.
        halting: polled; once true, NN workers are requested to end after their step.
        replacement: decides whether the others continue after the death of an NN worker; None if they do not.
        changing: polled; the number of NN workers for which NN worker 0 is requested to end the function.

    Raises:
        RoleDiedError: a process has died.
        Exception: the error of the function on the NN worker that failed first.
    """
    # Reuse a call that is left from the last run: a second one would compete for the first request.
    for worker in calls.values():
        worker.requesting = worker.requesting or worker.handle.next_request.remote(POLL_SECONDS)
    outcomes: dict[int, Outcome] = {}
    grace: Deadline | None = None
    dead: set[int] = set()
    while len(outcomes) + len(dead) < len(calls):
        if halting():  # Repeated for NN workers that have just restarted.
            for worker in calls.values():
                worker.handle.halt.remote()
        if (change := changing()) is not None:
            for worker in calls.values():
                if worker.rank == 0:
                    worker.handle.request_change.remote(change)
        waiting = [c for c, w in calls.items() if w.rank not in outcomes and w.rank not in dead]
        requesting = {w.requesting: w for w in calls.values() if w.rank not in dead}
        done, _ = ray.wait([*waiting, *requesting], timeout=POLL_SECONDS)
        for reference in done:
            try:
                if reference in calls:
                    outcomes[calls[reference].rank] = ray.get(reference)
                else:
                    worker = requesting[reference]
                    request = ray.get(reference)
                    worker.requesting = worker.handle.next_request.remote(POLL_SECONDS)
                    if request is not None:
                        worker.handle.answer.remote(request.number, _done(request, operations))
            except ray.exceptions.RayTaskError as error:
                # An NN worker that was still joining when `Departure` began a generation at the PSs.
                if reference not in calls or replacement is None or replacement.deadline is None:
                    raise
                outcomes[calls[reference].rank] = Outcome(None, error)
            except ray.exceptions.RayActorError as error:
                ended = calls.get(reference) or requesting[reference]
                if not processes.await_failure(NOTICE_SECONDS):
                    raise RoleDiedError(f"{ended.title} has died: {error}", role=ended.role, rank=ended.rank) from error
                break
        for death in processes.failures():
            others = len(calls) - len(dead) - 1
            if (
                replacement is None
                or death.fields["role"] != "nn_worker"
                or not others
                or not replacement.replace(death, others)
            ):
                processes.check()
            dead.add(death.fields["rank"])
            processes.forget_failures("nn_worker", death.fields["rank"])
        if replacement is not None:
            replacement.poll()
        if grace is None and any(outcome.error is not None for outcome in outcomes.values()):
            grace = Deadline(GRACE_SECONDS)
        if grace is not None and grace.passed:
            break
        if replacement is not None and replacement.deadline is not None and replacement.deadline.passed:
            break
    if replacement is not None and replacement.deadline is not None:
        lost = len(outcomes) + len(dead) < len(calls) or any(outcome.error for outcome in outcomes.values())
        if lost:  # Not all others have a state with which they could continue.
            raise next(iter(replacement.deaths.values()))
    _raise_first(processes, outcomes, len(calls))
    return {rank: outcomes[rank].value for rank in sorted(outcomes)}


def _done(request: Any, operations: Mapping[str, Callable[..., Any]]) -> Outcome:
    try:
        return Outcome(operations[request.operation](*request.arguments))
    except Exception as error:
        return Outcome(None, error)


def _raise_first(processes: Processes, outcomes: Mapping[int, Outcome], nn_workers: int) -> None:
    """Raises the most likely cause. A collective that has lost a peer is a consequence, not a cause."""
    failed = [(rank, outcome.error, outcome.trace) for rank, outcome in outcomes.items() if outcome.error]
    if not failed:
        return
    if nn_workers > 1 and processes.await_failure(POLL_SECONDS):
        processes.check()
    failed.sort(key=lambda f: (not isinstance(f[1], PersiaError), isinstance(f[1], RuntimeError)))
    rank, error, trace = failed[0]
    error.add_note(f"Raised on {TITLES['nn_worker']} {rank}:\n{trace}")
    raise error


class Recovery:
    """The deaths and the recovery point of one attempt.

    Args:
        ps_deaths: deaths of embedding PSs that restart. In asynchronous modes restarted PSs are out of phase.
        keep: receives each recovery point as well.
    """

    def __init__(self, ps_deaths: Sequence[RoleDiedError], keep: Callable[[Any], object] | None = None) -> None:
        self._ps_deaths = ps_deaths
        self._keep = keep
        self.replacement: Replacement | None = None
        self.recovery_point: Any = None

    def save(self, recovery_point: Any) -> None:
        """Stores a recovery point from `Connection.save_recovery_point`."""
        self.recovery_point = recovery_point
        if self._keep is not None:
            self._keep(recovery_point)

    @property
    def replaced(self) -> list[RoleDiedError]:
        """The deaths of NN workers without which the others have continued."""
        return list(self.replacement.deaths.values()) if self.replacement is not None else []

    def deaths(self, error: Exception) -> list[RoleDiedError]:
        """Returns the deaths that made an attempt fail; empty if it cannot be repeated.

        Blocks for at most `NOTICE_SECONDS` if a PS must have died and its death has not been noticed.

        Args:
            error: one of CONSEQUENCES.
        """
        if isinstance(error, RoleDiedError):
            if any(fields["role"] not in RECOVERABLE for fields in (error.fields, *error.fields.get("later", []))):
                return []
            return [error] if error.fields["role"] == "embedding_ps" else self.replaced or [error]
        if self.replaced or not isinstance(error, StalePushError):
            return self.replaced
        deadline = Deadline(NOTICE_SECONDS)
        while not self._ps_deaths and error.fields.get("restarted") and not deadline.passed:
            time.sleep(POLL_SECONDS)
        return list(self._ps_deaths)
