"""One function for each kind of fault: it does it, for as long as it lasts, and makes it good."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import ray
from chaos_disk import SIGN
from chaos_schedule import BY_PROXY, Fault

from persia.checkpoint import list_checkpoints
from support.cluster_samples import pids


class Site(NamedTuple):
    """Where faults are made.

    Attributes:
        cluster: the `persia.cluster.Ray` that trains.
        checkpoints: folder of them.
        regions: folder of the PSs' regions.
        spoiled: steps of checkpoints that were damaged.
        seen: all processes that there have been.
        moves: threads in which rows move to other PSs.
        unmoved: why rows did not move.
    """

    cluster: Any
    checkpoints: Path
    regions: Path
    spoiled: set[int]
    seen: set[int]
    moves: list[threading.Thread]
    unmoved: list[str]


class NotNowError(Exception):
    """What the fault is to befall is not there at the moment."""


def _victim(site: Site, fault: Fault) -> Any:
    """A process that is there."""
    site.seen.update(pids(site.cluster))
    there = [
        p
        for p in site.cluster._roles.processes.of(fault.role)
        if p.info is not None and Path(f"/proc/{p.info.pid}").exists()
    ]
    if not there:
        raise NotNowError(fault.role)
    return there[fault.rank % len(there)]


def kill(site: Site, fault: Fault) -> None:
    """SIGKILL: the process is gone at once."""
    with _still_there():
        os.kill(_victim(site, fault).info.pid, signal.SIGKILL)


def stop(site: Site, fault: Fault) -> None:
    """SIGSTOP: the process hangs for a while, its connections open, and goes on as if nothing had happened."""
    pid = _victim(site, fault).info.pid
    with _still_there():
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(fault.seconds)
        finally:
            os.kill(pid, signal.SIGCONT)


def spoil(site: Site, fault: Fault) -> None:
    """A connection, a reply or a request, by the proxy in front of the process."""
    try:
        ray.get(_victim(site, fault).handle.spoil.remote(fault.kind), timeout=5.0)
    except ray.exceptions.RayError as error:
        raise NotNowError(fault.role) from error


def disk(site: Site, fault: Fault) -> None:
    """The disk of checkpoints is slow, or full, for a while."""
    sign = site.checkpoints.parent / SIGN
    sign.write_text(fault.kind.removesuffix("_disk"))
    try:
        time.sleep(fault.seconds)
    finally:
        sign.unlink()


def corrupted_part(site: Site, fault: Fault) -> None:
    """One byte of the newest checkpoint is another one."""
    found = list_checkpoints(str(site.checkpoints))
    files = sorted(p for p in Path(found[-1].path).rglob("*") if p.is_file()) if found else []
    if not files:
        raise NotNowError("no checkpoint")
    largest = max(files, key=lambda path: path.stat().st_size)
    with open(largest, "r+b") as file:
        place = fault.rank % largest.stat().st_size
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))
    site.spoiled.add(found[-1].step)


def full_memory(site: Site, fault: Fault) -> None:
    """Somebody else takes all the memory that regions could still grow into."""
    room = os.statvfs(site.regions)
    ballast = site.regions / "ballast"
    file = os.open(ballast, os.O_WRONLY | os.O_CREAT)
    try:
        with contextlib.suppress(OSError):
            os.posix_fallocate(file, 0, room.f_bavail * room.f_frsize)
        time.sleep(fault.seconds)
    finally:
        os.close(file)
        ballast.unlink()


def move(site: Site, fault: Fault) -> None:
    """Rows begin to move to another number of PSs, or away from the first one. Other faults are made meanwhile."""
    if any(thread.is_alive() for thread in site.moves):
        raise NotNowError("rows still move")

    def work() -> None:
        cluster = site.cluster
        try:
            buckets = cluster.buckets
            if fault.rank % 5 or buckets.servers == 1:
                cluster.scale(ps=max(1, fault.rank % 5))
            else:
                cluster.move_rows(buckets.emptied([0]))
        except Exception as error:
            site.unmoved.append(f"rows did not move: {error}")

    site.moves.append(threading.Thread(target=work, name="move"))
    site.moves[-1].start()


INJECTORS: dict[str, Callable[[Site, Fault], None]] = {
    "kill": kill,
    "stop": stop,
    **dict.fromkeys(BY_PROXY, spoil),
    "slow_disk": disk,
    "full_disk": disk,
    "corrupted_part": corrupted_part,
    "full_memory": full_memory,
    "move": move,
}

RETRY_SECONDS = 0.2
PATIENCE_SECONDS = 60.0
"""How long a fault waits for its victim."""


class Chaos(threading.Thread):
    """Makes the faults of a schedule, one after another.

    Args:
        site: where.
        faults: in order; times count from the start of the thread.
        told: called with each that was made.
    """

    def __init__(self, site: Site, faults: list[Fault], told: Callable[[Fault], None]) -> None:
        super().__init__(name="chaos")
        self._site, self._faults, self._told = site, faults, told
        self._over = threading.Event()
        self.made: list[Fault] = []
        self.failure: BaseException | None = None

    def give_up(self) -> None:
        """No more faults."""
        self._over.set()

    def run(self) -> None:
        began = time.monotonic()
        try:
            for fault in self._faults:
                if self._over.wait(max(0.0, began + fault.at - time.monotonic())):
                    return
                if self._make(fault):
                    self.made.append(fault)
                    self._told(fault)
        except BaseException as error:
            self.failure = error

    def _make(self, fault: Fault) -> bool:
        end = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < end and not self._over.is_set():
            try:
                INJECTORS[fault.kind](self._site, fault)
                return True
            except NotNowError:
                self._over.wait(RETRY_SECONDS)
        return False


@contextlib.contextmanager
def _still_there() -> Iterator[None]:
    try:
        yield
    except ProcessLookupError as error:
        raise NotNowError("it has ended") from error
