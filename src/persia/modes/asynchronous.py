"""What the modes without a common step share: gradients are applied on arrival, unless a mode says otherwise."""

from __future__ import annotations

import msgspec

from persia.modes.base import Action, Arrival, Decision, Dense, Observation, Reduction

__all__ = ["Asynchronous", "OnArrival"]


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

    @property
    def tolerance(self) -> int | None:
        """None: nothing is decayed."""
        return None

    @property
    def reduction(self) -> Reduction:
        """An id's gradients are averaged over those that have the id."""
        return "per_id"


class Asynchronous(OnArrival, frozen=True):
    """The network is trained freely too: an NN worker takes batch, token and parameters when it is ready for them."""

    def dense(self) -> Dense:
        """The dense PS."""
        return Dense.SERVER
