"""Batches in transit through an NN worker: to their lookup, and back as gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from persia.batching.batch import Batch
from persia.nn.prepared import PreparedBatch
from persia.nn.transfer import Encoded
from persia.types import FedBatch, ReadRecord

__all__ = ["Pending", "Registered"]


class Pending(NamedTuple):
    """Gradients of a batch in transit to the host."""

    batch_id: int
    rows: int
    gradients: Callable[[], Encoded]
    batch: PreparedBatch

    def read(self, rank: int, sequence: int, dense: list[int]) -> ReadRecord:
        """Returns a record of the inputs of the gradient.

        Args:
            rank: of this NN worker.
            sequence: of its push.
            dense: versions of the dense parameters.
        """
        return ReadRecord(rank, sequence, self.batch.number, self.rows, self.batch_id, dense)


class Registered(NamedTuple):
    """A registered batch before its lookup.

    Attributes:
        batch: as read.
        batch_id: at the embedding worker.
        number: of the pass, in asynchronous modes.
    """

    batch: Batch | FedBatch
    batch_id: int
    number: int = -1
