"""Records arrivals at the token scheduler, and reads of NN workers, for a replay."""

from __future__ import annotations

from persia.types import PhaseRecord, ReadRecord

__all__ = ["RecordedArrivals"]


class RecordedArrivals:
    """The recording side of a token scheduler; see `persia.services.RecordableTokens`."""

    record: PhaseRecord | None = None
    """Record of the arrivals; None unless a schedule is being recorded."""

    _ended = PhaseRecord([], [])

    def begin_recording(self) -> None:
        """Starts a record, and drops any earlier one."""
        self.record = PhaseRecord([], [])

    def note(self, read: ReadRecord) -> None:
        """Records the inputs of a gradient."""
        if (record := self.record) is not None:
            record.reads.append(read)

    def end_recording(self) -> PhaseRecord:
        """Ends and returns the record. A repeated call returns the same one."""
        if self.record is not None:
            self._ended, self.record = self.record, None
        return self._ended
