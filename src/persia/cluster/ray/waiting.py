"""Waits for the hosts of a Ray cluster to join, and for the roles on this host to end. For scripts that start hosts."""

from __future__ import annotations

import re
import time
from collections import Counter
from pathlib import Path

from persia.errors import DeadlineError
from persia.retry import Deadline

__all__ = ["ROLE_PROCESSES", "roles_on_this_host", "wait_for_hosts", "wait_for_the_end"]

POLL_SECONDS = 0.5

ROLE_PROCESSES = (
    "CoordinatorHost",
    "DataLoaderHost",
    "DenseServerHost",
    "EmbeddingServerHost",
    "EmbeddingWorkerHost",
    "NNWorkerHost",
)
"""Classes of the processes of roles, by which Ray names them."""

TITLE = re.compile(rb"ray::(\w+)")


def wait_for_hosts(count: int, address: str, timeout: float) -> None:
    """Waits until hosts have joined Ray. A program that starts earlier would place its roles on fewer hosts.

    Args:
        count: number of hosts, with this one and with hosts that have no CPUs.
        address: address of Ray; "auto" for the Ray of this host.
        timeout: maximum duration in seconds.

    Raises:
        DeadlineError: fewer hosts have joined in time.
        ConnectionError: Ray does not run on this host.
    """
    from persia.cluster.ray.placing import ray_nodes
    from persia.cluster.ray.processes import connect

    connect(address)
    deadline = Deadline(timeout)
    while len(nodes := ray_nodes()) < count:
        if deadline.passed:
            joined = ", ".join(sorted(node.address for node in nodes)) or "none"
            raise DeadlineError(
                f"{len(nodes)} of {count} hosts have joined Ray within {timeout:g} s: {joined}. Look at the output of "
                "`ray start` on the others, or wait for fewer.",
                seconds=timeout,
            )
        time.sleep(POLL_SECONDS)


def wait_for_the_end(timeout: float) -> None:
    """Waits until no role runs on this host.

    Args:
        timeout: maximum duration in seconds.

    Raises:
        DeadlineError: roles still run.
    """
    deadline = Deadline(timeout)
    while roles := roles_on_this_host():
        if deadline.passed:
            counted = ", ".join(f"{count} {name}" for name, count in sorted(Counter(roles).items()))
            raise DeadlineError(
                f"Roles still run on this host after {timeout:g} s: {counted}. Stop the program that trains, with "
                "SIGTERM, and wait for its checkpoint.",
                seconds=timeout,
            )
        time.sleep(POLL_SECONDS)


def roles_on_this_host(proc: str = "/proc") -> list[str]:
    """Returns the class of each process of a role on this host; in a container, of those in it.

    Args:
        proc: directory of processes, for tests.
    """
    roles = []
    for path in Path(proc).glob("[0-9]*/cmdline"):
        try:
            title = TITLE.match(path.read_bytes())
        except OSError:  # It has just ended.
            continue
        if title is not None and (name := title[1].decode()) in ROLE_PROCESSES:
            roles.append(name)
    return roles
