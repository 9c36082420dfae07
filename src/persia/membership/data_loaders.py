"""Batches from several data loaders (Persia paper, section 4.1, step 2; docs/reference/protocol.md, sections 4, 8)."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator

from persia.membership.directory import UNREACHABLE, Directory, Roster
from persia.services import DataLoader
from persia.types import Delivery, FedBatch, Feed

__all__ = ["DataLoaders", "fed_batches"]


def fed_batches(loader: DataLoader, epoch: int, start: int, rank: int, nn_workers: int) -> Iterator[FedBatch]:
    """Yields the batches of an NN worker: `start + rank`, and every `nn_workers`-th from there to the end of the pass.

    Args:
        loader: the data loaders, after `begin`.
        epoch: number of the pass.
        start: batch at which all NN workers began in the pass.
        rank: of this NN worker.
        nn_workers: number of NN workers.
    """
    for number in itertools.count(start + rank, nn_workers):
        delivery = loader.take(rank, epoch, number)
        if delivery.batch is None:
            return
        yield delivery.batch


class DataLoaders:
    """The data loaders as one `DataLoader`, which routes calls by batch number.

    Args:
        directory: the data loaders.
        timeout: deadline of a call in seconds, retries included.
        ahead: batches to keep ready for each NN worker; `begin` fills it in.
    """

    def __init__(self, directory: Directory[DataLoader], timeout: float = 600.0, ahead: int = 4) -> None:
        self._directory = directory
        self._timeout = timeout
        self._ahead = ahead

    def begin(self, feed: Feed) -> None:
        """Gives each its share: number `loader` of `loaders`, in the order of their ranks."""
        loaders = self._directory.roster().alive()
        for number, loader in enumerate(loaders):
            loader.begin(feed._replace(loader=number, loaders=len(loaders), ahead=self._ahead))

    def take(self, rank: int, epoch: int, number: int) -> Delivery:
        """Returns batch `number` from the data loader that reads it, as of the newest membership."""
        operation = f"take of batch {number}"

        def take(roster: Roster[DataLoader]) -> Delivery:
            if not (loaders := roster.alive()):
                raise self._directory.absent(self._timeout, operation)
            return loaders[number % len(loaders)].take(rank, epoch, number)

        return self._directory.call(take, self._timeout, operation)

    def end(self) -> None:
        """Ends the reading of all."""
        for loader in self._directory.roster().serving():
            with contextlib.suppress(*UNREACHABLE):
                loader.end()

    def statistics(self) -> dict[str, int]:
        """Returns the counters, summed."""
        total: Counter[str] = Counter()
        for loader in self._directory.roster().serving():
            with contextlib.suppress(*UNREACHABLE):
                total.update(loader.statistics())
        return dict(total)
