"""The state of a join: impressions whose window is open or ended recently, and the clicks of that time."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from persia.batching.batch import Batch
from persia.data.streams.events import KeyedEvents
from persia.types import BoolArray, Ids, Int64Array

__all__ = ["Emitted", "JoinBuffer"]


class Emitted(NamedTuple):
    """Samples that are complete.

    Attributes:
        batch: rows of the impressions, with the label of the join unset.
        clicked: bool `[batch]`, the label.
        positives: number of impressions with a click in their window.
        corrections: number of samples at the end that are emitted again.
    """

    batch: Batch
    clicked: BoolArray
    positives: int
    corrections: int


class _Table:
    """Arrays of the same length, one row for each event."""

    def __init__(self) -> None:
        self.keys: Ids = np.zeros(0, np.uint64)
        self.times: Int64Array = np.zeros(0, np.int64)
        self.places: NDArray[np.int64] = np.zeros((0, 3), np.int64)
        """Partition, first offset of the messages read together, and running number."""
        self.flags: NDArray[np.bool_] = np.zeros((0, 3), bool)

    def __len__(self) -> int:
        return len(self.keys)

    def append(self, events: KeyedEvents, partition: int, begin: int, following: int, keep: BoolArray) -> None:
        count = int(keep.sum())
        places = np.empty((count, 3), np.int64)
        places[:, 0], places[:, 1] = partition, begin
        places[:, 2] = following + np.flatnonzero(keep)
        flags = np.zeros((count, 3), bool)
        flags[:, KEYED] = True if events.keyed is None else events.keyed[keep]
        self.keys = np.concatenate([self.keys, events.keys[keep]])
        self.times = np.concatenate([self.times, events.times[keep]])
        self.places = np.concatenate([self.places, places])
        self.flags = np.concatenate([self.flags, flags])

    def keep(self, rows: BoolArray) -> None:
        self.keys, self.times = self.keys[rows], self.times[rows]
        self.places, self.flags = self.places[rows], self.flags[rows]

    def begins(self) -> dict[int, int]:
        """Returns the first offset of the retained events, by partition."""
        first_offsets: dict[int, int] = {}
        for partition in np.unique(self.places[:, 0]).tolist():
            first_offsets[partition] = int(self.places[self.places[:, 0] == partition, 1].min())
        return first_offsets


KEYED, MATCHED, EMITTED = 0, 1, 2
"""Columns of flags: the event has a key; the event has a match; the impression was emitted."""


class JoinBuffer:
    """Joins impressions and clicks. The result depends on the events added before each `emit`, not on their order.

    An impression is retained for two windows: it is emitted after the first, and a late click can still match it in the
    second. Clicks are also retained for two windows.

    Args:
        window: milliseconds within which a click follows its impression.
        emitted_before: time of the last `emit` in an earlier run, in milliseconds; None without one.
    """

    def __init__(self, window: int, emitted_before: int | None) -> None:
        self._window = window
        self.time = emitted_before
        """Impressions whose window ended by this time have been emitted; None before the first `emit`."""
        self._impressions = _Table()
        self._rows: list[Batch] = []
        self._clicks = _Table()
        self._unmatched = self._late_count = self._following = 0
        self._late = np.zeros(0, np.int64)
        """Running numbers of emitted impressions that a click has matched since."""

    @property
    def open(self) -> int:
        """Number of impressions that are not emitted."""
        return int((~self._impressions.flags[:, EMITTED]).sum())

    @property
    def clicks(self) -> int:
        """Number of retained clicks."""
        return len(self._clicks)

    def take_unmatched(self) -> int:
        """Returns the number of clicks without an impression that were dropped since the last call."""
        count, self._unmatched = self._unmatched, 0
        return count

    def take_late(self) -> int:
        """Returns the number of emitted negatives that a click has matched since the last call."""
        count, self._late_count = self._late_count, 0
        return count

    def restore(self, impressions: bool, partition: int, begin: int, events: KeyedEvents) -> None:
        """Adds events of an earlier run, whose emitted samples are not emitted again. Call `restored` at the end."""
        keep = np.ones(len(events.times), bool) if self.time is None else self._retained(events.times, self.time)
        self._add(impressions, partition, begin, events, keep)

    def restored(self) -> None:
        """Ends `restore`."""
        if self.time is not None:
            self._impressions.flags[:, EMITTED] = self._impressions.times + self._window <= self.time
        self._match()
        self._late, self._late_count = np.zeros(0, np.int64), 0

    def add(self, impressions: bool, partition: int, begin: int, events: KeyedEvents) -> None:
        """Adds events that were not in an earlier run.

        Args:
            impressions: whether the events are impressions; otherwise they are clicks.
            partition: number of the partition, by which events of the same time are ordered.
            begin: first offset of the messages read together.
            events: the events.
        """
        self._add(impressions, partition, begin, events, np.ones(len(events.times), bool))
        self._match()

    def time_to_emit(self, complete: int, most: int, corrects: bool) -> int | None:
        """Returns the time for `emit` at which about `most` samples are emitted; None if there is nothing to emit.

        Args:
            complete: time before which no more events are expected.
            most: number of samples.
            corrects: see `emit`.
        """
        table = self._impressions
        ends = table.times[~table.flags[:, EMITTED]] + self._window
        if self.time is not None:
            complete = max(complete, self.time)
        due = np.sort(ends[ends <= complete])
        if len(due) > most:
            return int(max(due[most - 1], self.time if self.time is not None else due[most - 1]))
        return complete if len(due) or (corrects and len(self._late)) else None

    def first_end(self, most: int) -> int:
        """Returns the time at which the windows of about `most` open impressions end, complete or not."""
        table = self._impressions
        ends = np.sort(table.times[~table.flags[:, EMITTED]] + self._window)
        time = int(ends[min(most, len(ends)) - 1])
        return time if self.time is None else max(time, self.time)

    def emit(self, time: int, corrects: bool) -> Emitted | None:
        """Emits impressions whose window has ended, in order of time, then corrections; drops old events.

        Args:
            time: the time; see `time_to_emit`.
            corrects: whether impressions with a late click are emitted again.

        Returns:
            The samples; None if there are none.
        """
        table = self._impressions
        due = ~table.flags[:, EMITTED] & (table.times + self._window <= time)
        first = self._ordered(np.flatnonzero(due))
        again = self._ordered(np.flatnonzero(np.isin(table.places[:, 2], self._late)))
        self._late = np.zeros(0, np.int64)
        again = again if corrects else again[:0]
        order = np.concatenate([first, again])
        emitted: Emitted | None = None
        if len(order):
            clicked = table.flags[order, MATCHED]
            batch = self._joined().take(order)
            emitted = Emitted(batch, clicked, int(clicked[: len(first)].sum()), len(again))
        table.flags[due, EMITTED] = True
        self.time = time
        self._drop(time)
        return emitted

    def drop_clicks(self, time: int, most: int) -> None:
        """Drops clicks that are two windows older than `time`, and the oldest clicks beyond `most`."""
        clicks = self._clicks
        keep = self._retained(clicks.times, time)
        if len(keep) > most:
            keep &= clicks.times > np.partition(clicks.times, len(keep) - most - 1)[len(keep) - most - 1]
        self._unmatched += int((~keep & ~clicks.flags[:, MATCHED]).sum())
        clicks.keep(keep)

    def begins(self) -> dict[int, int]:
        """Returns the first offset of the retained events, by the number of the partition."""
        return {**self._impressions.begins(), **self._clicks.begins()}

    def _ordered(self, rows: NDArray[np.intp]) -> NDArray[np.intp]:
        table = self._impressions
        return rows[np.lexsort((table.places[rows, 2], table.places[rows, 0], table.times[rows]))]

    def _retained(self, times: Int64Array, time: int) -> BoolArray:
        return times + 2 * self._window > time

    def _add(self, impressions: bool, partition: int, begin: int, events: KeyedEvents, keep: BoolArray) -> None:
        if not impressions and events.keyed is not None:
            self._unmatched += int((~events.keyed).sum())
            keep = keep & events.keyed
        table = self._impressions if impressions else self._clicks
        table.append(events, partition, begin, self._following, keep)
        self._following += len(keep)
        if impressions and keep.any():
            assert events.batch is not None
            self._rows.append(events.batch if keep.all() else events.batch.take(np.flatnonzero(keep)))

    def _joined(self) -> Batch:
        if len(self._rows) > 1:
            self._rows = [Batch.concat(self._rows)]
        return self._rows[0]

    def _match(self) -> None:
        """Marks the impressions with a click in their window, and the clicks in a window."""
        impressions, clicks = self._impressions, self._clicks
        if not len(impressions) or not len(clicks):
            return
        after = _nearest(impressions.keys, impressions.times, clicks.keys, clicks.times, forward=True)
        matched = (after <= self._window) & impressions.flags[:, KEYED]
        new = matched & ~impressions.flags[:, MATCHED]
        late = new & impressions.flags[:, EMITTED]
        self._late = np.concatenate([self._late, impressions.places[late, 2]])
        self._late_count += int(late.sum())
        impressions.flags[:, MATCHED] |= matched
        before = _nearest(clicks.keys, clicks.times, impressions.keys, impressions.times, forward=False)
        clicks.flags[:, MATCHED] |= before <= self._window

    def _drop(self, time: int) -> None:
        table = self._impressions
        keep = self._retained(table.times, time) | ~table.flags[:, EMITTED]
        if not keep.all():
            rows = self._joined().take(np.flatnonzero(keep))
            self._rows = [rows] if len(rows) else []
            table.keep(keep)
        clicks = self._clicks
        keep = self._retained(clicks.times, time)
        self._unmatched += int((~keep & ~clicks.flags[:, MATCHED]).sum())
        clicks.keep(keep)


def _nearest(keys: Ids, times: Int64Array, other: Ids, at: Int64Array, *, forward: bool) -> Int64Array:
    """Returns the time from each event to the next (or last) other event of its key; the int64 maximum without one."""
    no_event = np.iinfo(np.int64).max
    all_keys = np.concatenate([keys, other])
    all_times = np.concatenate([times, at])
    # Of events of the same time, impressions sort first, so that a click follows its impression.
    is_other = np.concatenate([np.zeros(len(keys), bool), np.ones(len(other), bool)])
    order = np.lexsort((is_other if forward else ~is_other, all_times, all_keys))
    places = np.where(is_other[order], np.arange(len(order)), len(order) if forward else -1)
    if forward:
        nearest = np.minimum.accumulate(places[::-1])[::-1]
    else:
        nearest = np.maximum.accumulate(places)
    known = (nearest >= 0) & (nearest < len(order))
    nearest_rows = order[np.where(known, nearest, 0)]
    same = known & (all_keys[nearest_rows] == all_keys[order])
    distance = np.where(same, np.abs(all_times[nearest_rows] - all_times[order]), no_event)
    distances = np.empty(len(order), np.int64)
    distances[order] = distance
    return distances[: len(keys)]
