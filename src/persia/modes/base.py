"""What a mode is: three small decisions, without any knowledge of threads, sockets or clocks."""

from __future__ import annotations

import enum
from typing import Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import msgspec
import numpy as np
from numpy.typing import NDArray

from persia.errors import ConfigError

__all__ = [
    "Action",
    "Arrival",
    "Asynchronous",
    "Decision",
    "Dense",
    "Mode",
    "Observation",
    "OnArrival",
    "Reduction",
    "RowLimit",
    "check_reduction",
    "check_whole",
    "hold_until_full",
]

Reduction: TypeAlias = Literal["per_id", "global"]
"""What the weighted sum of an id's gradients is divided by: those that have the id, or all that make the step."""


class Action(enum.Enum):
    """What a PS does with a gradient that arrives."""

    APPLY = "apply"
    """Add it to what is held, apply all of it, and advance the step."""

    HOLD = "hold"
    """Add it to what is held."""

    DROP = "drop"
    """Forget it: it came too late. It counts as no arrival."""


class Arrival(NamedTuple):
    """A gradient reaches a PS: all that a mode needs to know to decide.

    Attributes:
        step: k, the steps that have been applied here.
        held: gradients that have arrived since, with or without rows for this PS.
        token: of the gradient, as `Mode.token` gave it when its batch was looked up.
        group: what `Mode.group` says.
    """

    step: int
    held: int
    token: int
    group: int


class Decision(NamedTuple):
    """What happens to a gradient.

    Attributes:
        action: on the whole gradient.
        weight: 0 or 1, of its dense part. A gradient of weight 0 has arrived and changes nothing: the sum is divided
            as if it had been there. Rows have a rule of their own: `Mode.row_limit`.
    """

    action: Action
    weight: float = 1.0


