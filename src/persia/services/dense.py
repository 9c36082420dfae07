"""The interface of dense parameter servers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from persia import rpc
from persia.schema import Schedule
from persia.types import DenseState, Pulled, PushedDense, PushHeader

__all__ = ["DenseMaker", "DensePS"]


class DensePS(Protocol):
    """Dense parameter server: owns whole tensors of the network, and the user's optimizer for them."""

    def load(self, state: DenseState, generation: int, step: int) -> None:
        """Replaces the PS's part of the network by its part of a state, as of `step`."""

    @rpc.waits
    def pull(self, have: int, least: int, timeout: float) -> Pulled:
        """Returns parameters of the newest version.

        Args:
            have: version of the caller; -1 for none.
            least: minimum version to wait for.
            timeout: seconds to wait.

        Raises:
            DeadlineError: the version did not arrive in time; the error names the missing slot.
        """

    @rpc.waits
    def push(self, header: PushHeader, part: PushedDense) -> None:
        """Adds a gradient to the current step, in the order of slots, and applies the step with its last slot.

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
        """Returns counters: `version`, `pushes`, `pulls`, `bytes`."""


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
