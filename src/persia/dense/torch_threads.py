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

__all__ = ["TorchThreads", "default_torch_threads", "shorten_spinning"]

LOG = logging.getLogger("persia.trainer")

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables with which a user sets the number before torch is loaded."""

PARALLEL = 1 << 18
"""Number of elements of an operation that torch divides among eight threads."""

LARGE = 1 << 24
"""Parameters times rows of a batch from which on more threads pay; benchmarks/zoo.py has models on both sides of it."""


def default_torch_threads(teams: int = 1) -> int:
    """Returns the number of threads of each team, at least one; all teams together have half of the process's cores."""
    return max(1, len(os.sched_getaffinity(0)) // 2 // teams)


class TorchThreads:
    """Sets the number of torch threads, unless the user has set it, or this process is in a process group.

    A number below that of the cores counts as set by the user, as does one from OMP_NUM_THREADS. The launcher of a
    process group shares the cores among its processes.

    Args:
        teams: of threads in this process, one for each NN worker. All together get half of the cores for now.
    """

    _set = 0
    """The number that was set here last; torch has one for the process."""

    def __init__(self, teams: int = 1) -> None:
        self._teams = teams
        cores, before = len(os.sched_getaffinity(0)), torch.get_num_threads()
        grouped = torch.distributed.is_available() and torch.distributed.is_initialized()
        unset = before in (cores, TorchThreads._set) or before > cores
        self._mine = unset and cores > 1 and not grouped and not any(os.environ.get(name) for name in VARIABLES)
        if self._mine:
            self._choose(default_torch_threads(teams))

    def suit(self, parameters: int, rows: int) -> None:
        """Gives a large network three quarters of the cores, rounded up, if threads that wait sleep soon.

        Called by the thread that trains, before its first batch. The number depends on nothing but the arguments and
        the cores, so floats are summed in the same order whenever the same is trained.

        Args:
            parameters: of the network.
            rows: of a batch; of a model of histories, times the events of the longest one.
        """
        kept = torch.get_num_threads() == TorchThreads._set
        if self._mine and kept and parameters * rows >= LARGE and sleeps_soon():
            cores = len(os.sched_getaffinity(0))
            self._choose(max(1, (cores - cores // 4) // self._teams))

    def _choose(self, threads: int) -> None:
        if threads != torch.get_num_threads():
            LOG.info(
                "torch computes with %d of %d cores, which leaves the others to lookups, updates and reading; "
                "OMP_NUM_THREADS=%d gives it all.",
                threads,
                (cores := len(os.sched_getaffinity(0))),
                cores,
            )
            torch.set_num_threads(threads)
        TorchThreads._set = threads


def shorten_spinning() -> None:
    """Lets torch's threads sleep soon when they wait, for as long as the calling thread lives. Call it in a new thread.

    GNU's OpenMP lets a waiting thread spin for milliseconds, but for microseconds only while it manages more threads
    than the process has cores. An operation of torch in the calling thread makes a team of its own, which stays idle:
    then there are more, if torch computes with all cores. If it computes with half of them, nothing changes, nor with
    another OpenMP, or if the user has set how threads wait.
    """
    if not any(os.environ.get(name) for name in WAITING):
        torch.ones(PARALLEL).neg_()
