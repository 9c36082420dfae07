"""Read-only lookups, for evaluation."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator

from persia.batching.batch import Batch
from persia.errors import DataError
from persia.nn.coverage import IdSample, warn_of_unknown_ids
from persia.nn.inline import Inline
from persia.nn.pipeline import Pipeline, Stages
from persia.nn.prepared import PreparedBatch
from persia.nn.reading_thread import ReadingThread
from persia.nn.row_access import RowAccess
from persia.nn.transfer import Transfer
from persia.schema import Schema
from persia.services import EmbeddingWorker
from persia.types import FedBatch

__all__ = ["EvaluationReader"]

READY = 4
"""Number of batches to look up ahead, as no mode sets it."""


class EvaluationReader:
    """Looks batches up and changes nothing: no row is admitted or touched, and no gate applies.

    Args:
        schema: of the batches.
        worker: the embedding workers.
        transfer: brings rows to the device.
        timeout: seconds that a batch may take.
        rows: access to rows, to check at the end of a pass whether ids have rows; None for no check.
        ahead: whether lookups are always worth hiding, as they wait for something, or the network is on a device.
    """

    def __init__(
        self,
        schema: Schema,
        worker: EmbeddingWorker,
        transfer: Transfer,
        timeout: float,
        rows: RowAccess | None,
        *,
        ahead: bool,
    ) -> None:
        self._ahead = ahead
        self._schema = schema
        self._worker = worker
        self._transfer = transfer
        self._timeout = timeout
        self._rows = rows

    def batches(self, source: Iterator[Batch | FedBatch]) -> Generator[PreparedBatch, None, None]:
        """Yields batches with rows, looked up ahead where cores are spare. At the end warns of features without any."""
        stopped = False
        sample = IdSample()

        def stop() -> None:
            nonlocal stopped
            stopped = True

        def look_up(batch: Batch) -> tuple[PreparedBatch, Callable[[], None]]:
            if self._rows is not None:
                sample.add(batch.id_features)
            return self._look_up(batch)

        stages = Stages(
            self._validated, lambda: not stopped, look_up, lambda _: None, stop, self._transfer.begin_beside_network
        )
        # On two cores threads that look up would only be in the network's way.
        ahead = self._ahead or len(os.sched_getaffinity(0)) > 2
        reading = ReadingThread(source)
        part: Pipeline | Inline = (
            Pipeline(reading, stages, self._timeout, READY) if ahead else Inline(reading, stages, self._timeout)
        )
        try:
            while True:
                try:
                    batch = part.draw()
                except StopIteration:
                    break
                yield batch
        finally:
            reading.stop()
            try:
                part.close()
            finally:
                reading.join()
        if self._rows is not None:
            warn_of_unknown_ids(sample, self._rows, self._schema)

    def now(self, batch: Batch) -> tuple[PreparedBatch, Callable[[], None]]:
        """Returns a batch with rows, and the function that makes it ready. Blocks."""
        return self._look_up(self._validated(batch))

    def _validated(self, batch: Batch | FedBatch) -> Batch:
        if isinstance(batch, FedBatch):
            raise DataError("Batches of data loaders are for training; give evaluation a reader or a list.")
        batch.validate(self._schema, require_labels=False)
        return batch

    def _look_up(self, batch: Batch) -> tuple[PreparedBatch, Callable[[], None]]:
        return self._transfer.rows(batch, self._worker.evaluate(batch.id_features))
