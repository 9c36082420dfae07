"""What goes wrong, and when: drawn from a seed, so that a run can be repeated."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

ROLES = ("embedding_ps", "embedding_worker", "data_loader", "coordinator", "nn_worker")
PROXIED = ("embedding_ps", "embedding_worker", "data_loader", "coordinator")
"""Roles that are called, through a proxy that can lose and repeat messages."""

BY_PROXY = ("cut", "lost_reply", "duplicate", "reorder", "stall")
ON_PROCESSES = {"kill": ROLES, "stop": ROLES, **dict.fromkeys(BY_PROXY, PROXIED)}
ON_DISKS = ("slow_disk", "full_disk", "corrupted_part")
ON_MEMORY = ("full_memory",)
"""Only where a small file system may be mounted."""

KINDS = (*ON_PROCESSES, *ON_DISKS, *ON_MEMORY)
MOVES = ("move",) * 6
"""No fault: rows move to other PSs while faults are made. Only where it is asked for, and often."""


class Fault(NamedTuple):
    """One fault.

    Attributes:
        at: seconds after training has begun.
        kind: one of `KINDS` or `MOVES`.
        role: of the process that it befalls; empty where it befalls none.
        rank: chooses among those of the role.
        seconds: that it lasts, where it lasts.
    """

    at: float
    kind: str
    role: str
    rank: int
    seconds: float


def draw(seed: int, seconds: float, count: int, kinds: Sequence[str] = KINDS, most_nn_workers: int = 15) -> list[Fault]:
    """So many faults within so many seconds, in order, in rounds: each role is killed once, all else comes once.

    Args:
        seed: decides all.
        seconds: that they are spread over.
        count: how many.
        kinds: that may come.
        most_nn_workers: NN workers that are killed.
    """
    rng = random.Random(seed)
    faults: list[Fault] = []
    cases: list[tuple[str, str]] = []
    killed = 0
    for number in range(count):
        if not cases:
            kills = ROLES if "kill" in kinds else ()
            cases = [("kill", role) for role in kills if role != "nn_worker" or killed < most_nn_workers]
            cases += [(kind, rng.choice(ON_PROCESSES.get(kind, ("",)))) for kind in kinds if kind != "kill"]
            rng.shuffle(cases)
        kind, role = cases.pop()
        killed += (kind, role) == ("kill", "nn_worker")
        at = seconds * (number + rng.random()) / count
        faults.append(Fault(at, kind, role, rng.randrange(1 << 16), rng.uniform(1.0, 3.0)))
    return faults
