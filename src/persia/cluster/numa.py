"""Pins the threads of a parameter server to one NUMA node of its host, so that its rows are in that node's memory."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["pin", "processors_of_nodes"]

NODES = Path("/sys/devices/system/node")


def processors_of_nodes(nodes: Path = NODES) -> list[set[int]]:
    """Returns the processors of each NUMA node that this thread may use; nodes without any are left out.

    Args:
        nodes: directory in which the kernel describes them. Without it the host counts as one node.
    """
    allowed = os.sched_getaffinity(0)
    folders = sorted(nodes.glob("node[0-9]*"), key=lambda folder: int(folder.name[len("node") :]))
    usable = [allowed & _numbers((folder / "cpulist").read_text()) for folder in folders]
    return [processors for processors in usable if processors] or [allowed]


def pin(position: int, threads: int, nodes: Path = NODES) -> bool:
    """Pins this thread and threads that it starts later to one NUMA node, which then holds rows that they touch first.

    Memory of other nodes is used once this node has none left. No-op on a host with one node, or if the node has too
    few processors for the threads.

    Args:
        position: position of the process among the processes of its role on this host; nodes are assigned in turn.
        threads: number of threads that run at the same time.
        nodes: see `processors_of_nodes`.

    Returns:
        Whether the thread is pinned.
    """
    nodes_processors = processors_of_nodes(nodes)
    processors = nodes_processors[position % len(nodes_processors)]
    if len(nodes_processors) == 1 or len(processors) < threads:
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
