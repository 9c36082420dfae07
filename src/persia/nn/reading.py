"""Rows that are only read: for evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from persia.batching.batch import Batch
from persia.errors import PersiaError
from persia.nn.pipeline import Pipeline, Stages
from persia.nn.prepared import PreparedBatch
from persia.nn.transfer import Transfer
from persia.schema import Schema
from persia.services import EmbeddingWorker

__all__ = ["Reading"]

READY = 4
"""Batches looked up ahead, where no mode says how many."""


class Reading:
    """Looks batches up and changes nothing: nothing is admitted or touched, and no gate is asked.

    Args:
        schema: of the batches.
        worker: the embedding workers.
        transfer: brings rows to the device.
        timeout: seconds that a batch may take.
    """

    def __init__(self, schema: Schema, worker: EmbeddingWorker, transfer: Transfer, timeout: float) -> None:
        self._schema = schema
        self._worker = worker
        self._transfer = transfer
        self._timeout = timeout

    def batches(self, source: Iterator[object]) -> Iterator[PreparedBatch]:
        """Batches with rows, looked up ahead in background threads."""
        stopped = False

        def stop() -> None:
            nonlocal stopped
            stopped = True

        stages = Stages(self._validated, lambda: not stopped, self._look_up, lambda _: None, stop)
        pipeline = Pipeline(source, stages, self._timeout, ready=READY)
        try:
            while True:
                try:
                    batch = pipeline.draw()
                except StopIteration:
                    return
                yield batch
        finally:
            pipeline.close()

    def now(self, batch: Batch) -> tuple[PreparedBatch, Callable[[], None]]:
        """A batch with rows, and what makes it ready. Blocks."""
        return self._look_up(self._validated(batch))

    def _validated(self, batch: object) -> Batch:
        if not isinstance(batch, Batch):
            raise PersiaError("Evaluation needs whole batches; those of data loaders are for training.")
        batch.validate(self._schema, require_labels=False)
        return batch

    def _look_up(self, batch: Batch) -> tuple[PreparedBatch, Callable[[], None]]:
        return self._transfer.rows(batch, self._worker.evaluate(batch.id_features), None)
