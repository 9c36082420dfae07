"""How a process finds the others: it asks the coordinator until they are there."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TypeVar

from persia import rpc
from persia.cluster.on_ray.plan import TITLES, Plan
from persia.errors import DeadlineError
from persia.services import Coordinator, EmbeddingPS
from persia.types import Member

__all__ = ["alive", "connect_servers", "reach", "reach_coordinator"]

T = TypeVar("T")

POLL_SECONDS = 5.0


def alive(coordinator: Coordinator, role: str, least: int, timeout: float) -> list[Member]:
    """The living members of a role, by rank, once there are so many.

    Raises:
        DeadlineError: they did not come in time.
    """
    end = time.monotonic() + timeout
    version = 0
    while True:
        membership = coordinator.membership(version, min(POLL_SECONDS, max(0.0, end - time.monotonic())))
        found = sorted((m for m in membership.members if m.role == role and m.state == "alive"), key=lambda m: m.rank)
        if len(found) >= least:
            return found
        if time.monotonic() >= end:
            raise DeadlineError(
                f"Only {len(found)} of {least} processes of the role {TITLES[role]} have joined within {timeout:g} s. "
                "See their log lines, or raise `timeout`.",
                role=role,
                joined=[m.rank for m in found],
                seconds=timeout,
            )
        version = membership.version


def reach(member: Member, protocol: type[T], plan: Plan) -> T:
    """A stub of a member."""
    peer = f"{TITLES[member.role]} {member.rank}"
    return rpc.connect(member.address, protocol, peer=peer, timeout=plan.options.timeout, keys=plan.keys)


def reach_coordinator(plan: Plan) -> Coordinator:
    """A stub of the coordinator."""
    return rpc.connect(plan.coordinator, Coordinator, peer="coordinator", timeout=plan.options.timeout, keys=plan.keys)


def connect_servers(coordinator: Coordinator, plan: Plan) -> Sequence[EmbeddingPS]:
    """Stubs of all PSs, by partition, once they are there."""
    members = alive(coordinator, "embedding_ps", plan.servers, plan.options.timeout)
    return [reach(member, EmbeddingPS, plan) for member in members]
