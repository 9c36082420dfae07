"""The interface of row servers: processes that serve a part of all rows to predictors."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from persia.types import Packed

__all__ = ["FoundRows", "RowServerState", "RowsVersion", "ServedEpoch", "ServedRows"]


class RowsVersion(NamedTuple):
    """The version of rows that a lookup requires. A row server that does not have it rejects the lookup.

    Attributes:
        part: number of the part that the row server is expected to have.
        parts: number of parts.
        run: random identifier of the epoch in the log of changes.
        step: minimum number of global steps that the rows must contain.
    """

    part: int
    parts: int
    run: str
    step: int


class FoundRows(NamedTuple):
    """Result of a lookup.

    Attributes:
        found: whether each id has a row, by table, bool `[n]`.
        rows: rows by table, float32 `[n, dim]`; zeros without a row.
    """

    found: Packed[np.bool_]
    rows: Packed[np.float32]


class ServedEpoch(NamedTuple):
    """An epoch of the log of changes whose rows a row server has.

    Attributes:
        run: random identifier of the epoch.
        epoch: number of the epoch.
        step: minimum number of global steps that the rows contain.
        time: time of the state of the oldest rows of an embedding PS, in seconds since 1970.
        rows: number of rows of all tables.
    """

    run: str
    epoch: int
    step: int
    time: float
    rows: int


class RowServerState(NamedTuple):
    """The rows that a row server currently has.

    Attributes:
        part: number of its part.
        parts: number of parts.
        epochs: epochs whose rows are complete, the newest first; empty while the first one is read.
        problem: reason why newer entries of the log are not served; empty if all are served.
    """

    part: int
    parts: int
    epochs: list[ServedEpoch]
    problem: str


class ServedRows(Protocol):
    """Row server: follows the log of changes, and serves the rows of one part of all ids. Read-only."""

    def state(self) -> RowServerState:
        """Returns which rows it has. Never waits for an update."""

    def lookup(self, version: RowsVersion, ids: Packed[np.uint64]) -> FoundRows:
        """Looks up rows by table. Never waits for an update; ids of other parts have no rows.

        Args:
            version: required version of the rows.
            ids: ids by table, uint64 `[n]`; ids may repeat.

        Raises:
            ConfigError: the row server has another part, or another number of parts.
            PublishError: the row server does not have this epoch, or its rows do not contain the step yet.
            StoreError: a table does not exist, or there are too many rows for one response.
        """
