"""A coordinator until the role is there."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from persia.types import Member, Membership


class Coordination:
    """Membership only."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._members: dict[tuple[str, int], Member] = {}
        self._version = 1
        self._generation = 0
        self._reports: dict[str, tuple[float, dict[str, float]]] = {}

    def join(self, role: str, rank: int, address: str) -> Member:
        with self._changed:
            before = self._members.get((role, rank))
            member = Member(role, rank, before.incarnation + 1 if before else 1, address)
            self._set(member)
            return member

    def depart(self, role: str, rank: int, incarnation: int, reason: str = "") -> None:
        with self._changed:
            member = self._members.get((role, rank))
            if member and member.incarnation == incarnation:
                self._set(member._replace(state="dead", reason=reason))

    def retire(self, role: str, rank: int) -> None:
        with self._changed:
            self._set(self._members[role, rank]._replace(state="leaving"))

    def regenerate(self, nn_workers: int) -> int:
        with self._changed:
            self._generation += 1
            return self._generation

    def membership(self, newer_than: int = 0, timeout: float = 0.0) -> Membership:
        with self._changed:
            self._changed.wait_for(lambda: self._version > newer_than, timeout)
            return Membership(self._version, self._generation, list(self._members.values()))

    def report(self, role: str, rank: int, counters: Mapping[str, float]) -> None:
        self._reports[f"{role}-{rank}"] = time.monotonic(), dict(counters)

    def statistics(self) -> dict[str, dict[str, float]]:
        now = time.monotonic()
        return {name: {**counters, "age": now - at} for name, (at, counters) in self._reports.items()}

    def _set(self, member: Member) -> None:
        self._members[member.role, member.rank] = member
        self._version += 1
        self._changed.notify_all()
