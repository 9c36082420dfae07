"""The number of torch's threads beside those that look rows up ahead, and how long they spin.

Operations of torch on a CPU run in a team of OpenMP threads that wait for one another after each operation. They wait
by spinning, for milliseconds unless `GOMP_SPINCOUNT` says less: if one of them is not on a core, the others keep the
cores busy without progress. Where one thread does everything in turn (`persia.nn.inline_pass`) they are left as they
are. docs/performance.md, "Threads of torch", has the measurements.
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
"""Variables with which a user sets the number before torch is loaded."""

PARALLEL = 1 << 18
"""Number of elements of an operation that torch divides among eight threads."""


def default_torch_threads(teams: int = 1) -> int:
    """Returns the number of threads of each team, at least one; all teams together have half of the process's cores.

    For processes of a cluster, which share their machine with other roles.
    """
    return max(1, len(os.sched_getaffinity(0)) // 2 // teams)


class TorchThreads:
    """Leaves a core to lookups that run ahead in this process, and takes it back when they do not.

    Not if the user has set the number of threads, or this process is in a process group: a number below that of the
    cores counts as set by the user, as does one from OMP_NUM_THREADS, or one that is set while lookups run ahead. The
    launcher of a process group shares the cores among its processes.

    Args:
        teams: of threads in this process, one for each NN worker.
    """

    _last = 0
    """The number that was chosen here last, which new threads of the process begin with."""

    def __init__(self, teams: int = 1) -> None:
        self._teams = teams
        cores, now = len(os.sched_getaffinity(0)), torch.get_num_threads()
        grouped = torch.distributed.is_available() and torch.distributed.is_initialized()
        unset = now >= cores or now == TorchThreads._last
        self._mine = unset and cores > 1 and not grouped and not any(os.environ.get(name) for name in VARIABLES)
        self._before = cores if now == TorchThreads._last else now
        self._chosen = 0
        """The number while lookups run ahead, else 0."""
        self._busy = None if grouped else BusyCores()  # The launcher of a group knows what else runs.

    def suit(self, *, ahead: bool) -> None:
        """Changes the number, if it does not suit. Cheap; called by the thread that trains, before each batch.

        The numbers depend on nothing but the cores, so floats are summed in the same order whenever lookups run ahead.

        Args:
            ahead: whether lookups run ahead.
        """
        if self._busy is not None:
            self._busy.look()
        chosen = self._chosen
        if not self._mine or ahead == bool(chosen):
            return
        if ahead:
            cores = len(os.sched_getaffinity(0))
            threads = max(1, (cores - 1) // self._teams)
            LOG.info(
                "torch computes with %d of %d cores, as lookups and updates run beside it; OMP_NUM_THREADS=%d gives it "
                "all.",
                threads,
                cores,
                cores,
            )
            self._chosen = TorchThreads._last = threads
            torch.set_num_threads(threads)
        else:
            self._chosen = TorchThreads._last = 0
            if torch.get_num_threads() == chosen:  # Else the user has set another one meanwhile.
                torch.set_num_threads(self._before)


class BusyCores:
    """Says once that other processes compete with torch's threads for the cores. For the thread that trains."""

    SECONDS = 5.0
    """Duration of a measurement; training says nothing before."""

    SHARE = 0.4
    """Cores that others use, children of this process included, from which on it is worth saying."""

    def __init__(self) -> None:
        self._since: tuple[float, float, float] | None = None
        # With one thread, or threads that sleep soon, little is lost.
        limit = spins()
        self._told = torch.get_num_threads() == 1 or (limit is not None and limit <= SPINS_SHARED)

    def look(self) -> None:
        """Measures on, and says it if it is so. Cheap."""
        if self._told:
            return
        now = time.monotonic()
        if self._since is not None and now - self._since[0] < self.SECONDS:
            return
        busy, own = _busy_seconds(), time.process_time()
        if self._since is not None:
            since, busy_then, own_then = self._since
            others = ((busy - busy_then) - (own - own_then)) / (now - since)
            if others > self.SHARE:
                self._told = True
                LOG.warning(
                    "Other processes use %.1f of the %d cores. torch's threads spin while they wait, and lose much of "
                    "the rest: start with GOMP_SPINCOUNT=%d in the environment, or with "
                    "OMP_NUM_THREADS=1. See the guide, Threads of torch.",
                    others,
                    len(os.sched_getaffinity(0)),
                    SPINS_SHARED,
                )
        self._since = now, busy, own


def _busy_seconds() -> float:
    """Returns the seconds for which the cores of this process have computed, for whomever; 0 if it is not known."""
    cores = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    try:
        lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0.0
    # user, nice, system, idle, iowait, irq, softirq
    found = [line.split()[1:8] for line in lines if line.split(maxsplit=1)[:1] and line.split(maxsplit=1)[0] in cores]
    ticks = sum(sum(map(int, fields)) - int(fields[3]) - int(fields[4]) for fields in found)
    return ticks / os.sysconf("SC_CLK_TCK")


def shorten_spinning() -> None:
    """Lets torch's threads sleep soon when they wait, for as long as the calling thread lives. Call it in a new thread.

    GNU's OpenMP lets a waiting thread spin for milliseconds, but for microseconds only while it manages more threads
    than the process has cores. An operation of torch in the calling thread makes a team of its own, which stays idle:
    then there are more, if torch computes with more than half of the cores. Otherwise nothing changes, nor with another
    OpenMP, or if the user has set how threads wait.
    """
    if not any(os.environ.get(name) for name in WAITING):
        torch.ones(PARALLEL).neg_()
