"""The interface of a training mode: pure functions, without threads, sockets or clocks."""

from __future__ import annotations

import enum
from typing import Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import msgspec
import numpy as np
from numpy.typing import NDArray

from persia.checks import MAX_COUNT
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

Reduction: TypeAlias = Literal["global", "per_id"]
"""The divisor of the weighted sum of an id's gradients: all gradients of the step, or those that have the id."""


class Action(enum.Enum):
    """The action on a gradient that arrives at a PS."""

    APPLY = "apply"
    """Add it to the held gradients, apply their sum, and advance the step."""

    HOLD = "hold"
    """Add it to the held gradients."""

    DROP = "drop"
    """Drop it, as it is too late. It does not count as an arrival."""


class Arrival(NamedTuple):
    """The arrival of a gradient at a PS, as the input of `Mode.arrive`.

    Attributes:
        step: k, the number of applied steps.
        held: number of gradients that have arrived since the last step, with or without rows for this PS.
        token: token of the gradient, from `Mode.token` at the lookup of its batch.
        group: number of gradients of a step, from `Mode.group`.
    """

    step: int
    held: int
    token: int
    group: int


class Decision(NamedTuple):
    """The result of `Mode.arrive`.

    Attributes:
        action: action on the gradient.
        decay: factor of its dense part, 0 or 1. A gradient of decay 0 changes nothing, but counts in the divisor of
            the sum. Rows have a rule of their own: `Mode.row_limit`.
    """

    action: Action
    decay: float = 1.0


