"""What a mode is: three small decisions, without any knowledge of threads, sockets or clocks."""

from __future__ import annotations

import enum
from typing import Literal, NamedTuple, Protocol, TypeAlias

__all__ = ["Aggregation", "Dense", "Mode", "Observation", "Reduction"]

Reduction: TypeAlias = Literal["per_id", "global"]
"""What the weighted sum of a held step is divided by: the weights of those that have the id, or all weights."""


class Aggregation(enum.Enum):
    """What a PS does with the gradients that it has for a step."""

    APPLY = "apply"
    HOLD = "hold"


class Dense(enum.Enum):
    """How the dense parameters of several NN workers are kept alike."""

    ALL_REDUCE = "all_reduce"


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


class Mode(Protocol):
    """The interface of a mode. `depth` is the bound on staleness in force, in the NN worker's own steps."""

    def initial_depth(self) -> int | None:
        """The depth to begin with; None for no bound."""

    def next_depth(self, depth: int | None, seen: Observation) -> int | None:
        """The depth after a window of steps."""

    def gate(self, in_flight: int, depth: int | None) -> bool:
        """May the next step look up its rows, while `in_flight` own steps lack their applied gradient?"""

    def aggregate(self, arrived: int, nn_workers: int) -> Aggregation:
        """What happens when `arrived` of `nn_workers` gradients of a step have reached a PS."""

    @property
    def reduction(self) -> Reduction:
        """How the gradients of several NN workers become one."""

    def dense(self) -> Dense:
        """How dense gradients are combined."""
