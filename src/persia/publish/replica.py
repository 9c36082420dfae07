"""A read-only copy of the published rows and network, in memory: the simplest reader of the log of changes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from persia.publish.epoch_reader import EpochReader, Update
from persia.publish.follower import Follower, NetworkUpdate

__all__ = ["Replica"]

_Rows: TypeAlias = dict[str, dict[int, NDArray[np.float32]]]
"""Rows of a PS, by table and id."""


@dataclass
class _Copy:
    """The state of an epoch: rows and their steps by PS, and the network."""

    run: str
    epoch: int
    servers: int
    rows: dict[int, _Rows] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)
    network: NetworkUpdate | None = None

    @property
    def complete(self) -> bool:
        """Whether it has the rows of all PSs and a network."""
        return self.network is not None and len(self.rows) == self.servers

    def apply(self, update: Update) -> None:
        """See `EpochState.apply`."""
        if isinstance(update, NetworkUpdate):
            self.network = update
            return
        tables: _Rows = {} if update.whole else self.rows[update.server]
        for change in update.changes:
            rows = tables.setdefault(change.table, {})
            for id_ in change.removed.tolist():
                rows.pop(id_, None)
            rows.update(zip(change.ids.tolist(), change.values, strict=True))
        self.rows[update.server], self.steps[update.server] = tables, update.step


_EMPTY = _Copy("", -1, 0)


class Replica:
    """Rows by table and id, and the newest network, of the log of changes. Not thread-safe.

    It holds one epoch, and switches to a new one atomically, once it has the rows of all PSs and the network.

    Args:
        follower: follower of the log.
    """

    def __init__(self, follower: Follower) -> None:
        self._follower = follower
        self._reader = EpochReader(
            follower, lambda run, update, _: _Copy(run, update.epoch, update.buckets.servers), described=False
        )

    @property
    def _copy(self) -> _Copy:
        return self._reader.current or _EMPTY

    @property
    def epoch(self) -> int:
        """Number of the epoch; -1 before the first complete epoch."""
        return self._copy.epoch

    @property
    def network(self) -> NetworkUpdate | None:
        """The newest version of the network; None before the first."""
        return self._copy.network

    @property
    def steps(self) -> dict[int, int]:
        """Global steps that the rows of each PS contain."""
        return self._copy.steps

    @property
    def problem(self) -> str:
        """Why the last refresh could not read everything; empty if it could."""
        return self._follower.problem

    def refresh(self) -> None:
        """Applies all new updates."""
        for copy, _ in self._reader.read():
            if copy.complete:
                self._reader.adopt(copy)

    def lookup(self, table: str, ids: Iterable[int], dim: int) -> tuple[NDArray[np.bool_], NDArray[np.float32]]:
        """Returns whether each id has a row, `[n]`, and the rows, `[n, dim]`; zeros for ids without a row."""
        rows = [self.get(table, int(id_)) for id_ in ids]
        zeros = np.zeros(dim, np.float32)
        values = np.array([zeros if row is None else row for row in rows], np.float32).reshape(-1, dim)
        return np.array([row is not None for row in rows], np.bool_), values

    def get(self, table: str, id_: int) -> NDArray[np.float32] | None:
        """Returns the row of an id; None if there is none."""
        for tables in self._copy.rows.values():
            if id_ in (rows := tables.get(table, {})):
                return rows[id_]
        return None

    def rows(self, table: str) -> dict[int, NDArray[np.float32]]:
        """Returns all rows of a table by id."""
        return {id_: row for tables in self._copy.rows.values() for id_, row in tables.get(table, {}).items()}
