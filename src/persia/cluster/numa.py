"""Keeps the threads of a parameter server on one NUMA node of its host, so that its rows are in that node's memory."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["pin", "processors_of_nodes"]

NODES = Path("/sys/devices/system/node")


def processors_of_nodes(nodes: Path = NODES) -> list[set[int]]:
    """Returns the processors of each NUMA node that this thread may use; nodes without any are left out.

    Args:
        nodes: where the kernel describes them. A host that does not counts as one node.
    """
    allowed = os.sched_getaffinity(0)
    folders = sorted(nodes.glob("node[0-9]*"), key=lambda folder: int(folder.name[len("node") :]))
    found = [allowed & _numbers((folder / "cpulist").read_text()) for folder in folders]
    return [processors for processors in found if processors] or [allowed]


def pin(position: int, threads: int, nodes: Path = NODES) -> bool:
    """Keeps this thread, and those that it starts from now on, on one NUMA node; rows that they touch first lie there.

    Memory of another node is used once this one has none left. Does nothing on a host with one node, or if the node
    lacks processors for the threads.

    Args:
        position: of the process among those of its role on this host; they take turns among nodes.
        threads: number of threads that shall run at the same time.
        nodes: see `processors_of_nodes`.

    Returns:
        Whether the thread is pinned.
    """
    found = processors_of_nodes(nodes)
    processors = found[position % len(found)]
    if len(found) == 1 or len(processors) < threads:
        return False
    os.sched_setaffinity(0, processors)
    return True


def _numbers(text: str) -> set[int]:
    """Returns the numbers of a list such as `0-3,8`."""
    numbers: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first:
            numbers |= set(range(int(first), int(last or first) + 1))
    return numbers
