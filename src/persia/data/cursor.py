"""The position of a data loader in its source: reads batches by their number."""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterable, Iterator
from typing import Any

from persia.batching.batch import Batch
from persia.batching.items import not_a_batch
from persia.errors import DataError, PersiaError
from persia.schema import Schema
from persia.services import Seekable, Sharded
from persia.types import Feed

__all__ = ["Cursor"]

NEAR = 64
"""Number of batches up to which skipping reads and drops them instead of reopening the source."""


_END = object()


class Cursor:
    """Reads batches by their number in the source. Not thread-safe.

    Args:
        source: source of batches. `Sharded` and `Seekable` sources are reopened to seek; others are read in order.
        schema: schema that every batch must match.
    """

    def __init__(self, source: Iterable[Batch] | Seekable, schema: Schema) -> None:
        self._source = source
        self._schema = schema
        self._iterator: Iterator[Any] | None = None
        self._broken: Exception | None = None
        self._share: tuple[tuple[int, ...], int, int] | None = None
        """(epoch, loader, loaders) of the iterator, which yields the numbers `self._next`, `+ self._stride`, ..."""
        self._next = 0
        self._stride = 1

    def check(self, feed: Feed) -> None:
        """Raises DataError if the source does not support the feed."""
        if not isinstance(self._source, Seekable) and feed.loaders > 1:
            raise DataError(
                f"{feed.loaders} data loaders cannot share a {type(self._source).__name__}, which cannot start in the "
                "middle; use one data loader, or a source with `batches(epoch, start)`.",
                loaders=feed.loaders,
            )

    def read(self, feed: Feed, number: int) -> Batch | None:
        """Reads and checks a batch of the pass; returns None after the last one. Blocks for the source.

        Raises:
            DataError: the batch cannot be read or does not match the schema, or the source cannot seek back to it.
                The next read reopens a `Seekable` source.
        """
        if self._broken is not None and self._share is not None and self._share[0] == feed.reading:
            raise copy.copy(self._broken)
        try:
            return self._read(feed, number)
        except Exception as error:
            self.close()
            reported: Exception = error
            if isinstance(error, DataError):
                message = f"Batch {number} of pass {feed.epoch}: {error.message}"
                reported = DataError(message, **{**error.fields, "number": number, "epoch": feed.epoch})
            elif not isinstance(error, PersiaError):
                reported = DataError(
                    f"Batch {number} of pass {feed.epoch} cannot be read: the source "
                    f"({type(self._source).__name__}) raised {type(error).__name__}: {error}.",
                    number=number,
                    epoch=feed.epoch,
                )
            # A generator that has raised looks exhausted afterwards, so keep the error.
            self._broken = None if isinstance(self._source, Seekable) else reported
            raise reported from error

    def rewind(self) -> None:
        """Starts a new pass with the next read. Iterates again over a source that cannot seek."""
        self.close()
        self._share = None

    def close(self) -> None:
        """Closes the iterator and its files."""
        if isinstance(self._iterator, Generator):
            self._iterator.close()
        self._iterator = None

    def _read(self, feed: Feed, number: int) -> Batch | None:
        self._seek(feed, number)
        assert self._iterator is not None
        while True:
            batch, at = next(self._iterator, _END), self._next
            if batch is _END:
                return None
            self._next += self._stride
            if at == number:
                break
        if not isinstance(batch, Batch):
            raise not_a_batch(batch)
        batch.validate(self._schema)
        return batch

    def _seek(self, feed: Feed, number: int) -> None:
        share = (feed.reading, feed.loader, feed.loaders)
        source = self._source
        if not isinstance(source, Seekable):
            if self._share is None or self._share[0] != feed.reading:
                self.close()
                self._iterator, self._share, self._next, self._stride = iter(source), share, 0, 1
                self._broken = None
            elif number < self._next:
                raise DataError(
                    f"cannot rewind to it: the source ({type(source).__name__}) is a one-shot iterator at batch "
                    f"{self._next}; use a source with `batches(epoch, start)`."
                )
            return
        if self._iterator is not None and self._share == share and 0 <= number - self._next <= NEAR * feed.loaders:
            return
        self.close()
        if feed.loaders > 1 and isinstance(source, Sharded):
            part = source.shard(feed.loader, feed.loaders)
            self._iterator, self._stride = part.batches(feed.epoch, number // feed.loaders), feed.loaders
        else:
            self._iterator, self._stride = source.batches(feed.epoch, number), 1
        self._share, self._next = share, number
