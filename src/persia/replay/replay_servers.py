"""Parameter servers of a replay: weighted sums, and one update when a group of gradients is complete.

Written for readability: numpy, one thread. Gradients of rows are stored until their group is complete.
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
    """The weight of a gradient in a sum.

    Attributes:
        step: k when the gradient arrived.
        token: token of the gradient.
        decay: decay of the dense gradient, by the mode.
        share: part of the divisor: the rows of its batch; at a dense PS divided by the rows of a full batch; 0 without
            data.
    """

    step: int
    token: int
    decay: float
    share: float


class ReplayServer(Protocol):
    """Interface of a PS of a replay."""

    def begin(self, mode: Mode) -> None:
        """Switches to a mode. No gradient is pending."""

    def read(self, batch: int) -> Any:
        """Returns the parameters that an NN worker reads for a batch; they must not change afterwards."""

    def add(self, gradient: Any, taken: TakenGradient) -> None:
        """Adds a gradient, which must not change until the next `apply`; None is a push without data, also counted."""

    def apply(self, step: int) -> None:
        """Applies the sum as update number `step` and clears it; a sum without weight changes nothing."""


class RowsBackend(Protocol):
    """Interface of the tables of a PS, with their optimizers. Ids of a table are distinct in a call."""

    def lookup(self, ids: Mapping[str, Ids]) -> Mapping[str, Numbers]:
        """Returns rows `[n, dim]` by table, which do not change afterwards; inserts missing rows."""

    def update(self, gradients: RowGradients, step: int) -> None:
        """Updates each row once."""


class ReplayDense:
    """A dense PS, whose parameters are one flat vector.

    Args:
        read: returns a copy of the parameters `[n]`; called once per step, and at the start of a timeline.
        update: takes the mean gradient `[n]` and the step.
    """

    def __init__(self, read: Callable[[], Numbers], update: Callable[[Numbers, int], None]) -> None:
        self._read, self._update = read, update
        self._sum: Numbers | None = None
        self._weight = self._shares = 0.0
        self._now: Numbers | None = None

    def begin(self, mode: Mode) -> None:
        """Reads the parameters again; weights come with the gradients."""
        self._now = None

    def read(self, batch: int) -> Numbers:
        """Returns all parameters, which every batch needs."""
        if self._now is None:
            self._now = self._read()
        return self._now

    def add(self, gradient: Numbers | None, taken: TakenGradient) -> None:
        """Adds the weighted gradient."""
        weight = taken.decay * taken.share
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


class _Part(NamedTuple):
    """Gradients of a push: ids, values `[n, dim]`, whether each counts, share of a whole batch."""

    ids: Ids
    values: Numbers
    fresh: NDArray[np.bool_]
    share: float


class RowAccumulator:
    """The gradients of a step for one table, and the step in which each row was last changed."""

    def __init__(self) -> None:
        self._last_step: dict[int, int] = {}
        self._parts: list[_Part] = []

    def add(self, ids: Ids, gradients: Numbers, taken: TakenGradient, limit: RowLimit) -> None:
        """Adds each id's gradient if the limit admits its row."""
        if (
            limit.newest is None
        ):  # All rows are admitted; looking up their last steps takes a tenth of the training time.
            fresh = np.ones(len(ids), np.bool_)
        else:
            fresh = limit.admits(np.fromiter(map(self.last_step, ids.tolist()), np.int64, len(ids)))
        self._parts.append(_Part(ids, gradients, fresh, taken.share))

    def take(self, step: int, shares: float | None) -> tuple[Ids, Numbers]:
        """Returns the means of ids with any weight, and clears the sums.

        Args:
            step: step in which the rows are changed.
            shares: common divisor; None to divide by the shares of each id.
        """
        parts, self._parts = self._parts, []
        if not parts:
            return np.zeros(0, np.uint64), np.zeros((0, 0))
        ids, places = np.unique(np.concatenate([part.ids for part in parts]), return_inverse=True)
        dim, dtype = parts[0].values.shape[1], parts[0].values.dtype
        sums = np.zeros((len(ids), dim), dtype)
        weights, counts = np.zeros(len(ids)), np.zeros(len(ids))
        end = 0
        for part in parts:  # In order of arrival, as a sum depends on it.
            indices = places[end : end + len(part.ids)]
            end += len(part.ids)
            weight = part.fresh * part.share
            sums[indices] += part.values if (weight == 1.0).all() else part.values * weight[:, None].astype(dtype)
            weights[indices] += weight
            counts[indices] += part.share
        nonzero = weights > 0
        divisor = counts[nonzero] if shares is None else np.full(np.count_nonzero(nonzero), shares)
        updated_ids = ids[nonzero]
        self._last_step.update(dict.fromkeys(updated_ids.tolist(), step))
        return updated_ids, sums[nonzero] / divisor[:, None].astype(dtype)

    def last_step(self, id_: int) -> int:
        """Returns the step in which a row was last changed; 0 if it never was."""
        return self._last_step.get(id_, 0)


class ReplayRows:
    """An embedding PS: the rows of a partition of all tables.

    Args:
        rows: the tables.
        ids: returns the distinct ids of a batch that this PS owns, by table.
    """

    def __init__(self, rows: RowsBackend, ids: Callable[[int], Mapping[str, Ids]]) -> None:
        self._rows, self._ids = rows, ids
        self._accumulators: dict[str, RowAccumulator] = {}
        self._mode: Mode = Sync()
        self._shares = 0.0

    def begin(self, mode: Mode) -> None:
        """Switches to a mode, which decides decay and divisor. `last_step` of the rows is retained."""
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
            self._accumulators.setdefault(table, RowAccumulator()).add(ids, values, taken, limit)

    def apply(self, step: int) -> None:
        """Updates each row that has a gradient with weight."""
        shares = self._shares if self._mode.reduction == "global" else None
        means = {table: accumulator.take(step, shares) for table, accumulator in self._accumulators.items()}
        self._rows.update({table: mean for table, mean in means.items() if len(mean[0])}, step)
        self._shares = 0.0

    def last_step(self, table: str, id_: int) -> int:
        """Returns the step in which a row was last changed; 0 if it never was."""
        return self._accumulators[table].last_step(id_) if table in self._accumulators else 0
