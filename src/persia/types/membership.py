"""The processes of a cluster, by role."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["TITLES", "Member", "Membership"]

TITLES = {
    "coordinator": "coordinator",
    "embedding_ps": "embedding PS",
    "dense_ps": "dense PS",
    "embedding_worker": "embedding worker",
    "data_loader": "data loader",
    "nn_worker": "NN worker",
}
"""Names of the roles in messages."""


class Member(NamedTuple):
    """A process of a role.

    Attributes:
        role: a key of `TITLES`.
        rank: number within the role, from 0.
        incarnation: rises with each restart of the rank, from 1. For an NN worker it is the generation.
        address: address on which it listens; empty if it serves no calls.
        state: "alive", "leaving" (finishes its work and accepts no new work) or "dead".
        reason: cause of death of a dead process, with its last log lines.
    """

    role: str
    rank: int
    incarnation: int
    address: str
    state: str = "alive"
    reason: str = ""


class Membership(NamedTuple):
    """All members at a point in time.

    Attributes:
        version: rises with every change.
        generation: generation of the NN workers.
        members: the newest incarnation of each rank of each role.
    """

    version: int
    generation: int
    members: list[Member]
