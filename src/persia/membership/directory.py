"""The members of a role in the newest membership, and calls to them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

from persia.errors import ClosedError, DeadlineError, MovedError, PeerRestartedError
from persia.retry import Backoff, Deadline, retry
from persia.rpc.fan_out import try_all
from persia.types import Member, Membership

__all__ = ["RETRIABLE", "UNREACHABLE", "Directory", "Roster", "ServingMember"]

S = TypeVar("S")
T = TypeVar("T")

UNREACHABLE = (ClosedError, DeadlineError, PeerRestartedError, ConnectionError)
"""Errors of a call whose peer may be gone; the membership tells whether it is."""

RETRIABLE = (MovedError, *UNREACHABLE)
"""Errors of a call that may succeed at another member, or after a change of the membership."""

NEWS_SECONDS = 1.0
"""Maximum wait of a failed call for a newer membership before it is repeated."""


class ServingMember(NamedTuple, Generic[S]):
    """One process of the role.

    Attributes:
        rank: rank of the process.
        incarnation: incarnation of the process.
        state: "alive" or "leaving".
        service: the service, or its stub.
    """

    rank: int
    incarnation: int
    state: str
    service: S


class Roster(NamedTuple, Generic[S]):
    """The processes of the role in one version of the membership.

    Attributes:
        version: version of the membership, which increases with every change.
        members: living and leaving members, by rank.
        newest: latest incarnation by rank, dead or not.
    """

    version: int
    members: Mapping[int, ServingMember[S]]
    newest: Mapping[int, int]

    def gone(self, rank: int, incarnation: int) -> bool:
        """Returns whether this incarnation is known to be dead. An unknown incarnation may be about to join."""
        newest = self.newest.get(rank, 0)
        return newest > incarnation or (newest == incarnation and rank not in self.members)

    def alive(self) -> list[ServingMember[S]]:
        """Returns the members that accept new work, by rank."""
        return [member for _, member in sorted(self.members.items()) if member.state == "alive"]

    def serving(self) -> list[S]:
        """Returns the services that answer calls, by rank, including leaving members."""
        return [member.service for _, member in sorted(self.members.items())]


class Directory(Generic[S]):
    """Follows the membership of one role. The listener at the coordinator calls `update`. Thread-safe.

    Args:
        role: role of the members.
        connect: creates the stub of a new member.
        close: closes the stub of a member that is gone. Calls in progress end, and their callers retry here.
    """

    def __init__(self, role: str, connect: Callable[[Member], S], close: Callable[[S], None] = lambda _: None) -> None:
        self.role = role
        self._connect = connect
        self._close = close
        self._roster: Roster[S] = Roster(0, {}, {})
        self._changed = threading.Condition()

    @classmethod
    def fixed(cls, role: str, services: Sequence[S]) -> Directory[S]:
        """Returns a directory of fixed services, by rank, in their first incarnation."""
        directory = cls(role, lambda member: services[member.rank])
        directory.update(Membership(1, 1, [Member(role, rank, 1, "") for rank in range(len(services))]))
        return directory

    def update(self, membership: Membership) -> None:
        """Adopts a newer membership; no-op for an older one."""
        with self._changed:
            before = self._roster
            if membership.version <= before.version:
                return
            members: dict[int, ServingMember[S]] = {}
            newest = {member.rank: member.incarnation for member in membership.members if member.role == self.role}
            for member in membership.members:
                if member.role != self.role or member.state == "dead":
                    continue
                known = before.members.get(member.rank)
                same = known is not None and known.incarnation == member.incarnation
                service = known.service if same and known is not None else self._connect(member)
                members[member.rank] = ServingMember(member.rank, member.incarnation, member.state, service)
            self._roster = Roster(membership.version, members, newest)
            self._changed.notify_all()
        current = {id(member.service) for member in members.values()}
        for member_before in before.members.values():
            if id(member_before.service) not in current:
                self._close(member_before.service)

    def roster(self, newer_than: int = 0, timeout: float = 0.0) -> Roster[S]:
        """Returns the members; waits up to `timeout` seconds for a version above `newer_than`."""
        with self._changed:
            self._changed.wait_for(lambda: self._roster.version > newer_than, timeout)
            return self._roster

    def call(self, call: Callable[[Roster[S]], T], timeout: float, cancelled: Callable[[], bool] = lambda: False) -> T:
        """Calls one of the members, which `call` chooses from the newest roster; blocks.

        Retries with each newer roster while the chosen member may be gone or leaving.

        Args:
            call: makes the call; raises `absent` if no member can take it.
            timeout: seconds for all attempts together.
            cancelled: whether to stop retrying.

        Raises:
            Exception: the last failure, at the deadline or once cancelled; or immediately a failure that no change of
                membership can fix.
        """
        roster = self.roster()

        def await_news(seconds: float) -> None:
            nonlocal roster
            roster = self.roster(roster.version, seconds)

        return retry(
            lambda: call(roster),
            transient=lambda error: isinstance(error, RETRIABLE) and not cancelled(),
            deadline=Deadline(timeout),
            backoff=Backoff(NEWS_SECONDS, NEWS_SECONDS),
            wait=await_news,
        )

    def call_any(
        self,
        call: Callable[[ServingMember[S]], T],
        turn: int,
        timeout: float,
        operation: str,
        cancelled: Callable[[], bool] = lambda: False,
        past_deadline: bool = True,
    ) -> T:
        """Calls the living member whose turn it is, or the next one that accepts the call; see `call`.

        Args:
            call: makes the call; may be repeated, also with other members.
            turn: number of the call; consecutive calls start at members of consecutive ranks.
            timeout: seconds within which attempts begin.
            operation: name of the call in the error if there is no member.
            cancelled: whether to stop retrying.
            past_deadline: whether an attempt tries every living member, even if the first one has used all the time.
                For calls that fail independently at each member, not for calls that all wait for the same thing.
        """
        deadline = Deadline(timeout)

        def in_turn(roster: Roster[S]) -> T:
            members = roster.alive()
            failure: Exception | None = None
            for number in range(len(members)):
                try:
                    return call(members[(turn + number) % len(members)])
                except RETRIABLE as error:
                    failure = error
                if cancelled() or (deadline.passed and not past_deadline):
                    break
            raise failure or self.absent(timeout, operation)

        return self.call(in_turn, timeout, cancelled)

    def call_all(self, method: Callable[[S], Callable[[], T]]) -> list[T]:
        """Calls all members concurrently, including leaving ones; returns the answers of reachable members.

        Args:
            method: returns the method of a service to call without arguments.
        """
        answers = try_all([method(service) for service in self.roster().serving()], UNREACHABLE)
        return [answer for answer in answers if not isinstance(answer, Exception)]

    def absent(self, timeout: float, operation: str) -> DeadlineError:
        """Returns the error of a call for which there is no member."""
        return DeadlineError(
            f"{operation}: there has been no {self.role.replace('_', ' ')} for {timeout:g} s. Check why they have "
            "ended, or start some.",
            operation=operation,
            seconds=timeout,
        )
