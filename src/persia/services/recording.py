"""Recording of a schedule for a replay (docs/reference/protocol.md, section 12). Served along with the roles.

Used only if `TrainerOptions.record_dir` is set.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from persia.types import JournalRecord, LookedUp, Packed, PhaseRecord, ReadRecord

__all__ = ["ReadObserver", "Recordable", "RecordableRows", "RecordableTokens", "RecordableWorker"]


class Recordable(Protocol):
    """A dense PS or embedding PS that can record the order of pushes. Call it while the PS is quiescent."""

    def begin_recording(self, version: int) -> None:
        """Starts a journal, and discards any earlier one.

        Args:
            version: number of updates since step 0.
        """

    def end_recording(self) -> JournalRecord:
        """Ends the journal and returns its record, which is empty if the PS has restarted in the meantime."""


class RecordableRows(Recordable, Protocol):
    """An embedding PS that can record the order of lookups and updates, which are mutually exclusive meanwhile."""

    def recorded_lookup(self, ids: Packed[np.uint64], batch_id: int, map_version: int = 0) -> Packed[np.float32]:
        """Looks up rows for training like `EmbeddingPS.lookup`, and records the version that the batch reads."""


class RecordableWorker(Protocol):
    """An embedding worker whose lookups can be recorded."""

    def recorded_lookup(self, batch_id: int) -> LookedUp:
        """Looks up a batch for training like `EmbeddingWorker.lookup`, with `RecordableRows.recorded_lookup`."""


class RecordableTokens(Protocol):
    """A token scheduler that can record arrivals, and collects the reads of all NN workers."""

    def begin_recording(self) -> None:
        """Starts a record, and discards any earlier one."""

    def note(self, read: ReadRecord) -> None:
        """Records the inputs of a gradient; call it before the push, as the NN worker may die in between."""

    def end_recording(self) -> PhaseRecord:
        """Ends the record and returns it; it is empty if the coordinator has restarted in the meantime."""


class ReadObserver(Protocol):
    """Observes an NN worker's lookups and the inputs of its gradients; attached while a schedule is recorded."""

    def lookup(self, batch_id: int) -> LookedUp:
        """Looks up a registered batch for training."""

    def note(self, read: ReadRecord) -> None:
        """Receives the inputs of a gradient before its push."""
