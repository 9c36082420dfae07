"""Timelines: the order of events in a run, simulated or recorded. With the data it determines the parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from persia.errors import DataError, PersiaError
from persia.modes import Dense, Mode, StepTime
from persia.types import BucketMap
from persia.types.decoding import decode_hook

__all__ = ["DENSE", "ROWS", "Kind", "ScheduleEvent", "Summary", "Timeline", "load_timeline"]

ROWS = "ps"
DENSE = "dense"
"""Names of servers begin with one of these: "ps-0" owns rows, "dense-1" dense parameters."""

Kind: TypeAlias = Literal["lookup", "pull", "push", "drop", "apply", "lost"]


class ScheduleEvent(msgspec.Struct, frozen=True, array_like=True):
    """An event at one server. Events of a server are in the order in which they took effect.

    Attributes:
        time: seconds since the start.
        kind: "lookup" and "pull": an NN worker reads the rows of a batch, or the dense parameters. "push": the gradient
            of a batch arrives. "drop": the gradient arrives and is dropped. "apply": all gradients since the last
            "apply" are applied, after the last of their pushes. "lost": the batch will have no gradient.
        server: name of the server, such as "ps-0" or "dense-0".
        worker: rank of the NN worker; for "apply" the rank of the last push.
        batch: number of the batch in the source; for "apply" the batch of the last push.
        token: token of the gradient.
        version: k of the server before the event.
        rows: rows of the batch; 0 for a push without data.
        empty: whether a push has no gradient at this server, so that its rows count only in the divisor: it was lost,
            its decay is 0, or the batch has no id there.
    """

    time: float
    kind: Kind
    server: str
    worker: int
    batch: int
    token: int
    version: int
    rows: int = 0
    empty: bool = False


class Summary(msgspec.Struct, frozen=True):
    """Totals of a timeline: the columns of the GBA paper's Tables 5.2 and 5.3.

    Attributes:
        seconds: time from start to end.
        applied_rows: rows of batches whose dense gradient was applied with decay 1.
        batches: number of batches that were looked up.
        dropped: number of batches whose gradient came after its step (HopBw).
        decayed: number of batches whose dense gradient had decay 0 (Gba).
        lost: number of batches that never had a gradient.
        staleness_mean: mean number of steps of the dense parameters between pull and apply, over applied gradients.
        staleness_max: maximum of this number.
        row_staleness_mean: mean number of steps of an embedding PS between lookup and apply.
        row_staleness_max: maximum of this number.
        rates: applied rows per second, by NN worker.
    """

    seconds: float
    applied_rows: int
    batches: int
    dropped: int
    decayed: int
    lost: int
    staleness_mean: float
    staleness_max: int
    row_staleness_mean: float
    row_staleness_max: int
    rates: tuple[float, ...] = ()

    @property
    def rate(self) -> float:
        """Applied rows per second."""
        return self.applied_rows / self.seconds if self.seconds else 0.0


class Timeline(msgspec.Struct, frozen=True):
    """The events of a run in one mode.

    A file has this record without its events in the first line, then one event per line (JSON).

    Attributes:
        mode: mode of the run.
        nn_workers: number of NN workers.
        local_batch: rows of a full batch.
        group: number of gradients of a step: `mode.group`.
        events: events in order of time.
        step: k at the start.
        start: time of the start in seconds.
        buckets: the embedding PS of each bucket of ids; None for `BucketMap.even`.
    """

    mode: Mode
    nn_workers: int
    local_batch: int
    group: int
    events: list[ScheduleEvent]
    step: int = 0
    start: float = 0.0
    buckets: BucketMap | None = None

    def save(self, path: str | Path) -> None:
        """Writes the file."""
        head = msgspec.structs.replace(self, events=[])
        with Path(path).open("wb") as file:
            for line in (head, *self.events):
                file.write(msgspec.json.encode(line) + b"\n")

    @property
    def servers(self) -> list[str]:
        """Names of all servers, sorted."""
        return sorted({event.server for event in self.events})

    @property
    def end(self) -> float:
        """Time of the last event in seconds."""
        return self.events[-1].time if self.events else self.start

    @property
    def end_step(self) -> int:
        """Final k of the dense parameters."""
        steps = [event.version + 1 for event in self.events if event.kind == "apply" and event.server[:5] == DENSE]
        return max(steps, default=self.step)

    def summary(self) -> Summary:
        """Returns the totals, as seen by the first dense PS and the first embedding PS."""
        names = self.servers
        dense = next(name for name in names if name.startswith(DENSE))
        rows = next(name for name in names if name.startswith(ROWS))
        arrived = [e for e in self.events if e.server == dense and e.kind == "push"]
        decayed = sum(self.mode.decay(e.version, e.token) == 0 for e in arrived)
        ages, row_ages = self._ages(dense, "pull"), self._ages(rows, "lookup")
        applied = [0] * self.nn_workers
        for event in arrived:
            if not event.empty and self.mode.decay(event.version, event.token) > 0:
                applied[event.worker] += event.rows
        seconds = self.end - self.start
        return Summary(
            seconds=seconds,
            applied_rows=sum(applied),
            batches=sum(e.server == rows and e.kind == "lookup" for e in self.events),
            dropped=sum(e.server == dense and e.kind == "drop" for e in self.events),
            decayed=decayed,
            lost=sum(e.server == dense and e.kind == "lost" for e in self.events),
            staleness_mean=sum(ages) / max(1, len(ages)),
            staleness_max=max(ages, default=0),
            row_staleness_mean=sum(row_ages) / max(1, len(row_ages)),
            row_staleness_max=max(row_ages, default=0),
            rates=tuple(count / seconds if seconds else 0.0 for count in applied),
        )

    def _ages(self, server: str, read: Kind) -> list[int]:
        """Returns the number of steps between read and apply of each gradient with a weight."""
        versions: dict[int, int] = {}
        ages = []
        for event in self.events:
            if event.server != server:
                continue
            if event.kind == read:
                versions[event.batch] = event.version
            elif event.kind == "push" and not event.empty and self.mode.decay(event.version, event.token) > 0:
                ages.append(event.version - versions[event.batch])
        return ages

    def step_times(self) -> list[StepTime]:
        """Returns the compute time of each batch, in order of completion: the input of `persia.modes.Auto`."""
        starts: dict[int, float] = {}
        times = []
        for event in self.events:
            if not event.server.startswith(DENSE):
                continue
            if event.kind == "pull":
                starts[event.batch] = event.time
            elif event.kind in ("push", "drop"):
                times.append(StepTime(event.worker, starts[event.batch], event.time - starts[event.batch]))
        return times

    @property
    def by_rows(self) -> bool:
        """Whether gradients are weighted by the rows of their batch, as among replicas but not at a dense PS."""
        return self.mode.dense() is Dense.ALL_REDUCE


def load_timeline(path: str | Path) -> Timeline:
    """Reads a file that `Timeline.save` wrote, or that a run recorded.

    Raises:
        DataError: the file cannot be read; the error has path and line.
    """
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise DataError(f"The schedule {path} cannot be read: {error.strerror}.", path=str(path)) from error
    head: Timeline | None = None
    events: list[ScheduleEvent] = []
    for number, line in enumerate(lines, 1):
        try:
            if head is None:
                head = msgspec.json.decode(line, type=Timeline, dec_hook=decode_hook)
            else:
                events.append(msgspec.json.decode(line, type=ScheduleEvent))
        except (msgspec.MsgspecError, PersiaError) as error:
            raise DataError(f"{path}:{number}: not a schedule: {error}.", path=str(path), line=number) from error
    if head is None:
        raise DataError(f"{path}: the schedule is empty.", path=str(path))
    return msgspec.structs.replace(head, events=events)
