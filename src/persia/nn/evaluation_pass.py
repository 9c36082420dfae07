"""Passes that only read: rows are looked up for evaluation and prediction, and nothing changes."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator

from persia.batching.batch import Batch
from persia.errors import DataError
from persia.nn.coverage import IdSample, warn_of_unknown_ids
from persia.nn.inline_pass import InlinePass
from persia.nn.pass_threads import PassThreads
from persia.nn.prepared import PreparedBatch
from persia.nn.reading_thread import ReadingThread
from persia.nn.row_access import RowAccess
from persia.nn.transfer import Transfer
from persia.schema import Schema
from persia.services import Connection
from persia.types import RegisteredBatch

__all__ = ["EvaluationPass", "EvaluationReader"]

READY = 4
"""Number of batches to look up ahead, as no mode sets it."""


class EvaluationReader:
    """Looks batches up and changes nothing: no row is admitted or touched, and no gate applies.

    Args:
        schema: of the batches.
        connection: has the embedding workers.
        transfer: brings rows to the device.
        timeout: seconds that a batch may take.
        rows: access to rows, to check at the end of a pass whether ids have rows; None for no check.
        ahead: whether lookups are always worth hiding, as they wait for something, or the network is on a device.
    """

    def __init__(
        self,
        schema: Schema,
        connection: Connection,
        transfer: Transfer,
        timeout: float,
        rows: RowAccess | None,
        *,
        ahead: bool,
    ) -> None:
        self.schema = schema
        self.rows = rows
        self.timeout = timeout
        self.transfer = transfer
        self._ahead = ahead
        self._worker, self._pools = connection.worker, connection.pools

    @property
    def ahead(self) -> bool:
        """Whether to look up in a thread. On two cores it would only be in the network's way."""
        return self._ahead or len(os.sched_getaffinity(0)) > 2

    def batches(self, source: Iterator[Batch | RegisteredBatch]) -> Generator[PreparedBatch, None, None]:
        """Yields batches with rows, looked up ahead where cores are spare. At the end warns of features without any."""
        return EvaluationPass(self).batches(source)

    def now(self, batch: Batch) -> tuple[PreparedBatch, Callable[[], None]]:
        """Returns a batch with rows, and the function that makes it ready. Blocks."""
        return self.look_up(self.validated(batch))

    def validated(self, batch: Batch | RegisteredBatch) -> Batch:
        """Returns a batch that fits the schema.

        Raises:
            DataError: it does not.
        """
        if isinstance(batch, RegisteredBatch):
            raise DataError("Batches of data loaders are for training; give evaluation a reader or a list.")
        batch.validate(self.schema, require_labels=False)
        return batch

    def look_up(self, batch: Batch) -> tuple[PreparedBatch, Callable[[], None]]:
        """Looks up a valid batch."""
        return self.transfer.rows(batch, self._worker.evaluate(batch.id_features, self._pools))


class EvaluationPass:
    """A pass that only reads, in the order of its methods; see `PassSteps`.

    Args:
        reader: looks batches up.
    """

    def __init__(self, reader: EvaluationReader) -> None:
        self._reader = reader
        self._sample = IdSample()
        self._closed = False

    def begin_lookups(self) -> None:
        """Prepares the thread that looks up."""
        self._reader.transfer.begin_beside_network()

    def register(self, batch: Batch | RegisteredBatch) -> Batch:
        """Checks a batch. Nothing is registered, as no gradient follows."""
        return self._reader.validated(batch)

    def may_look_up(self) -> bool:
        """Returns whether the pass is open. No mode bounds how far lookups run ahead."""
        return not self._closed

    def look_up(self, batch: Batch) -> tuple[PreparedBatch, Callable[[], None]]:
        """Looks up a batch."""
        if self._reader.rows is not None:
            self._sample.add(batch.id_features)
        return self._reader.look_up(batch)

    def drawn(self, lead: float, *, inline: bool) -> None:
        """No-op: there is no depth to adapt."""

    def close(self) -> None:
        """Ends the lookups."""
        self._closed = True

    def batches(self, source: Iterator[Batch | RegisteredBatch]) -> Generator[PreparedBatch, None, None]:
        """Yields the batches; see `EvaluationReader.batches`."""
        reader, reading = self._reader, ReadingThread(source)
        runner: PassThreads | InlinePass
        if reader.ahead:
            runner = PassThreads(self, reading, reader.timeout, READY)
            runner.start()
        else:
            runner = InlinePass(self, reading, reader.timeout)
        try:
            while True:
                try:
                    batch = runner.draw()
                except StopIteration:
                    break
                yield batch
        finally:
            reading.stop()
            try:
                runner.close()
            finally:
                reading.join()
        if reader.rows is not None:
            warn_of_unknown_ids(self._sample, reader.rows, reader.schema)