class RowLimit(NamedTuple):
    """The rows for which a gradient counts, by the step in which each was last changed.

    Attributes:
        newest: the gradient counts for rows last changed in this step or before; None: for all.
        future: the step in work. Rows of this step or a later one come from a future that was undone: NN workers went
            back, or the rows were loaded. They count as never touched.
    """

    newest: int | None
    future: int

    def last_steps(self, last_steps: NDArray[np.int64]) -> NDArray[np.int64]:
        """The steps in which rows were last changed, -1 for rows from the future."""
        return np.where(last_steps < self.future, last_steps, -1)

    def admits(self, last_steps: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether the gradient counts, for each row, bool `[n]`."""
        if self.newest is None:
            return np.ones(len(last_steps), np.bool_)
        fresh: NDArray[np.bool_] = self.last_steps(last_steps) <= self.newest
        return fresh


class Dense(enum.Enum):
    """How the dense parameters of several NN workers are kept alike."""

    ALL_REDUCE = "all_reduce"
    """Replicas that average their gradients; all NN workers make the same steps, in order."""

    SERVER = "server"
    """The dense PS; every NN worker draws batches as it is done with the one before."""


class Observation(NamedTuple):
    """What an NN worker saw of a window of its steps, for modes that adapt.

    Attributes:
        waited: seconds that the training thread waited for rows while the gate held their lookup back.
        elapsed: seconds that the steps took, waiting included.
        steps: how many batches.
        would_wait: seconds that it would have waited, had one step fewer been in flight: then rows would have been
            ready later by the time of a step.
        change: by what the depth was last changed; 0 if it never was.
        windows: windows since that change, this one included.
        before: seconds waited per batch in the last window before that change.
    """

    waited: float
    elapsed: float
    steps: int
    would_wait: float = 0.0
    change: int = 0
    windows: int = 1
    before: float = 0.0


@runtime_checkable
class Mode(Protocol):
    """The interface of a mode: pure functions of numbers, which every role asks in its own place.

    NN worker: `gate` and `dense` (which of its two loops runs). Coordinator: `gate`, `token`, `arrive`. Embedding PS:
    `row_limit`, `reduction`. Whoever starts them: `group`. The replay driver asks all of them.
    """

    def initial_depth(self) -> int | None:
        """Bound on the NN worker's own steps in flight to begin with; None for no bound."""

    def next_depth(self, depth: int | None, seen: Observation) -> int | None:
        """That bound after a window of steps."""

    def gate(self, in_flight: int, depth: int | None, ahead: int = 0) -> bool:
        """May the next batch look up its rows and pull dense parameters?

        Args:
            in_flight: own steps that were looked up and are neither applied nor dropped.
            depth: the bound in force.
            ahead: steps that this NN worker has finished more than the slowest one that still has data.
        """

    @property
    def waits_for_step(self) -> bool:
        """Whether lookups and pulls wait for the newest complete step."""

    def token(self, number: int, version: int, group: int) -> int:
        """What a gradient is tagged with when its batch is looked up.

        Args:
            number: batches drawn before it by all NN workers since k was 0.
            version: k of the parameters that it is computed with.
            group: what `group` says.
        """

    def group(self, nn_workers: int, local_batch: int) -> int:
        """How many gradients a PS applies together.

        Args:
            nn_workers: how many there are.
            local_batch: rows of a batch.

        Raises:
            ConfigError: so many NN workers, or such batches, cannot run this mode.
        """

    def arrive(self, arrival: Arrival) -> Decision:
        """What a PS does with a gradient that arrives."""

    def weight(self, step: int, token: int) -> float:
        """Returns the weight of a gradient for dense parameters, 0 or 1.

        Args:
            step: k.
            token: of the gradient.
        """

    def row_limit(self, step: int, token: int) -> RowLimit:
        """Returns the rows for which a gradient counts; asked once per push.

        Args:
            step: k.
            token: of the gradient.
        """

    @property
    def reduction(self) -> Reduction:
        """What the weighted sum of an id's held gradients is divided by."""

    def dense(self) -> Dense:
        """How dense gradients are combined."""


def hold_until_full(arrival: Arrival, weight: float = 1.0) -> Decision:
    """Applies with the last gradient of a group, holds the others."""
    return Decision(Action.APPLY if arrival.held + 1 >= arrival.group else Action.HOLD, weight)


def check_whole(mode: str, field: str, value: object, least: int, hint: str) -> None:
    """Raises ConfigError unless `value` is a whole number of at least `least`; `hint` tells what it means."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{mode}.{field} = {value!r}; give a whole number >= {least}: {hint}.", field=f"mode.{field}")


def check_reduction(mode: str, value: object) -> None:
    """Raises ConfigError unless `value` is a `Reduction`."""
    if value not in ("per_id", "global"):
        raise ConfigError(f"{mode}.reduction = {value!r}; give 'per_id' or 'global'.", field="mode.reduction")


class OnArrival(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    """Embeddings are trained freely; a mode says what it does otherwise, and how it trains the network. No mode."""

    def initial_depth(self) -> int | None:
        """No bound."""
        return None

    def next_depth(self, depth: int | None, seen: Observation) -> int | None:
        """Never changes."""
        return depth

    def gate(self, in_flight: int, depth: int | None, ahead: int = 0) -> bool:
        """Open, within the bound if there is one."""
        return depth is None or in_flight <= depth

    @property
    def waits_for_step(self) -> bool:
        """False: lookups and pulls take what is there."""
        return False

    def token(self, number: int, version: int, group: int) -> int:
        """The version that the gradient is computed with."""
        return version

    def group(self, nn_workers: int, local_batch: int) -> int:
        """Each gradient by itself."""
        return 1

    def arrive(self, arrival: Arrival) -> Decision:
        """On arrival."""
        return Decision(Action.APPLY)

    def weight(self, step: int, token: int) -> float:
        """Whatever its age."""
        return 1.0

    def row_limit(self, step: int, token: int) -> RowLimit:
        """All rows: nothing is decayed."""
        return RowLimit(None, step)

    @property
    def reduction(self) -> Reduction:
        """An id's gradients are averaged over those that have the id."""
        return "per_id"


class Asynchronous(OnArrival, frozen=True):
    """The network is trained freely too: an NN worker takes batch, token and parameters when it is ready for them."""

    def dense(self) -> Dense:
        """The dense PS."""
        return Dense.SERVER
