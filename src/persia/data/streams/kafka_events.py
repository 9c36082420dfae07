"""The events of topics of Kafka, with keys and times, for `join`."""

from __future__ import annotations

import numpy as np

from persia.data.streams.events import KeyedEvents, NewEvents, Progress
from persia.data.streams.rows import Converted
from persia.data.streams.share import KafkaShare
from persia.streams import OffsetLog
from persia.types import OffsetRange, PartitionBounds

__all__ = ["KafkaEvents"]


class KafkaEvents:
    """Implements `persia.data.streams.events.EventShare`. For one thread.

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
        return _events(self._share.last)

    def poll(self) -> NewEvents | None:
        """Reads on; see `EventShare`."""
        new = self._share.poll()
        if new is None:
            return None
        self._log.covered(new.number + 1)
        return NewEvents(new.range, _events(self._share.last))

    def positions(self) -> list[PartitionBounds]:
        """Returns where each partition will be read on."""
        return self._share.positions()

    def progress(self) -> Progress:
        """Returns how far the partitions are read."""
        return self._share.progress()

    def close(self) -> None:
        """Closes the connection."""
        self._share.close()


def _events(converted: Converted) -> KeyedEvents:
    """Returns the events of messages, each of which has a time and one key at most."""
    batch, times, ids = converted.batch, converted.times, converted.keys
    assert batch is not None
    assert times is not None
    assert ids is not None
    if ids.offsets is None:
        return KeyedEvents(ids.values, times, batch)
    keyed = np.diff(ids.offsets) == 1
    keys = np.zeros(len(times), np.uint64)
    keys[keyed] = ids.values
    return KeyedEvents(keys, times, batch, keyed)
