"""The timeline of a real run, made from the records of its roles: reads, arrivals, and pushes in their order."""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from persia.errors import ConfigError, DataError
from persia.modes import Dense, Mode
from persia.replay.schedule import DENSE, ROWS, Kind, ScheduleEvent, Timeline
from persia.schema import Days, Schema
from persia.types import ArrivalRecord as Arrival
from persia.types import BucketMap, JournalRecord, PushHeader, ReadRecord

__all__ = ["Records", "check_replayable", "recorded"]


def check_replayable(schema: Schema) -> None:
    """Raises ConfigError if a replay of training with these tables could not tell when rows expire."""
    for table in schema.resolved_tables().values():
        if isinstance(table.ttl, Days):
            raise ConfigError(
                f"Invalid Table({table.name!r}).ttl = {table.ttl!r} in a run that is recorded, replayed or trained in "
                "virtual time, which knows steps but no days; expected Steps(...) or None.",
                field=f"Table({table.name!r}).ttl",
            )


class Records(NamedTuple):
    """Records of a phase.

    Attributes:
        reads: inputs of the gradients of all NN workers, dropped ones included.
        arrivals: records of the token scheduler; empty in modes with all-reduce.
        rows: journals of the embedding PSs, by rank.
        dense: journals of the dense PSs, by rank; empty in modes with all-reduce.
        buckets: the embedding PS of each bucket of ids; None for the first map.
    """

    reads: Sequence[ReadRecord]
    arrivals: Sequence[Arrival]
    rows: Sequence[JournalRecord]
    dense: Sequence[JournalRecord]
    buckets: BucketMap | None = None


def recorded(mode: Mode, nn_workers: int, local_batch: int, step: int, records: Records) -> Timeline:
    """Returns the timeline of a phase; the time of an event is its number.

    Args:
        mode: mode of the phase.
        nn_workers: number of NN workers at the start of the phase.
        local_batch: rows of a full batch.
        step: k at the start of the phase.
        records: records of the phase.

    Raises:
        DataError: records are missing because a role restarted during the phase, or they contradict each other.
    """
    group = mode.group(nn_workers, local_batch)
    dense = list(records.dense)
    if mode.dense() is Dense.ALL_REDUCE:  # Replicas apply by step, and within a step by rank.
        order = sorted(records.rows[0].headers, key=lambda header: (header.step, header.rank))
        dense = [JournalRecord(step, order, {}, [])]
    indexed = _IndexedRecords(records, {(read.rank, read.sequence): read for read in records.reads})
    lists = []
    for rank, journal in enumerate(records.rows):
        versions = {read.number: indexed.version(rank, journal, read) for read in records.reads}
        lists.append(indexed.events(f"{ROWS}-{rank}", journal, _together(journal.headers, group), versions))
    for rank, journal in enumerate(dense):
        versions = {read.number: read.dense[rank] for read in records.reads}
        if mode.dense() is Dense.ALL_REDUCE:
            steps = [list(pushes) for _, pushes in itertools.groupby(journal.headers, key=lambda header: header.step)]
        else:
            steps = _together(journal.headers, group)
        lists.append(indexed.events(f"{DENSE}-{rank}", journal, steps, versions))
    return Timeline(mode, nn_workers, local_batch, group, _merged(lists), step, buckets=records.buckets)


def _together(headers: Sequence[PushHeader], group: int) -> list[list[PushHeader]]:
    """Groups pushes that were applied together; the last group may be smaller."""
    return [list(headers[at : at + group]) for at in range(0, len(headers), group)]


class _IndexedRecords(NamedTuple):
    """Records of a phase, with the reads by rank and sequence of their push."""

    records: Records
    by_push: Mapping[tuple[int, int], ReadRecord]

    def events(
        self,
        server: str,
        journal: JournalRecord,
        steps: Sequence[Sequence[PushHeader]],
        versions: Mapping[int, int],
    ) -> list[ScheduleEvent]:
        """Returns the events of one server: at each version first the reads and drops, then pushes and their update."""
        kind: Kind = "pull" if server.startswith(DENSE) else "lookup"
        tokens = {arrival.number: arrival.token for arrival in self.records.arrivals}
        reads: dict[int, list[ScheduleEvent]] = defaultdict(list)
        for read in {read.number: read for read in self.records.reads}.values():
            at = versions[read.number]
            token = tokens.get(read.number, at)
            reads[at].append(ScheduleEvent(0.0, kind, server, read.rank, read.number, token, at, read.rows))
        for a in self.records.arrivals:
            if a.slot < 0:
                reads[a.step].append(ScheduleEvent(0.0, "drop", server, a.rank, a.number, a.token, a.step, a.rows))
        events: list[ScheduleEvent] = []
        empty, places = set(journal.empty), itertools.count()
        for version, headers in enumerate(steps, journal.version):
            events += reads.pop(version, [])
            for header in headers:
                token = header.token if header.slot >= 0 else header.step
                number = self._number(header)
                lost = next(places) in empty
                events.append(
                    ScheduleEvent(0.0, "push", server, header.rank, number, token, version, header.rows, lost)
                )
            events.append(msgspec.structs.replace(events[-1], kind="apply", empty=False))
        for version in sorted(reads):
            events += reads[version]
        return events

    def version(self, rank: int, journal: JournalRecord, read: ReadRecord) -> int:
        """Returns the version of the rows that an embedding PS returned for a batch."""
        version = journal.reads.get(read.batch_id)
        if version is None:
            raise DataError(
                f"Embedding PS {rank} has no record of the lookup of batch {read.number}: it restarted during the "
                "phase, which cannot be replayed.",
                rank=rank,
                batch=read.number,
            )
        return version

    def _number(self, header: PushHeader) -> int:
        read = self.by_push.get((header.rank, header.sequence))
        if read is None and header.rows:
            raise DataError(
                f"No record of the batch of push {header.sequence} of NN worker {header.rank}, which took effect: the "
                "coordinator restarted during the phase, which cannot be replayed.",
                rank=header.rank,
                sequence=header.sequence,
            )
        return -1 if read is None else read.number


def _merged(lists: Sequence[list[ScheduleEvent]]) -> list[ScheduleEvent]:
    """Merges the events of all servers, so that each batch is read on all servers before its gradient is pushed."""
    waiting: dict[int, int] = defaultdict(int)
    for event in itertools.chain.from_iterable(lists):
        waiting[event.batch] += event.kind in ("lookup", "pull")
    queues = [deque(events) for events in lists]
    merged: list[ScheduleEvent] = []
    while any(queues):
        before = len(merged)
        for queue in queues:
            while queue and not (queue[0].kind == "push" and queue[0].rows and waiting[queue[0].batch]):
                event = queue.popleft()
                waiting[event.batch] -= event.kind in ("lookup", "pull")
                merged.append(msgspec.structs.replace(event, time=float(len(merged))))
        if len(merged) == before:
            raise DataError("The records contradict each other: a batch was pushed before it was read.")
    return merged
