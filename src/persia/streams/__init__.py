"""The record of a stream's batches, used where the stream is read in one process, and by the coordinator of many."""

from persia.streams.offset_log import OffsetLog

__all__ = ["OffsetLog"]
