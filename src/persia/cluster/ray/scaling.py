"""Embedding workers and data loaders that join and leave during training (docs/reference/protocol.md, section 8)."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

import ray

from persia import rpc
from persia.cluster.ray.feeding import AHEAD
from persia.cluster.ray.processes import Process
from persia.cluster.ray.roles import DEPART_SECONDS, Roles
from persia.cluster.scaler import MAX_PROCESSES
from persia.errors import ConfigError, DataError, DeadlineError
from persia.retry import Deadline
from persia.services import Coordinator
from persia.types import TITLES
from persia.worker import WorkerOptions

__all__ = ["await_leave", "check_capacity", "check_count", "count_of", "free_ranks", "scale"]

LEAVE_SECONDS = 0.05


def count_of(roles: Roles, role: str) -> int:
    """Returns the number of embedding workers or data loaders that are not leaving."""
    with roles.lock:
        if roles.service is None or roles.processes is None:
            return roles.counts[role]
        return sum(not p.leaving for p in roles.processes.of(role))


def scale(roles: Roles, role: str, count: int, expected: int | None = None) -> bool:
    """Starts or retires embedding workers or data loaders. Blocks until new ones serve and retired ones have ended.

    Args:
        roles: the processes of the cluster.
        role: "embedding_worker" or "data_loader".
        count: number of processes.
        expected: number of processes without which nothing is changed, as somebody else has changed it; None for any.

    Returns:
        Whether there were as many processes as expected.

    Raises:
        ConfigError: `count` exceeds the free ranks, or a process cannot be placed.
        DeadlineError: a process did not start, or still had batches, in time.
        DataError: the source cannot be shared by this many data loaders.
    """
    with roles.lock:
        if expected not in (None, count_of(roles, role)):
            return False
        if roles.service is None:  # Nothing has started yet.
            roles.counts[role] = count
            return True
        processes, _, coordinator = roles.started()
        existing = processes.of(role)
        staying = [p for p in existing if not p.leaving]
        ranks = free_ranks(role, {p.rank for p in existing}, count - len(staying))
        new = roles.start_role(role, ranks)
        processes.await_ready(new, roles.options.timeout)
        retired = staying[count:]
        for process in retired:
            process.leaving = True
            coordinator.retire(role, process.rank)
        if role == "data_loader" and (new or retired):
            try:
                roles.send_feed()
            except DataError:  # This many data loaders cannot share the source; training continues with the old ones.
                for process in new:
                    coordinator.depart(role, process.rank, process.info.incarnation if process.info else 1, "")
                processes.end(new)
                roles.placer.release(role, ranks)
                roles.send_feed()
                raise
    # Without the lock, as training continues and consumes their batches.
    for process in retired:
        await_leave(process, coordinator, roles.options.timeout, roles.running.locked)
    processes.end(retired)
    roles.placer.release(role, [process.rank for process in retired])
    return True


def free_ranks(role: str, taken: Collection[int], count: int) -> list[int]:
    """Returns the lowest free ranks. A rank that was in use before gets a new incarnation.

    Raises:
        ConfigError: there are too few free ranks.
    """
    free = [rank for rank in range(MAX_PROCESSES) if rank not in taken]
    if count > len(free):
        raise ConfigError(
            f"{count} more processes of the role {TITLES[role]} were requested, but {len(taken)} are running, "
            f"including leaving ones, and the maximum is {MAX_PROCESSES}. Request fewer, or wait until some have left.",
            field=f"cluster.{role}s",
        )
    return free[: max(0, count)]


def check_count(name: str, value: object) -> None:
    """Raises ConfigError unless the number of processes of a role is valid."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_PROCESSES:
        raise ConfigError(
            f"Invalid Ray.{name} = {value!r}; expected a whole number from 1 to {MAX_PROCESSES}.",
            field=f"cluster.{name}",
        )


def check_capacity(embedding_workers: int, data_loaders: int, nn_workers: int) -> None:
    """Checks that the embedding workers can buffer all ready batches, so that a registration waits only after a fault.

    Raises:
        ConfigError: the embedding workers can buffer too few.
    """
    ready, capacity = data_loaders * nn_workers * AHEAD, embedding_workers * WorkerOptions().capacity
    if ready >= capacity:
        raise ConfigError(
            f"{data_loaders} data loaders may have {ready} batches ready for {nn_workers} NN workers, but "
            f"{embedding_workers} embedding workers hold {capacity}. Use more embedding workers or fewer data loaders.",
            field="cluster.embedding_workers",
        )


def await_leave(process: Process, coordinator: Coordinator, timeout: float, trains: Callable[[], bool]) -> None:
    """Waits until a leaving process has no work left, and reports its departure.

    Args:
        process: an embedding worker or data loader.
        coordinator: gets the report.
        timeout: deadline in seconds.
        trains: whether training consumes batches. If not, does not wait for the batches of an embedding worker; data
            loaders register them again elsewhere.

    Raises:
        DeadlineError: the process still has batches.
    """
    deadline = Deadline(timeout)
    try:
        if process.role == "data_loader":
            ray.get(process.handle.end.remote(), timeout=timeout)
        while trains() and process.role == "embedding_worker":
            buffered = ray.get(process.handle.buffered.remote(), timeout=timeout)
            if not buffered:
                break
            if deadline.passed:
                raise _late(process, f"still has {buffered} batches", timeout)
            time.sleep(LEAVE_SECONDS)
    except ray.exceptions.GetTimeoutError as error:
        raise _late(process, "does not answer", timeout) from error
    except ray.exceptions.RayActorError:
        pass  # It has died meanwhile. NN workers count its batches as lost.
    if process.info is not None:
        rpc.within(coordinator, DEPART_SECONDS).depart(process.role, process.rank, process.info.incarnation)


def _late(process: Process, problem: str, timeout: float) -> DeadlineError:
    return DeadlineError(
        f"{process.title} is leaving, but {problem} after {timeout:g} s. Check that training makes progress.",
        role=process.role,
        rank=process.rank,
        seconds=timeout,
    )
