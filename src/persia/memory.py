"""Measures the memory of this host that processes can use: limits of the machine, cgroups and a file system."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["FileSystem", "Memory", "file_system", "host_memory"]

IN_MEMORY = ("tmpfs", "ramfs", "hugetlbfs")
"""File systems whose files are memory."""


class Memory(NamedTuple):
    """Memory of a host.

    Attributes:
        total: maximum bytes that processes can use.
        free: bytes that are free now, or can be freed.
        limit: name of the limit that sets `total`, for messages.
        for_rows: whether all of `total` is set aside for rows; otherwise processes also need some of it.
    """

    total: int
    free: int
    limit: str
    for_rows: bool = False

    def shared(self, count: int, taken: int = 0) -> Memory:
        """Returns an equal part of this memory for each of `count` processes, which already use `taken` bytes."""
        return self._replace(total=self.total // count, free=min(self.total, self.free + taken) // count)


class FileSystem(NamedTuple):
    """A mounted file system: its mount point, kind and mount options."""

    mount: str
    kind: str
    options: str


def host_memory(directory: str | None = None, root: str = "/") -> Memory:
    """Measures the memory of this host that embedding PSs can use.

    Args:
        directory: directory of the regions, which need not exist yet; None if rows are in the memory of the processes.
        root: parent directory of /proc and /sys, for tests.

    Returns:
        The smallest limit that applies. Existing files of regions count as used.
    """
    limits = []
    if directory is not None:
        place = Path(directory)
        while not place.exists():
            place = place.parent
        system, mounted = os.statvfs(place), file_system(place)
        size, free = system.f_blocks * system.f_frsize, system.f_bavail * system.f_frsize
        limits.append(Memory(size, free, f"the size of {mounted.mount}"))
    if directory is None or mounted.kind in IN_MEMORY:
        limits += _physical(root)
    return min(limits)._replace(free=min(limit.free for limit in limits))


def file_system(directory: Path) -> FileSystem:
    """Returns the file system of a directory."""
    best = FileSystem("", "", "")
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, kind, options, *_ = line.split(" ")
        if directory.resolve().is_relative_to(mount) and len(mount) >= len(best.mount):
            best = FileSystem(mount, kind, options)
    return best


def _physical(root: str) -> list[Memory]:
    """Returns the limits of the machine and of the cgroups of this process."""
    numbers = {}
    for line in Path(root, "proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        numbers[name] = int(value.split()[0]) * 1024
    machine = Memory(numbers["MemTotal"], numbers["MemAvailable"], "the memory of the host")
    return [machine, *_cgroups(root)]


def _cgroups(root: str) -> Iterator[Memory]:
    """Yields the limits of the cgroups of this process, of version 1 or 2, and of their parents."""
    groups = Path(root, "proc/self/cgroup")
    for line in groups.read_text().splitlines() if groups.exists() else []:  # A kernel may have none.
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, limit, usage = Path(root, "sys/fs/cgroup"), "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            top, limit, usage = Path(root, "sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        inside = Path(path.lstrip("/"))
        # In a container the path may be that of the host; the limit is then in the files at the top.
        for part in (inside, *inside.parents):
            total = _number(top / part / limit)
            if total is not None:
                used = (_number(top / part / usage) or 0) - _reclaimable(top / part / "memory.stat")
                yield Memory(total, max(0, total - used), f"the limit of the cgroup in {top / part / limit}")


def _number(path: Path) -> int | None:
    """Returns the number in a file; None if the file does not exist or contains `max`."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _reclaimable(path: Path) -> int:
    """Returns the bytes of cached files that the kernel frees on demand."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)
