"""Embedding workers and data loaders that come and go while training (docs/reference/protocol.md, section 8)."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

import ray

from persia import rpc
from persia.cluster.ray.feeding import AHEAD
from persia.cluster.ray.plan import TITLES
from persia.cluster.ray.processes import Process
from persia.errors import ConfigError, DeadlineError
from persia.services import Coordinator
from persia.worker import WorkerOptions

__all__ = ["DEPART_SECONDS", "await_leave", "check_count", "check_room", "free_ranks"]

MOST = 256
"""Of a role: a rank of an embedding worker is a byte of the batch id."""

LEAVE_SECONDS = 0.05
DEPART_SECONDS = 5.0


def free_ranks(role: str, taken: Collection[int], count: int) -> list[int]:
    """The lowest ranks that nobody has; a rank that has had somebody gets a new incarnation with the next one.

    Raises:
        ConfigError: there are not so many.
    """
    free = [rank for rank in range(MOST) if rank not in taken]
    if count > len(free):
        raise ConfigError(
            f"{count} more processes of the role {TITLES[role]} were asked for, but {len(taken)} are there, those that "
            f"are leaving among them, and {MOST} can be. Ask for fewer, or wait until some have left.",
            field=f"cluster.{role}s",
        )
    return free[: max(0, count)]


def check_count(name: str, value: object) -> None:
    """Raises ConfigError unless there can be so many of a role."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST:
        raise ConfigError(f"Ray.{name} = {value!r}; give a whole number from 1 to {MOST}.", field=f"cluster.{name}")


def check_room(embedding_workers: int, data_loaders: int, nn_workers: int) -> None:
    """What data loaders may have ready must fit the embedding workers: a registration is to wait only behind a fault.

    Raises:
        ConfigError: it does not.
    """
    ready, room = data_loaders * nn_workers * AHEAD, embedding_workers * WorkerOptions().capacity
    if ready >= room:
        raise ConfigError(
            f"{data_loaders} data loaders may have {ready} batches ready for {nn_workers} NN workers, but "
            f"{embedding_workers} embedding workers hold {room}. Use more embedding workers, or fewer data loaders.",
            field="cluster.embedding_workers",
        )


def await_leave(process: Process, coordinator: Coordinator, timeout: float, trains: Callable[[], bool]) -> None:
    """Waits until a process that has been asked to leave has nothing left, and says that it is gone.

    Args:
        process: an embedding worker or data loader.
        coordinator: is told.
        timeout: seconds that this may take.
        trains: whether batches are being used up: at rest nobody takes what lies at an embedding worker, and data
            loaders register it again elsewhere.

    Raises:
        DeadlineError: it still has batches.
    """
    end = time.monotonic() + timeout
    try:
        if process.role == "data_loader":
            ray.get(process.handle.end.remote(), timeout=timeout)
        while trains() and process.role == "embedding_worker":
            buffered = ray.get(process.handle.buffered.remote(), timeout=timeout)
            if not buffered:
                break
            if time.monotonic() > end:
                raise _late(process, f"still has {buffered} batches", timeout)
            time.sleep(LEAVE_SECONDS)
    except ray.exceptions.GetTimeoutError as error:
        raise _late(process, "does not answer", timeout) from error
    except ray.exceptions.RayActorError:
        pass  # It has died meanwhile: what it had is lost, and counted where it was taken.
    if process.info is not None:
        rpc.within(coordinator, DEPART_SECONDS).depart(process.role, process.rank, process.info.incarnation)


def _late(process: Process, what: str, timeout: float) -> DeadlineError:
    return DeadlineError(
        f"{process.title} is leaving, and {what} after {timeout:g} s. See whether training goes on.",
        role=process.role,
        rank=process.rank,
        seconds=timeout,
    )
