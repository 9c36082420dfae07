"""The interface of row servers: processes that serve a part of all rows to predictors."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from persia.types import Packed

__all__ = ["FoundRows", "RowServerState", "RowsVersion", "ServedEpoch", "ServedRows"]


class RowsVersion(NamedTuple):
    """The rows that a lookup is for. A row server that does not have them refuses it.

    Attributes:
        part: number of the part that the row server is expected to have.
        parts: number of parts.
        run: random identifier of the epoch in the log of changes.
        step: global steps that the rows must contain, at least.
    """

    part: int
    parts: int
    run: str
    step: int


class FoundRows(NamedTuple):
    """Answer to a lookup.

    Attributes:
        found: by table, bool `[n]`: whether each id has a row.
        rows: by table, float32 `[n, dim]`; zeros where there is none.
    """

    found: Packed[np.bool_]
    rows: Packed[np.float32]


class ServedEpoch(NamedTuple):
    """An epoch of the log of changes whose rows a row server has.

    Attributes:
        run: random identifier of the epoch.
        epoch: its number.
        step: global steps that the rows contain, at least.
        time: seconds since 1970, when the oldest rows of an embedding PS were as they are.
        rows: number of rows of all tables.
    """

    run: str
    epoch: int
    step: int
    time: float
    rows: int


class RowServerState(NamedTuple):
    """The rows that a row server has at present.

    Attributes:
        part: number of its part.
        parts: number of parts.
        epochs: those whose rows are complete, the newest first; empty while the first one is read.
        problem: why something newer in the log is not served; empty if everything is.
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
        """Looks up rows by table. Never waits for an update; ids of other parts have no rows here.

        Args:
            version: of the rows.
            ids: by table, uint64 `[n]`; an id may be there several times.

        Raises:
            ConfigError: this is another part, or one of another number of parts.
            PublishError: it does not have this epoch, or its rows do not contain the step yet.
            StoreError: there is no such table, or the rows would be too many for one answer.
        """
