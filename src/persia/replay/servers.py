"""Parameter servers of a replay: running weighted sums, and one update when a group of gradients is complete.

Readable first: numpy, one thread. The sums hold each row once, however many gradients a group has (GBA, appendix B:
"we could execute the weighted sum over some gradients in advance").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from persia.modes import Mode, RowLimit, Sync
from persia.types import Ids

__all__ = [
    "Numbers",
    "ReplayDense",
    "ReplayRows",
    "ReplayServer",
    "RowAccumulator",
    "RowGradients",
    "RowsBackend",
    "TakenGradient",
]

Numbers: TypeAlias = NDArray[Any]
"""float32 or float64; sums have the precision of the gradients."""

RowGradients: TypeAlias = Mapping[str, tuple[Ids, Numbers]]
"""By table: distinct ids uint64 `[n]`, gradients `[n, dim]`."""


class TakenGradient(NamedTuple):
    """How a gradient enters a sum.

    Attributes:
        step: k at its arrival.
        token: token of the gradient.
        weight: weight of the dense gradient, by the mode.
        share: its part of the divisor: the rows of its batch; at a dense PS divided by the rows of a full batch; 0
            without data.
    """

    step: int
    token: int
    weight: float
    share: float


class ReplayServer(Protocol):
    """Interface of a PS of a replay."""

    def begin(self, mode: Mode) -> None:
        """Adopts a mode; no gradient is held at this moment."""

    def read(self, batch: int) -> Any:
        """Returns the parameters that an NN worker reads for a batch; they must not change afterwards."""

    def add(self, gradient: Any, taken: TakenGradient) -> None:
        """Adds a gradient to the running sum; None stands for a push without data, which counts too."""

    def apply(self, step: int) -> None:
        """Applies the sum as update number `step` and clears it; a sum without weight changes nothing."""


class RowsBackend(Protocol):
    """Interface of the tables of a PS, with their optimizers. Ids of a table are distinct in a call."""

    def lookup(self, ids: Mapping[str, Ids]) -> Mapping[str, Numbers]:
        """Returns rows `[n, dim]` by table, which do not change afterwards; inserts missing ones."""

    def update(self, gradients: RowGradients, step: int) -> None:
        """Updates each row once."""


class ReplayDense:
    """A dense PS, whose parameters are one flat vector.

    Args:
        read: returns a copy of the parameters `[n]`; called once per step.
        update: takes the mean gradient `[n]` and the step.
    """

    def __init__(self, read: Callable[[], Numbers], update: Callable[[Numbers, int], None]) -> None:
        self._read, self._update = read, update
        self._sum: Numbers | None = None
        self._weight = self._shares = 0.0
        self._now: Numbers | None = None

    def begin(self, mode: Mode) -> None:
        """No-op: weights come with the gradients."""

    def read(self, batch: int) -> Numbers:
        """Returns all parameters, which every batch needs."""
        if self._now is None:
            self._now = self._read()
        return self._now

    def add(self, gradient: Numbers | None, taken: TakenGradient) -> None:
        """Adds the weighted gradient."""
        weight = taken.weight * taken.share
        self._shares += taken.share
        self._weight += weight
        if weight and gradient is not None:
            part = gradient if weight == 1.0 else gradient * np.asarray(weight, gradient.dtype)
            self._sum = part.copy() if self._sum is None else self._sum + part

    def apply(self, step: int) -> None:
        """Applies the weighted sum divided by the sum of shares, which is M for a complete step."""
        if self._sum is not None and self._weight:
            self._update(self._sum / np.asarray(self._shares, self._sum.dtype), step)
            self._now = None
        self._sum, self._weight, self._shares = None, 0.0, 0.0


class RowAccumulator:
    """Running sums of one table, and the step in which each row was last changed.

    Args:
        dim: dimension of a row.
        dtype: dtype of the sums.
    """

    def __init__(self, dim: int, dtype: Any) -> None:
        self._slot: dict[int, int] = {}
        self._last_step = np.zeros(0, np.int64)
        self._sum = np.zeros((0, dim), dtype)
        self._counts = np.zeros((0, 2), np.float64)  # Of weights, and of gradients that have the id.
        self._ids = np.zeros(0, np.uint64)
        self._touched: list[NDArray[np.int64]] = []

    def add(self, ids: Ids, gradients: Numbers, taken: TakenGradient, limit: RowLimit) -> None:
        """Adds each id's gradient if the limit admits its row."""
        slots = self._slots(ids)
        fresh = limit.admits(self._last_step[slots])
        if fresh.all() and taken.share == 1.0:
            self._sum[slots] += gradients
        else:
            self._sum[slots] += gradients * (fresh * taken.share)[:, None].astype(gradients.dtype)
        self._counts[slots, 0] += fresh * taken.share
        self._counts[slots, 1] += taken.share
        self._touched.append(slots)

    def take(self, step: int, shares: float | None) -> tuple[Ids, Numbers]:
        """Returns the means of ids with any weight, and clears the sums.

        Args:
            step: step in which the rows are changed.
            shares: common divisor; None to divide by the shares of each id.
        """
        slots = np.unique(np.concatenate(self._touched)) if self._touched else np.zeros(0, np.int64)
        counts = self._counts[slots]
        weighty = counts[:, 0] > 0
        found = slots[weighty]
        divisor = counts[weighty, 1] if shares is None else np.full(len(found), shares)
        mean = self._sum[found] / divisor[:, None].astype(self._sum.dtype)
        self._last_step[found] = step
        self._sum[slots] = 0
        self._counts[slots] = 0
        self._touched.clear()
        return self._ids[found], mean

    def last_step(self, id_: int) -> int:
        """Returns the step in which a row was last changed; 0 if it never was."""
        slot = self._slot.get(id_)
        return 0 if slot is None else int(self._last_step[slot])

    def _slots(self, ids: Ids) -> NDArray[np.int64]:
        """Returns the place of each id; new ids get one."""
        known = self._slot
        before = len(known)
        slots = np.fromiter((known.setdefault(i, len(known)) for i in ids.tolist()), np.int64, len(ids))
        if len(known) > len(self._last_step):
            room = max(1024, 2 * len(known)) - len(self._last_step)
            self._last_step = np.concatenate((self._last_step, np.zeros(room, np.int64)))
            self._sum = np.concatenate((self._sum, np.zeros((room, self._sum.shape[1]), self._sum.dtype)))
            self._counts = np.concatenate((self._counts, np.zeros((room, 2))))
            self._ids = np.concatenate((self._ids, np.zeros(room, np.uint64)))
        if len(known) > before:
            self._ids[slots] = ids
        return slots


