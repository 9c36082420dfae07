"""The default number of torch threads, and how long they spin, if the user has not set it.

Operations of torch on a CPU run in a team of OpenMP threads that wait for one another after each operation. They wait
by spinning: if one of them is not on a core, the others keep the cores busy without progress, for milliseconds unless
`persia.openmp` has shortened it. With as many threads as cores, the threads that read, look up and push take cores
away from the team all the time. docs/performance.md, "Threads of torch", has the measurements.
"""

from __future__ import annotations

import logging
import os

import torch

from persia.openmp import WAITING, sleeps_soon

__all__ = ["choose_torch_threads", "default_torch_threads", "shorten_spinning"]

LOG = logging.getLogger("persia.trainer")

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables with which a user sets the number before torch is loaded."""

PARALLEL = 1 << 18
"""Number of elements of an operation that torch divides among eight threads."""


def default_torch_threads(teams: int = 1, *, alone: bool = False) -> int:
    """Returns the number of threads of each team, at least one.

    All teams together have half of the process's cores.

    Args:
        teams: of NN workers, or dense PSs.
        alone: whether all roles are in this process. Then teams whose threads sleep soon have three quarters.
    """
    cores = len(os.sched_getaffinity(0))
    return max(1, (cores - cores // 4 if alone and sleeps_soon() else cores // 2) // teams)


def choose_torch_threads(teams: int = 1) -> None:
    """Sets the number of torch threads, unless the user has set it, or this process is in a process group.

    A number below that of the cores counts as set by the user, as does one from OMP_NUM_THREADS. The launcher of a
    process group shares the cores among its processes.
    """
    cores, before = len(os.sched_getaffinity(0)), torch.get_num_threads()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return
    if before < cores or any(os.environ.get(name) for name in VARIABLES):
        return
    if (threads := default_torch_threads(teams, alone=True)) < cores:
        torch.set_num_threads(threads)
        LOG.info(
            "torch computes with %d of %d cores, which leaves the others to lookups, updates and reading; "
            "OMP_NUM_THREADS=%d gives it all.",
            threads,
            cores,
            cores,
        )


def shorten_spinning() -> None:
    """Lets torch's threads sleep soon when they wait, for as long as the calling thread lives. Call it in a new thread.

    GNU's OpenMP lets a waiting thread spin for milliseconds, but for microseconds only while it manages more threads
    than the process has cores. An operation of torch in the calling thread makes a team of its own, which stays idle:
    then there are more, if torch computes with all cores. If it computes with half of them, nothing changes, nor with
    another OpenMP, or if the user has set how threads wait.
    """
    if not any(os.environ.get(name) for name in WAITING):
        torch.ones(PARALLEL).neg_()
