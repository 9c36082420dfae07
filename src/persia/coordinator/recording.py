"""Arrivals at the token scheduler, and reads of NN workers, kept while a schedule is recorded for a replay."""

from __future__ import annotations

from persia.types import PhaseRecord, ReadRecord

__all__ = ["RecordedArrivals"]


class RecordedArrivals:
    """The recording side of a token scheduler; see `persia.services.RecordableTokens`."""

    record: PhaseRecord | None = None
    """The hook of a recording, which gets each arrival; None unless a schedule is recorded."""

    _ended = PhaseRecord([], [])

    def begin_recording(self) -> None:
        """Starts a record, and drops any earlier one."""
        self.record = PhaseRecord([], [])

    def note(self, read: ReadRecord) -> None:
        """Records the inputs of a gradient."""
        if (record := self.record) is not None:
            record.reads.append(read)

    def end_recording(self) -> PhaseRecord:
        """Ends the record, and returns it. A repetition returns the same one."""
        if self.record is not None:
            self._ended, self.record = self.record, None
        return self._ended
