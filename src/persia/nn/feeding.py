"""Batches that come from data loaders (Persia paper, section 4.1, step 2: the input buffer of an NN worker)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from persia.services import DataLoader
from persia.types import FedBatch

__all__ = ["fed_batches"]


def fed_batches(loader: DataLoader, epoch: int, start: int, rank: int, nn_workers: int) -> Iterator[FedBatch]:
    """The batches of an NN worker: `start + rank`, and every `nn_workers`-th from there, to the end of the pass.

    Args:
        loader: the data loaders, which have been told to begin.
        epoch: number of the pass.
        start: where all NN workers began in the pass.
        rank: of this NN worker.
        nn_workers: how many there are.
    """
    for number in itertools.count(start + rank, nn_workers):
        delivery = loader.take(rank, epoch, number)
        if delivery.batch is None:
            return
        yield delivery.batch
