"""Stubs of the roles. Does not import what a single role needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from persia import rpc
from persia.cluster.ray.process_plan import Plan
from persia.membership.listener import POLL_SECONDS, await_members
from persia.membership.reached_servers import ReachedServers
from persia.services import BucketMaps, Coordinator, DensePS, EmbeddingPS, StreamLog, TokenService
from persia.types import TITLES, Member

__all__ = [
    "connect_dense",
    "reach",
    "reach_coordinator",
    "reach_servers",
    "reach_stream_log",
    "reach_tokens",
]

T = TypeVar("T")

GRACE_SECONDS = 5.0
"""Added to the timeout of calls that wait for that timeout at the token scheduler."""


def reach(member: Member, protocol: Callable[..., T], plan: Plan) -> T:
    """Returns a stub of a member."""
    peer = f"{TITLES[member.role]} {member.rank}"
    return rpc.connect(member.address, protocol, peer=peer, timeout=plan.options.timeout, keys=plan.keys)


def reach_coordinator(plan: Plan) -> Coordinator:
    """Returns a stub of the coordinator."""
    timeout = max(plan.options.timeout, 2 * POLL_SECONDS)
    return rpc.connect(plan.coordinator, Coordinator, peer="coordinator", timeout=timeout, keys=plan.keys)


def reach_tokens(plan: Plan) -> TokenService:
    """Returns a stub of the token scheduler, which is at the coordinator."""
    return rpc.connect(
        plan.coordinator, TokenService, peer="coordinator", timeout=plan.options.timeout + GRACE_SECONDS, keys=plan.keys
    )


def reach_stream_log(plan: Plan) -> StreamLog:
    """Returns a stub of the offset log of a stream, which is at the coordinator."""
    return rpc.connect(plan.coordinator, StreamLog, peer="coordinator", timeout=plan.options.timeout, keys=plan.keys)


def connect_dense(coordinator: Coordinator, plan: Plan) -> Sequence[DensePS]:
    """Waits for all dense PSs, and returns stubs of them."""
    members = await_members(coordinator, "dense_ps", plan.options.dense_ps, plan.options.timeout)
    return [reach(member, DensePS, plan) for member in members]


def reach_servers(coordinator: Coordinator, plan: Plan) -> ReachedServers:
    """Waits for all embedding PSs, and returns connections to them; keep these up to date with a `Listener`.

    Raises:
        DeadlineError: a PS did not join in time.
    """
    timeout = plan.options.timeout
    servers = ReachedServers(lambda member: reach(member, EmbeddingPS, plan), rpc.close, timeout)
    count = rpc.cast_to(BucketMaps, coordinator).map_state().buckets.servers
    await_members(coordinator, "embedding_ps", count, timeout)
    servers.update(coordinator.membership())
    servers.resize(count)
    return servers
