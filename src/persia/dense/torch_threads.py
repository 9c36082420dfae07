"""The number of torch threads next to threads that look rows up ahead, and their spinning time.

Torch operations on a CPU run in a team of OpenMP threads that wait for one another after each operation. They wait by
spinning, for milliseconds unless `GOMP_SPINCOUNT` is lower: if one of them is not on a core, the others keep the cores
busy without progress. If one thread does everything in turn (`persia.nn.inline_pass`), the number does not change.
docs/performance.md, "Threads of torch", has the measurements.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from persia.openmp import SPINS_SHARED, WAITING, spins
from persia.telemetry.logs import get_logger

__all__ = ["BusyCores", "TorchThreads", "default_torch_threads", "shorten_spinning"]

LOG = get_logger("persia.trainer")

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables that set the number before torch is loaded."""

PARALLEL = 1 << 18
"""Number of elements of an operation that torch divides among eight threads."""


def default_torch_threads(teams: int = 1) -> int:
    """Returns the number of threads of each team, at least one; all teams together have half of the process's cores.

    For processes of a cluster, which share their machine with other roles.
    """
    return max(1, len(os.sched_getaffinity(0)) // 2 // teams)


class TorchThreads:
    """Leaves a core to lookups while they run ahead in this process.

    Does nothing if the user has set the number of threads, or this process is in a process group. A number below the
    number of cores counts as set by the user, as does one from OMP_NUM_THREADS, or one that is set while lookups run
    ahead. The launcher of a process group divides the cores among its processes.

    Args:
        teams: number of teams of threads in this process, one for each NN worker.
    """

    _last = 0
    """The last number that this class has set. New threads of the process start with it."""

    def __init__(self, teams: int = 1) -> None:
        self._teams = teams
        cores, now = len(os.sched_getaffinity(0)), torch.get_num_threads()
        grouped = torch.distributed.is_available() and torch.distributed.is_initialized()
        unset = now >= cores or now == TorchThreads._last
        self._adjusts = unset and cores > 1 and not grouped and not any(os.environ.get(name) for name in VARIABLES)
        self._default = cores if now == TorchThreads._last else now
        self._chosen = 0
        """The number while lookups run ahead, otherwise 0."""
        self._busy = None if grouped else BusyCores()  # The launcher of a group accounts for other processes.

    def suit(self, *, ahead: bool) -> None:
        """Adjusts the number of threads. Cheap; called by the training thread before each batch.

        The number depends only on the cores, so floats are summed in the same order whenever lookups run ahead.

        Args:
            ahead: whether lookups run ahead.
        """
        if self._busy is not None:
            self._busy.look()
        chosen = self._chosen
        if not self._adjusts or ahead == bool(chosen):
            return
        if ahead:
            cores = len(os.sched_getaffinity(0))
            threads = max(1, (cores - 1) // self._teams)
            LOG.info(
                "torch uses %d of %d cores, as lookups and updates run concurrently; set OMP_NUM_THREADS=%d to use all "
                "cores.",
                threads,
                cores,
                cores,
            )
            self._chosen = TorchThreads._last = threads
            torch.set_num_threads(threads)
        else:
            self._chosen = TorchThreads._last = 0
            if torch.get_num_threads() == chosen:  # Otherwise the user has set another number meanwhile.
                torch.set_num_threads(self._default)


class BusyCores:
    """Warns once if other processes compete with torch's threads for the cores. For the training thread."""

    SECONDS = 5.0
    """Duration of a measurement, which precedes any warning."""

    SHARE = 0.4
    """Number of cores that other processes, including children of this one, must use for a warning."""

    def __init__(self) -> None:
        self._since: tuple[float, float, float] | None = None
        # One thread, or threads that sleep soon, lose little.
        limit = spins()
        self._warned = torch.get_num_threads() == 1 or (limit is not None and limit <= SPINS_SHARED)

    def look(self) -> None:
        """Continues the measurement, and warns if necessary. Cheap."""
        if self._warned:
            return
        now = time.monotonic()
        if self._since is not None and now - self._since[0] < self.SECONDS:
            return
        busy, own = _busy_seconds(), time.process_time()
        if self._since is not None:
            since, previous_busy, previous_own = self._since
            others = ((busy - previous_busy) - (own - previous_own)) / (now - since)
            if others > self.SHARE:
                self._warned = True
                LOG.warning(
                    "Other processes use %.1f of the %d cores. torch's threads spin while they wait, and waste much of "
                    "the remaining time: start with GOMP_SPINCOUNT=%d in the environment, or with "
                    "OMP_NUM_THREADS=1. See the guide, Threads of torch.",
                    others,
                    len(os.sched_getaffinity(0)),
                    SPINS_SHARED,
                )
        self._since = now, busy, own


def _busy_seconds() -> float:
    """Returns the busy seconds of the cores of this process, for all processes; 0 if unknown."""
    cores = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    try:
        lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0.0
    # user, nice, system, idle, iowait, irq, softirq
    fields_by_core = [
        line.split()[1:8] for line in lines if line.split(maxsplit=1)[:1] and line.split(maxsplit=1)[0] in cores
    ]
    ticks = sum(sum(map(int, fields)) - int(fields[3]) - int(fields[4]) for fields in fields_by_core)
    return ticks / os.sysconf("SC_CLK_TCK")


def shorten_spinning() -> None:
    """Shortens the spinning of torch's threads for as long as the calling thread lives. Call it in a new thread.

    GNU's OpenMP lets a waiting thread spin for milliseconds, but only for microseconds while it manages more threads
    than the process has cores. A torch operation in the calling thread creates another team, which remains idle: then
    there are more threads than cores, if torch uses more than half of the cores. Otherwise nothing changes, nor with
    another OpenMP, or if the user has set how threads wait.
    """
    if not any(os.environ.get(name) for name in WAITING):
        torch.ones(PARALLEL).neg_()
