"""The events of topics of Kafka, with keys and times, for `join`."""

from __future__ import annotations

import numpy as np

from persia.data.events import KeyedEvents, NewEvents, Progress
from persia.data.kafka_share import KafkaShare
from persia.data.stream_rows import NO_TIME, Converted
from persia.errors import DataError
from persia.streams import OffsetLog
from persia.types import OffsetRange, PartitionBounds

__all__ = ["KafkaEvents"]


class KafkaEvents:
    """Implements `persia.data.events.EventShare`. For one thread.

    Args:
        share: reads all partitions.
        log: its record, which is needed for one batch only: the join has a record of its own.
    """

    def __init__(self, share: KafkaShare, log: OffsetLog) -> None:
        self._share = share
        self._log = log

    def read(self, found: OffsetRange) -> KeyedEvents:
        """Reads events again; see `EventShare`."""
        self._share.read(found)
        return _events(found, self._share.last)

    def poll(self) -> NewEvents | None:
        """Reads on; see `EventShare`."""
        new = self._share.poll()
        if new is None:
            return None
        self._log.covered(new.number + 1)
        return NewEvents(new.range, _events(new.range, self._share.last))

    def positions(self) -> list[PartitionBounds]:
        """Returns where each partition will be read on."""
        return self._share.positions()

    def progress(self) -> Progress:
        """Returns how far the partitions are read."""
        return self._share.progress()

    def close(self) -> None:
        """Closes the connection."""
        self._share.close()


def _events(found: OffsetRange, converted: Converted) -> KeyedEvents:
    """Returns the events of messages.

    Raises:
        DataError: one has no time, or several keys.
    """
    batch, times, ids = converted.batch, converted.times, converted.keys
    assert batch is not None
    assert times is not None
    assert ids is not None
    topic, number = found.partition
    where = f"Offsets {found.begin} to {found.end} of partition {number} of topic {topic!r}"
    if (times == NO_TIME).any():
        raise DataError(f"{where}: a row has no event time, without which it cannot be joined.", topic=topic)
    if ids.offsets is None:
        return KeyedEvents(ids.values, times, batch)
    counts = np.diff(ids.offsets)
    if len(counts) and counts.max() > 1:
        raise DataError(f"{where}: a row has several keys; join on a column with one.", topic=topic)
    keys = np.zeros(len(times), np.uint64)
    keys[counts == 1] = ids.values
    return KeyedEvents(keys, times, batch, counts == 1)
