"""Batches from several data loaders (Persia paper, section 4.1, step 2; docs/reference/protocol.md, sections 4, 8)."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterator

from persia.membership.directory import Directory, Roster
from persia.rpc.fan_out import call_all
from persia.services import DataLoader
from persia.types import Delivery, Feed, RegisteredBatch

__all__ = ["DataLoaders", "registered_batches"]


def registered_batches(
    loader: DataLoader, epoch: int, start: int, rank: int, nn_workers: int
) -> Iterator[RegisteredBatch]:
    """Yields the batches of an NN worker: `start + rank`, and every `nn_workers`-th batch after it.

    Args:
        loader: the data loaders, after `begin`.
        epoch: number of the pass.
        start: number of the batch at which all NN workers began the pass.
        rank: rank of this NN worker.
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
        timeout: deadline of a call in seconds, including retries.
        ahead: number of batches to prefetch for each NN worker, set in the feed by `begin`.
    """

    def __init__(self, directory: Directory[DataLoader], timeout: float = 600.0, ahead: int = 4) -> None:
        self.directory = directory
        self._timeout = timeout
        self._ahead = ahead

    def begin(self, feed: Feed) -> None:
        """Gives each data loader its share of the feed: number `loader` of `loaders`, in the order of ranks."""
        loaders = self.directory.roster().alive()
        feeds = [feed._replace(loader=n, loaders=len(loaders), ahead=self._ahead) for n in range(len(loaders))]
        call_all([functools.partial(m.service.begin, share) for m, share in zip(loaders, feeds, strict=True)])

    def take(self, rank: int, epoch: int, number: int) -> Delivery:
        """Returns batch `number` from the data loader that reads it in the newest membership."""
        operation = f"take of batch {number}"

        def take(roster: Roster[DataLoader]) -> Delivery:
            if not (loaders := roster.alive()):
                raise self.directory.absent(self._timeout, operation)
            return loaders[number % len(loaders)].service.take(rank, epoch, number)

        return self.directory.call(take, self._timeout)

    def end(self) -> None:
        """Ends reading in all data loaders."""
        self.directory.call_all(lambda loader: loader.end)

    def statistics(self) -> dict[str, int]:
        """Returns the counters, summed over all data loaders."""
        total: Counter[str] = Counter()
        for counts in self.directory.call_all(lambda loader: loader.statistics):
            total.update(counts)
        return dict(total)
