"""Builds samples with histories from logs whose events are in any order: one sample per event, in order of time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol, TypeAlias, get_args

import msgspec
import numpy as np

from persia.batching.batch import Batch
from persia.batching.id_column import IdColumn
from persia.checks import check_choice, check_integer
from persia.data.files import File
from persia.data.fingerprints import fingerprint_of_files
from persia.data.rows import Conversion, Piece
from persia.errors import DataError
from persia.schema import IdFeature, InputRules, Pooling, Schema, input_rules_of
from persia.types import Floats, Ids, Int32Array, Int64Array, SourceFingerprint

__all__ = [
    "EventColumns",
    "EventFiles",
    "EventLog",
    "HistorySource",
    "LeaveOneOut",
    "check_history_options",
    "events_of",
    "history_feature",
    "history_of",
]

LeaveOneOut: TypeAlias = Literal["train", "validation", "test"]
"""A part of the events of each owner: the newest one is the test data, the one before it the validation data."""

PIECE_IDS = 1 << 20
"""Approximate number of ids of the histories that are built together."""


class EventColumns(NamedTuple):
    """The events of a log, in the order of the files; about 40 bytes each.

    Attributes:
        ids: ids by feature, uint64 `[events]`.
        time: int64 `[events]`; events of equal time are ordered as in the files.
        labels: float32 `[events, labels]`.
        day: int32 `[events]`; None if the log has no days.
        selected: positions of the events that become samples, int64; None for all.
        dense: non-ID-type features of the events, float32 `[events, width]`; None if they have none.
    """

    ids: dict[str, Ids]
    time: Int64Array
    labels: Floats
    day: Int32Array | None
    selected: Int64Array | None
    dense: Floats | None = None


class EventLog(Protocol):
    """A log of events; picklable."""

    @property
    def path(self) -> str:
        """The first file, or the kind of table, for error messages."""
        ...

    def fingerprint(self) -> SourceFingerprint | None:
        """Returns the data and the selection of samples, as one part; None if the data cannot be told."""
        ...

    def events(self) -> EventColumns:
        """Reads all events."""
        ...


@dataclass(frozen=True)
class EventFiles:
    """Base of logs in files of one published format.

    Attributes:
        files: the files.
        conversion: conversion of their columns; its selection selects the events that become samples.
    """

    files: tuple[File, ...]
    conversion: Conversion

    @property
    def path(self) -> str:
        """See `EventLog.path`."""
        return self.files[0].path

    def fingerprint(self) -> SourceFingerprint:
        """See `EventLog.fingerprint`."""
        return fingerprint_of_files("histories", self.files, self.conversion.selection).merged("histories")


@dataclass(frozen=True)
class HistorySource:
    """A sample for each event of a log, with the events of the same owner before it.

    All events are in memory while rows are read, since the events of an owner may be anywhere in the files.

    Attributes:
        schema: schema of the samples: features of the events, and their histories, which share one `max_length`.
        log: the events. Their non-ID-type features are those of the schema, in its order, without `ages`.
        owner: key in `EventColumns.ids` of the user or session that owns a history.
        histories: key in `EventColumns.ids` of the ids in each history, by feature.
        min_history: events with fewer events before them appear in histories only.
        leave_one_out: which of an owner's selected events become samples; None for all.
        newest_only: whether only the newest of these becomes a sample.
        ages: non-ID-type feature of `max_length` numbers that gets the seconds from each event of the history to the
            sample, 0 where there is none; the times of the log are then nanoseconds. None if there is no such feature.
    """

    schema: Schema
    log: EventLog
    owner: str
    histories: Mapping[str, str]
    min_history: int = 0
    leave_one_out: LeaveOneOut | None = None
    newest_only: bool = False
    ages: str | None = None

    @property
    def input_rules(self) -> InputRules | None:
        """The rules of the log for its columns; None if it declares none."""
        return input_rules_of(self.log)

    def fingerprint(self) -> SourceFingerprint | None:
        """Returns data and selection, as one part: a history may have events of any file."""
        data = self.log.fingerprint()
        if data is None:
            return None
        rows = {"min_history": str(self.min_history)}
        rows |= {} if self.leave_one_out is None else {"leave_one_out": self.leave_one_out}
        rows |= {"newest_only": "True"} if self.newest_only else {}
        return msgspec.structs.replace(data, rows=data.rows | rows)

    def chunks(self, skip: int) -> Iterator[Batch]:
        """See `RowSource.chunks`. Skipped samples are not built, but all events are read."""
        events = self.log.events()
        owners = events.ids[self.owner]
        # By owner, then time, then position in the files: the history of an event precedes it.
        grouped = np.lexsort((events.time, owners))
        heads = np.flatnonzero(np.r_[True, owners[grouped][1:] != owners[grouped][:-1]])
        before = np.arange(len(grouped)) - np.repeat(heads, np.diff(np.r_[heads, len(grouped)]))
        place = np.empty_like(grouped)
        place[grouped] = np.arange(len(grouped))
        samples = self._samples(events, heads, place, before)[skip:]
        length = self.schema.feature(next(iter(self.histories))).max_length
        assert length is not None
        in_order = {name: events.ids[key][grouped] for name, key in self.histories.items()}
        times = None if self.ages is None else events.time[grouped]
        for start in range(0, len(samples), max(1, PIECE_IDS // length)):
            rows = samples[start : start + max(1, PIECE_IDS // length)]
            ends, lengths = place[rows], np.minimum(before[place[rows]], length)
            names = [feature.name for feature in self.schema.id_features if feature.name not in self.histories]
            ids = {name: IdColumn(events.ids[name][rows]) for name in names}
            ids |= {name: history_of(items, ends, lengths) for name, items in in_order.items()}
            ages = None if times is None else _ages_of(times, ends, lengths, length)
            labels = np.ascontiguousarray(events.labels[rows])
            day = None if events.day is None else events.day[rows]
            yield Batch(ids, self._dense(events, rows, ages), labels, day)

    def _samples(self, events: EventColumns, heads: Int64Array, place: Int64Array, before: Int64Array) -> Int64Array:
        """Returns the positions of the events that become samples, in the order of time.

        Args:
            events: all events.
            heads: place of the first event of each owner, in the order of owners, then time.
            place: place of each event in that order.
            before: number of events of the same owner before each place.
        """
        samples = np.arange(len(events.time)) if events.selected is None else events.selected
        if self.leave_one_out is not None:
            later = _later(heads, place[samples])
            part = {"test": later == 0, "validation": later == 1, "train": later >= 2}
            samples = samples[part[self.leave_one_out]]
        samples = samples[before[place[samples]] >= self.min_history]
        if self.newest_only:
            samples = samples[_later(heads, place[samples]) == 0]
        if not len(samples):
            raise DataError(
                f"{self.log.path}: there are no samples: no event is selected by `where`, `split` and `leave_one_out` "
                f"and has {self.min_history} or more before it; correct them, or give another source.",
                path=self.log.path,
            )
        return samples[np.argsort(events.time[samples], kind="stable")]

    def _dense(self, events: EventColumns, rows: Int64Array, ages: Floats | None) -> Floats:
        """Returns the non-ID-type features of samples, float32 `[rows, Schema.dense_width]`."""
        own = np.empty((len(rows), 0), np.float32) if events.dense is None else events.dense[rows]
        if ages is None:
            return own
        place = self.schema.dense_slices[self.ages or ""]
        return np.concatenate([own[:, : place.start], ages, own[:, place.start :]], 1)


def _later(heads: Int64Array, places: Int64Array) -> Int64Array:
    """Returns how many of some events have the same owner and are newer, int64 `[events]`.

    Args:
        heads: place of the first event of each owner, ascending.
        places: distinct places of the events, in the order of owners, then time.
    """
    order = np.argsort(places)
    owners = np.searchsorted(heads, places[order], "right")
    ends = np.searchsorted(owners, owners, "right")
    later = np.empty_like(order)
    later[order] = ends - 1 - np.arange(len(order))
    return later


def _ages_of(times: Int64Array, ends: Int64Array, lengths: Int64Array, width: int) -> Floats:
    """Returns the seconds from each event of histories to their ends, float32 `[rows, width]`; 0 at padding.

    Args:
        times: nanoseconds of all events, in the order of owners, then time.
        ends: place of each sample in that order.
        lengths: number of events of its history.
        width: columns of the result.
    """
    ages = np.zeros((len(ends), width), np.float32)
    places, offsets = _places(ends, lengths)
    rows = np.repeat(np.arange(len(ends)), lengths)
    columns = np.arange(len(places)) - np.repeat(offsets[:-1], lengths)
    ages[rows, columns] = (times[ends[rows]] - times[places]) / 1e9
    return ages


def check_history_options(min_history: int, leave_one_out: LeaveOneOut | None) -> None:
    """Raises ConfigError unless the options of a reader with histories are valid."""
    check_integer("min_history", min_history, 0)
    if leave_one_out is not None:
        check_choice("leave_one_out", leave_one_out, get_args(LeaveOneOut))


def history_of(items: Ids, ends: Int64Array, lengths: Int64Array) -> IdColumn:
    """Returns `items[ends[i] - lengths[i] : ends[i]]` for each i, as ids of a feature."""
    places, offsets = _places(ends, lengths)
    return IdColumn(items[places], offsets)


def _places(ends: Int64Array, lengths: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Returns the places `ends[i] - lengths[i]` to `ends[i] - 1` for each i, and where those of each i begin."""
    offsets = np.zeros(len(ends) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return np.arange(offsets[-1]) + np.repeat(ends - lengths - offsets[:-1], lengths), offsets


def history_feature(
    dim: int, table: str, kind: str, max_length: int, pooling: Pooling | None, part: str | None = None
) -> IdFeature:
    """Returns the feature `history`: the newest `max_length` ids of a table.

    Args:
        dim: dim of the embeddings.
        table: table of the ids.
        kind: kind of the ids.
        max_length: maximum number of ids that count.
        pooling: pooling of the history.
        part: another part of the same events; the feature is then `<part>_history`, aligned with `history`.
    """
    return IdFeature(
        "history" if part is None else f"{part}_history",
        dim=dim,
        table=table,
        pooling=pooling,
        max_length=max_length,
        keep="last",
        kind=kind,  # type: ignore[arg-type]
        aligned_with=None if part is None else "history",
    )


def events_of(pieces: Iterator[Piece], conversion: Conversion, time: str) -> EventColumns:
    """Reads events from pieces of files.

    Args:
        pieces: all rows of the files.
        conversion: conversion to batches whose ID-type features are the features of the events and their time, a
            whole number. Its selection selects the events that become samples.
        time: name of the feature with the time.

    Raises:
        DataError: a value is invalid or missing; the message names file, row and column.
    """
    plain = replace(conversion, selection=None)
    batches: list[Batch] = []
    selected_rows: list[Int64Array] = []
    first = 0
    for piece in pieces:
        for batch in plain.batches(iter([piece]), 0):
            with plain.located(piece, None, {}):
                for name, column in batch.id_features.items():
                    _check_single(conversion.rename.get(name, name), column)
            batches.append(batch)
        if conversion.selection is not None:
            selected_rows.append(first + conversion.selected(conversion.with_plain_texts(piece), first))
        first += piece.rows
    names = [feature.name for feature in conversion.schema.id_features]
    if not batches:
        none = {name: np.empty(0, np.uint64) for name in names}
        labels = np.empty((0, len(conversion.schema.label_names)), np.float32)
        dense = np.empty((0, conversion.schema.dense_width), np.float32)
        no_day = None if conversion.day is None else np.empty(0, np.int32)
        return EventColumns(none, np.empty(0, np.int64), labels, no_day, None, dense)
    ids = {name: np.concatenate([batch.id_features[name].values for batch in batches]) for name in names}
    days = [batch.day for batch in batches if batch.day is not None]  # Of all batches, or of none.
    day = np.concatenate(days) if days else None
    columns = min(batch.labels.shape[1] for batch in batches)  # 0 if some files lack labels, which are not required.
    labels = np.concatenate([batch.labels[:, :columns] for batch in batches])
    selected = np.concatenate(selected_rows) if conversion.selection is not None else None
    dense = np.concatenate([batch.dense for batch in batches])
    return EventColumns(ids, ids[time].astype(np.int64), labels, day, selected, dense)


def _check_single(name: str, column: IdColumn) -> None:
    if column.offsets is None:
        return
    lengths = np.diff(column.offsets)
    row = int((lengths != 1).argmax())
    count = lengths[row]
    raise DataError(
        f"column {name!r} has {f'{count} values' if count else 'no value'} at row {row}, but each event has one. "
        "Correct it, or leave the row out.",
        column=name,
        row=row,
    )
