"""The interface of dense parameter servers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from persia import rpc
from persia.modes import Mode
from persia.schema import Schedule
from persia.types import DenseState, Pulled, PushedDense, PushHeader, PushId

__all__ = ["DenseMaker", "DensePS"]


class DensePS(Protocol):
    """Dense parameter server: owns whole tensors of the network, and the user's optimizer for them."""

    def load(self, state: DenseState, generation: int, step: int, mode: Mode) -> None:
        """Replaces the PS's part of the network by its part of a state, as of `step`. A phase of `mode` begins."""

    @rpc.waits
    def pull(self, have: int, least: int, after: PushId | None, timeout: float) -> Pulled:
        """Returns parameters of the newest version.

        Args:
            have: version of the caller; -1 for none.
            least: minimum version to wait for.
            after: push to wait for, which the parameters have then counted; None for none.
            timeout: seconds to wait.

        Raises:
            DeadlineError: the version or the push did not arrive in time.
        """

    def push(self, header: PushHeader, part: PushedDense) -> None:
        """Adds a gradient to the current step, and applies the step with its last gradient. A repetition has no effect.

        The gradient is left out of the sum if it is too old for the step by the mode, but counts in the divisor.

        Raises:
            StalePushError: the push belongs to an earlier generation.
            StoreError: the gradient does not match the parameters; nothing is changed.
        """

    def drain(self, generation: int, step: int, held: int) -> None:
        """Applies the `held` gradients of `step` that have arrived.

        Raises:
            PersiaError: this PS has another number of gradients, so it is out of phase.
        """

    def export(self) -> DenseState:
        """Returns the state of all parameters that this PS owns; call it while the PS is quiescent."""

    def statistics(self) -> dict[str, int]:
        """Returns counters: `version`, `pushes`, `stale` (too old only when counted), `pulls`, `bytes`."""


class DenseMaker(NamedTuple):
    """The settings of a dense PS.

    Attributes:
        optimizer: takes parameters, returns a `torch.optim.Optimizer`.
        schedule: schedule of the learning rates, by number of updates.
        clip_norm: maximum global norm of a step's gradient.
    """

    optimizer: Callable[[Any], Any]
    schedule: Schedule | None = None
    clip_norm: float | None = None
