"""NN workers that join and leave while a run trains (docs/decisions/0033-nn-workers-join-and-leave.md)."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple, Protocol

__all__ = ["NNWorkersChange", "NNWorkersChanges"]


class NNWorkersChange(NamedTuple):
    """Another number of NN workers, which is to train from the next boundary between two phases on.

    Attributes:
        nn_workers: number of NN workers.
        factor: factor by which the batches per update of each NN worker change, so that the global batch stays; 1 if
            the global batch changes with the number of NN workers.
        number: number of the request, so that an answer to an earlier one is recognized.
    """

    nn_workers: int
    factor: Fraction = Fraction(1)
    number: int = 0


class NNWorkersChanges(Protocol):
    """The changes that are requested from an NN worker. Its methods block until the driver has answered."""

    @property
    def requested(self) -> NNWorkersChange | None:
        """The change that this NN worker knows of; None if there is none. NN worker 0 decides for all."""

    def accept(self, change: NNWorkersChange) -> bool:
        """Accepts a change at a boundary; returns False if it has been withdrawn, so that training goes on as before.

        If True, the function must end: the next run has the other number of NN workers.
        """

    def refuse(self, change: NNWorkersChange, reason: str) -> None:
        """Refuses a change, as training cannot continue with it; training goes on as before."""
