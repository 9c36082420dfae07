"""Dense parameter servers, as others see them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from persia.schema import Schedule
from persia.types import DenseState, JournalRecord, Pulled, PushedDense, PushHeader

__all__ = ["DenseMaker", "DensePS"]


class DensePS(Protocol):
    """Dense parameter server: owns whole tensors of the network, and the user's optimizer for them."""

    def load(self, state: DenseState, generation: int, step: int) -> None:
        """Takes its part of the network over, at `step`."""

    def pull(self, have: int, least: int, timeout: float) -> Pulled:
        """Parameters of the newest version.

        Args:
            have: version that the caller has; -1 for none.
            least: waits until this version is there.
            timeout: seconds to wait.

        Raises:
            DeadlineError: it did not come; it names the slot that is missing.
        """

    def push(self, header: PushHeader, part: PushedDense) -> None:
        """Adds a gradient to the step in work, in the order of slots, and applies the step with its last one.

        Raises:
            StalePushError: of an earlier generation.
            StoreError: the gradient does not fit; nothing is changed.
        """

    def drain(self, generation: int, step: int, held: int) -> None:
        """Applies the `held` gradients that have arrived of `step`.

        Raises:
            PersiaError: this PS has others: it is out of phase.
        """

    def export(self) -> DenseState:
        """All that is owned here, at rest."""

    def record(self) -> None:
        """Keeps a journal from now on."""

    def journal(self) -> JournalRecord:
        """Ends that: the pushes that took effect, in this order."""

    def statistics(self) -> dict[str, int]:
        """Counters: `version`, `pushes`, `pulls`, `bytes`."""


class DenseMaker(NamedTuple):
    """What a dense PS is made of.

    Attributes:
        optimizer: takes parameters, returns a `torch.optim.Optimizer`.
        schedule: of its learning rates, by updates made.
        clip_norm: largest global norm of a step's gradient.
    """

    optimizer: Callable[[Any], Any]
    schedule: Schedule | None = None
    clip_norm: float | None = None