class ReplayRows:
    """An embedding PS: the rows of a partition of all tables.

    Args:
        rows: the tables.
        ids: returns the distinct ids of a batch that this PS owns, by table.
    """

    def __init__(self, rows: RowsBackend, ids: Callable[[int], Mapping[str, Ids]]) -> None:
        self._rows, self._ids = rows, ids
        self._held: dict[str, RowAccumulator] = {}
        self._mode: Mode = Sync()
        self._shares = 0.0

    def begin(self, mode: Mode) -> None:
        """Adopts a mode, which decides decay and divisor; `last_step` of the rows is kept."""
        self._mode = mode

    def read(self, batch: int) -> dict[str, tuple[Ids, Numbers]]:
        """Returns distinct ids and their rows, by table."""
        ids = self._ids(batch)
        rows = self._rows.lookup(ids)
        return {table: (ids[table], rows[table]) for table in ids}

    def add(self, gradient: RowGradients | None, taken: TakenGradient) -> None:
        """Adds the gradient of each id whose row the mode admits."""
        self._shares += taken.share
        limit = self._mode.row_limit(taken.step, taken.token)
        for table, (ids, values) in (gradient or {}).items():
            if table not in self._held:
                self._held[table] = RowAccumulator(values.shape[1], values.dtype)
            self._held[table].add(ids, values, taken, limit)

    def apply(self, step: int) -> None:
        """Updates each row that has a gradient with weight."""
        shares = self._shares if self._mode.reduction == "global" else None
        means = {table: held.take(step, shares) for table, held in self._held.items()}
        self._rows.update({table: mean for table, mean in means.items() if len(mean[0])}, step)
        self._shares = 0.0

    def last_step(self, table: str, id_: int) -> int:
        """Returns the step in which a row was last changed; 0 if it never was."""
        return self._held[table].last_step(id_) if table in self._held else 0
