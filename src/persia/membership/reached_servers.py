"""Connections to the embedding PSs of a run, which may join and leave."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar, overload

from persia import rpc
from persia.errors import DeadlineError
from persia.membership.directory import UNREACHABLE
from persia.rpc.fan_out import try_all
from persia.services import EmbeddingPS
from persia.types import BucketMap, Member, Membership

__all__ = ["ReachedServers"]

T = TypeVar("T")

ROLE = "embedding_ps"

ASK_SECONDS = 5.0
"""Deadline of the question for a bucket map: a PS that does not answer is left out."""


class ReachedServers(Sequence[EmbeddingPS]):
    """The embedding PSs of the bucket map, by number. Follows the membership; see `update`. Thread-safe.

    A PS that dies keeps its connection, as it returns at the same address. One that has left is forgotten.

    Args:
        connect: makes the stub of a member.
        close: closes a stub. Calls in progress fail.
        timeout: maximum seconds to wait until a PS has joined.
    """

    def __init__(
        self, connect: Callable[[Member], EmbeddingPS], close: Callable[[EmbeddingPS], None], timeout: float
    ) -> None:
        self._connect = connect
        self._close = close
        self._timeout = timeout
        self._changed = threading.Condition()
        self._version = 0
        self._count = 0
        self._reached: dict[int, tuple[str, EmbeddingPS]] = {}
        """Address and stub of each PS, by number."""

    def update(self, membership: Membership) -> None:
        """Adopts a newer membership; no-op for an older one."""
        with self._changed:
            if membership.version <= self._version:
                return
            self._version = membership.version
            gone: list[EmbeddingPS] = []
            for member in membership.members:
                if member.role != ROLE:
                    continue
                known = self._reached.get(member.rank)
                if member.state == "dead":
                    # Without a reason it has left; otherwise it returns.
                    if not member.reason and known is not None:
                        gone.append(self._reached.pop(member.rank)[1])
                elif known is None or known[0] != member.address:
                    self._reached[member.rank] = member.address, self._connect(member)
                    if known is not None:
                        gone.append(known[1])
            self._changed.notify_all()
        for stub in gone:
            self._close(stub)

    def resize(self, count: int) -> None:
        """Sets the number of PSs of the bucket map."""
        self._count = count

    def reach(self, number: int) -> EmbeddingPS:
        """Returns a PS, also one that the bucket map does not have. Blocks until it has joined.

        Raises:
            DeadlineError: it did not join in time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: number in self._reached, self._timeout):
                raise DeadlineError(
                    f"Embedding PS {number} did not join within {self._timeout:g} s. Check its log lines.",
                    role=ROLE,
                    rank=number,
                    seconds=self._timeout,
                )
            return self._reached[number][1]

    def members(self) -> dict[int, EmbeddingPS]:
        """Returns all PSs by number: those of the bucket map, those that join, and those that leave."""
        with self._changed:
            return {number: stub for number, (_, stub) in sorted(self._reached.items())}

    def current(self) -> tuple[BucketMap, list[EmbeddingPS]]:
        """Returns the newest bucket map of the PSs that answer, and the PSs of this map. Blocks for a call to each PS.

        Raises:
            PersiaError: no PS answers, or a PS of the map did not join in time.
        """
        seconds = min(ASK_SECONDS, self._timeout)
        asked = [rpc.within(server, seconds) for server in self.members().values()]
        answers = try_all([functools.partial(server.buckets) for server in asked], UNREACHABLE)
        maps = [answer for answer in answers if not isinstance(answer, Exception)]
        if not maps:
            raise next(
                (answer for answer in answers if isinstance(answer, Exception)),
                DeadlineError("No embedding PS has joined yet. Check their log lines.", role=ROLE),
            )
        newest = max(maps, key=lambda buckets: buckets.version)
        return newest, [self.reach(number) for number in range(newest.servers)]

    def close(self) -> None:
        """Closes all connections."""
        for stub in self.members().values():
            self._close(stub)

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, number: int) -> EmbeddingPS: ...

    @overload
    def __getitem__(self, number: slice) -> list[EmbeddingPS]: ...

    def __getitem__(self, number: int | slice) -> EmbeddingPS | list[EmbeddingPS]:
        if isinstance(number, slice):
            return [self.reach(one) for one in range(len(self))[number]]
        return self.reach(range(self._count)[number])