class RowLimit(NamedTuple):
    """The rows to which a gradient applies, by the step in which each was last changed.

    Attributes:
        newest: the gradient applies to rows last changed in this step or before; None: to all.
        future: the next step to be applied. Rows last changed in this step or later were loaded, or remain from before
            the NN workers restarted at an earlier step. They count as unchanged.
    """

    newest: int | None
    future: int

    def last_steps(self, last_steps: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the steps in which rows were last changed, with -1 for rows from the future."""
        return np.where(last_steps < self.future, last_steps, -1)

    def admits(self, last_steps: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Returns whether the gradient applies to each row, bool `[n]`."""
        if self.newest is None:
            return np.ones(len(last_steps), np.bool_)
        fresh: NDArray[np.bool_] = self.last_steps(last_steps) <= self.newest
        return fresh


class Dense(enum.Enum):
    """The way in which NN workers share the dense parameters."""

    ALL_REDUCE = "all_reduce"
    """Replicas average their gradients; all NN workers make the same steps, in order."""

    SERVER = "server"
    """Dense PSs own the parameters; each NN worker draws a batch as soon as it has finished the one before."""


class Observation(NamedTuple):
    """Measurements of an NN worker over a window of its steps, for modes that adapt.

    Attributes:
        waited: seconds that the training thread waited for rows while the gate delayed their lookup; or looked them up
            and pushed gradients by itself, while cores were idle that could have.
        elapsed: duration of the steps in seconds, waiting included.
        steps: number of batches.
        would_wait: predicted seconds of waiting with one step fewer in flight, which delays rows by one step time.
        change: last change of the depth; 0 if it never changed.
        windows: number of windows since that change, this one included.
        before: seconds waited per batch in the last window before that change.
        seconds_before: duration of a batch in that window; 0 if it is not known.
    """

    waited: float
    elapsed: float
    steps: int
    would_wait: float = 0.0
    change: int = 0
    windows: int = 1
    before: float = 0.0
    seconds_before: float = 0.0


@runtime_checkable
class Mode(Protocol):
    """The interface of a mode: pure functions of numbers, each asked by the roles that need its answer.

    NN worker: `gate`, `depth_at`, `refresh`, `lookahead`, `dense` (selects the training loop). Coordinator: `gate`,
    `waits_for_step`, `token`, `arrive`. Embedding PS: `arrive`, `row_limit`, `reduction`. Dense PS: `decay`. At the
    start of a phase: `group`. The replay driver asks all of them. The page docs/concepts/modes.md says when.
    """

    def initial_depth(self) -> int | None:
        """Returns the initial depth: the maximum number of own steps that rows may lack; None for no limit."""

    def next_depth(self, depth: int | None, seen: Observation) -> int | None:
        """Returns the depth after a window of steps."""

    def depth_at(self, depth: int | None, step: int) -> int | None:
        """Returns the depth for the lookup of a global step, at most `depth`. While it is less, `depth` stays."""

    def gate(self, in_flight: int, depth: int | None, ahead: int = 0) -> bool:
        """Returns whether the next batch may look up its rows and pull dense parameters.

        Args:
            in_flight: number of own steps that are looked up and neither applied nor dropped.
            depth: current depth.
            ahead: number of steps by which this NN worker is ahead of the slowest one that still has data.
        """

    @property
    def refresh(self) -> bool:
        """Whether rows that were looked up ahead are brought up to date before their batch is used."""

    @property
    def lookahead(self) -> int:
        """Number of steps by which such lookups may run ahead, even if `depth` is less: rows may lack `depth` steps."""

    @property
    def waits_for_step(self) -> bool:
        """Whether lookups and pulls wait for the newest complete step."""

    def token(self, number: int, version: int, group: int) -> int:
        """Returns the token of a batch, which its gradient carries; called when the batch is looked up.

        Args:
            number: number of batches that all NN workers have drawn before it since k was 0.
            version: k of the parameters that it is computed with.
            group: number of gradients of a step.
        """

    def group(self, nn_workers: int, local_batch: int) -> int:
        """Returns how many gradients a PS applies together as one step.

        Args:
            nn_workers: number of NN workers.
            local_batch: rows of a batch.

        Raises:
            ConfigError: this mode cannot run with these NN workers or batches.
        """

    def arrive(self, arrival: Arrival) -> Decision:
        """Decides what happens to a gradient that arrives."""

    def decay(self, step: int, token: int) -> float:
        """Returns the decay of a gradient for dense parameters, 0 or 1, the same as `arrive`.

        Args:
            step: k.
            token: token of the gradient.
        """

    def row_limit(self, step: int, token: int) -> RowLimit:
        """Returns the rows to which a gradient applies; called once per push.

        Args:
            step: k.
            token: token of the gradient.
        """

    @property
    def reduction(self) -> Reduction:
        """The divisor of the weighted sum of an id's gradients."""

    def dense(self) -> Dense:
        """Returns how NN workers share the dense parameters."""


def hold_until_full(arrival: Arrival, decay: float = 1.0) -> Decision:
    """Holds gradients until their group is complete, and applies them with its last one."""
    return Decision(Action.APPLY if arrival.held + 1 >= arrival.group else Action.HOLD, decay)


def check_whole(mode: str, field: str, value: object, least: int, hint: str) -> None:
    """Raises ConfigError unless `value` is a whole number from `least` to 2^31 - 1; `hint` says what it means."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MAX_COUNT:
        raise ConfigError(
            f"Invalid {mode}.{field} = {value!r}; expected a whole number from {least} to {MAX_COUNT}: {hint}.",
            field=f"mode.{field}",
        )


def check_reduction(mode: str, value: object) -> None:
    """Raises ConfigError unless `value` is a `Reduction`."""
    if value not in ("global", "per_id"):
        raise ConfigError(
            f"Invalid {mode}.reduction = {value!r}; expected 'global' or 'per_id'.", field="mode.reduction"
        )


class OnArrival(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    """The defaults of a mode: no limit on staleness, and each gradient is applied on arrival. Lacks `dense`."""

    def initial_depth(self) -> int | None:
        """Returns None: no limit."""
        return None

    def next_depth(self, depth: int | None, seen: Observation) -> int | None:
        """Returns the same depth."""
        return depth

    def depth_at(self, depth: int | None, step: int) -> int | None:
        """Returns the same depth."""
        return depth

    def gate(self, in_flight: int, depth: int | None, ahead: int = 0) -> bool:
        """Opens while at most `depth` own steps are in flight."""
        return depth is None or in_flight <= depth

    @property
    def refresh(self) -> bool:
        """False: rows stay as they were looked up."""
        return False

    @property
    def lookahead(self) -> int:
        """0: no lookup runs further ahead than the depth."""
        return 0

    @property
    def waits_for_step(self) -> bool:
        """False: lookups and pulls read the current rows and parameters."""
        return False

    def token(self, number: int, version: int, group: int) -> int:
        """Returns the version that the gradient is computed with."""
        return version

    def group(self, nn_workers: int, local_batch: int) -> int:
        """Returns 1: each gradient is a step."""
        return 1

    def arrive(self, arrival: Arrival) -> Decision:
        """Applies the gradient."""
        return Decision(Action.APPLY)

    def decay(self, step: int, token: int) -> float:
        """Returns 1, whatever the age."""
        return 1.0

    def row_limit(self, step: int, token: int) -> RowLimit:
        """Admits all rows."""
        return RowLimit(None, step)

    @property
    def reduction(self) -> Reduction:
        """All gradients of the step."""
        return "global"


class Asynchronous(OnArrival, frozen=True):
    """The defaults of an asynchronous mode: an NN worker draws a batch, its token and parameters when it is ready."""

    @property
    def refresh(self) -> bool:
        """True: rows are found before the token is drawn, and brought up to date afterwards."""
        return True

    def dense(self) -> Dense:
        """Returns the dense PS."""
        return Dense.SERVER
