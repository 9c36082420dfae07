"""Determines the partitions of topics, and the offsets between which a stream reads them."""

from __future__ import annotations

from datetime import datetime

from persia.data.streams.broker import Broker
from persia.data.streams.options import KafkaOptions
from persia.services import StreamLog
from persia.types import Partition, PartitionBounds

__all__ = ["partition_bounds"]


def partition_bounds(
    broker: Broker, options: KafkaOptions, log: StreamLog
) -> tuple[list[PartitionBounds], dict[Partition, tuple[int, int]]]:
    """Adds the partitions of all topics to a record, in which known ones keep their bounds. Blocks.

    Args:
        broker: connection to the brokers.
        options: arguments of `kafka`.
        log: the record.

    Returns:
        The bounds of all partitions of the record, and by partition of the topics, the first available offset and the
        offset of the next message to be written.

    Raises:
        DataError: a topic cannot be read, or lacks a partition of the record.
        DeadlineError: no broker answered in time.
        Stopped: asked to stop.
    """
    partitions, start, until = broker.partitions(), options.start, options.until
    marks = {partition: broker.watermarks(partition) for partition in partitions}
    begins = {partition: low for partition, (low, _) in marks.items()}
    ends = {partition: high for partition, (_, high) in marks.items()}
    known = {bounds.partition: bounds for bounds in log.assign([])}
    positions = log.stream_offsets(None)
    for topic in options.broker.topics:
        for number, offset in positions.get(topic, {}).items():
            if Partition(topic, number) not in marks:
                raise broker.deleted(Partition(topic, number), offset)
    # A partition that a known topic lacks was added since, and begins with its first message.
    if new := [p for p in partitions if p not in known and p.topic not in positions]:
        if isinstance(start, datetime):
            begins |= broker.offsets_at(new, _milliseconds(start))
        elif start == "latest":
            begins |= {partition: ends[partition] for partition in new}
    lasts: dict[Partition, int] = {}
    if until is not None and not known:
        lasts = broker.offsets_at(partitions, _milliseconds(until)) if isinstance(until, datetime) else ends
    elif until is not None:  # Partitions that were added since are not part of a bounded stream.
        partitions = [partition for partition in partitions if partition in known]
    bounds = log.assign([PartitionBounds(p, begins[p], lasts.get(p)) for p in partitions if p not in known])
    return bounds, marks


def _milliseconds(time: datetime) -> int:
    return int(time.timestamp() * 1000)
