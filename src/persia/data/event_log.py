"""Reads logs of events of users' own: one sample per event, with the events of the same owner before it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias, Unpack, get_args

import msgspec
import numpy as np

from persia.checks import check_choice, check_flag, check_kind
from persia.data.column_values import times_of_text
from persia.data.files import File, expand
from persia.data.from_arrow import ArrowSource, check_source
from persia.data.from_csv import CSV_SUFFIXES, CsvFormat, CsvSource
from persia.data.from_jsonl import JsonlSource
from persia.data.from_parquet import PARQUET_SUFFIXES, ParquetSource
from persia.data.histories import EventColumns, HistorySource, LeaveOneOut, check_history_options, events_of
from persia.data.json_lines import JSONL_SUFFIXES
from persia.data.reader import StreamReader
from persia.data.row_options import ReaderOptions, conversion_of, order_of, with_options
from persia.data.rows import Conversion, Piece
from persia.errors import ConfigError, DataError
from persia.schema import DenseFeature, IdFeature, InputRules, Schema
from persia.types import Int64Array, SourceFingerprint

__all__ = ["TimeUnit", "event_log"]

TimeUnit: TypeAlias = Literal["s", "ms", "us", "ns"]
"""Unit of a number in a column of times."""

LogSource: TypeAlias = ParquetSource | CsvSource | JsonlSource | ArrowSource

_NANOSECONDS: Final[Mapping[str, int]] = {"s": 1_000_000_000, "ms": 1_000_000, "us": 1_000, "ns": 1}
_OWNER, _TIME = "owner of the event", "time of the event"
"""Names of the features that events have next to those of the schema."""
_SIGN = np.uint64(1 << 63)
"""Ids are not negative, and times may be: this bit is flipped in between."""


@with_options(ReaderOptions)
def event_log(
    source: Any,
    schema: Schema,
    batch_size: int = 1024,
    *,
    owner: str,
    time: str,
    histories: Mapping[str, str] | None = None,
    ages: str | None = None,
    time_unit: TimeUnit = "s",
    min_history: int = 0,
    leave_one_out: LeaveOneOut | None = None,
    newest_only: bool = False,
    column_names: Sequence[str] | None = None,
    delimiter: str = ",",
    **options: Unpack[ReaderOptions],
) -> StreamReader:
    """Reads a log of events, such as clicks with a user, an item and a time, into samples with histories.

    The log has a row for each event, in any order. A sample is an event with the ids of the same owner's earlier
    events, oldest first; samples are in the order of time. Of equal times, the row that comes first is the earlier
    event. All events are in memory while rows are read: about 40 bytes each, and 100 while they are sorted.

    Args:
        source: Parquet, CSV or JSON-lines files, told by their suffix: a file, glob, directory, URL or list; or any
            source of `persia.data.arrow`, such as a frame or a table.
        schema: features of an event, each with one value; histories, which are features with one `max_length` and
            `keep="last"`; labels.
        batch_size: samples per batch.
        owner: column of the source with the user or session whose events are a history.
        time: column of the source with the time: numbers, dates, timestamps, or texts of these.
        histories: for each history the feature whose ids it collects, such as {"history": "item"}. None: each un-pooled
            feature is the history of the first pooled feature of its table.
        ages: dense feature of `max_length` numbers that gets the seconds from each event of the history to the sample,
            as `NextItem` and `HSTU` read them; it is no column of the source. 0 after the end of a shorter history.
        time_unit: unit of numbers in `time`.
        min_history: minimum number of earlier events of the owner. Events with fewer appear in histories only.
        leave_one_out: which selected events of an owner become samples: "test" takes the newest one, "validation" the
            one before it, "train" all earlier ones; None takes all. Histories have all earlier events, of any part.
        newest_only: whether only the newest of these becomes a sample, with the others in its history. With
            "train", that is a sample per owner, for models that predict the item after each event of a history, such
            as `NextItem` with `targets="all"`.
        column_names: of CSV files, names of the columns; None reads them from the first line of each file.
        delimiter: of CSV files, one character.
        **options: see `RowOptions` and `ColumnOptions`. `where` and `split` select the events that become samples;
            histories have all events. `labels={"chosen": "item is not None"}` gives each event the label 1.

    Raises:
        DataError: no file; while iterating: a file or table cannot be read, lacks a column, has invalid values, or a
            time is out of range, or no event becomes a sample.
        MissingExtraError: the protocol of a URL needs a package that is not installed.
        ConfigError: an argument is invalid.
    """
    check_kind("owner", owner, str, "the name of a column")
    check_kind("time", time, str, "the name of a column")
    check_choice("time_unit", time_unit, get_args(TimeUnit))
    check_history_options(min_history, leave_one_out)
    check_flag("newest_only", newest_only)
    collected = _histories(schema, histories)
    if ages is not None:
        _check_ages(schema, ages, collected)
    rename = dict(options.get("rename") or {})
    events = _events_schema(schema, collected, ages)
    key = next((each.name for each in events.id_features if _is_column(each, owner, rename)), _OWNER)
    own = [IdFeature(_OWNER, dim=1)] if key == _OWNER else []
    own.append(IdFeature(_TIME, dim=1))
    events = msgspec.structs.replace(events, id_features=[*events.id_features, *own])
    of_source = {_OWNER: owner, _TIME: time}
    options["rename"] = rename | {each.name: of_source[each.name] for each in own}
    item = next(iter(collected.values()))
    if isinstance(column_names, str):
        raise ConfigError(f"column_names = {column_names!r} is one text; give a list of texts.", field="column_names")
    form = CsvFormat(delimiter, None if column_names is None else tuple(column_names))
    rows = _source(source, conversion_of(events, **options), form)
    log = _OwnLog(rows, owner, time, time_unit, rename.get(item, item))
    samples = HistorySource(schema, log, key, collected, min_history, leave_one_out, newest_only, ages)
    return StreamReader(schema, samples, order_of(batch_size, **options))


@dataclass(frozen=True)
class _OwnLog:
    """See `EventLog`.

    Attributes:
        source: the events, with their owner and time.
        owner: column of the source with the owner of each event.
        time: column of the source with the time.
        unit: of numbers in it.
        item: column of the source that a history collects.
    """

    source: LogSource
    owner: str
    time: str
    unit: TimeUnit
    item: str

    @property
    def path(self) -> str:
        """See `EventLog.path`."""
        return self.source.name if isinstance(self.source, ArrowSource) else self.source.files[0].path

    @property
    def input_rules(self) -> InputRules:
        """The rules for the columns of events, which a server applies, too."""
        return self.source.input_rules

    def fingerprint(self) -> SourceFingerprint | None:
        """See `EventLog.fingerprint`."""
        data = self.source.fingerprint()
        if data is None:
            return None
        rows = data.rows | {"owner": self.owner, "time": self.time}
        if isinstance(self.source, ArrowSource):  # The names of its parts say what is in them.
            rows["events"] = " ".join(data.keys())
        return msgspec.structs.replace(data.merged("histories"), rows=rows)

    def events(self) -> EventColumns:
        """See `EventLog.events`."""
        conversion = self.source.conversion
        rename = {name: column for name, column in conversion.rename.items() if name != _TIME}
        events = events_of(map(self._timed, self._pieces()), replace(conversion, rename=rename), _TIME)
        return events._replace(time=(events.time.view(np.uint64) ^ _SIGN).view(np.int64))

    def _pieces(self) -> Iterator[Piece]:
        source = self.source
        try:
            if isinstance(source, CsvSource):
                for file in source.files:
                    yield from source.pieces(file)
            else:
                yield from source.pieces()
        except DataError as error:
            column, conversion = error.fields.get("column"), source.conversion
            labels = {conversion.rename.get(name, name): name for name in conversion.schema.label_names}
            label = labels.get(column, "") if isinstance(column, str) else ""
            if not label or "row" in error.fields:
                raise
            item = self.item if self.item.isidentifier() else f"column({self.item!r})"
            remedy = f" If each event has the label 1, set labels={{{label!r}: {f'{item} is not None'!r}}}."
            raise DataError(f"{error.message}{remedy}", **error.fields) from error

    def _timed(self, piece: Piece) -> Piece:
        """Returns a piece with the column of times that `events_of` reads."""
        import pyarrow as pa

        plain = self.source.conversion.with_plain_texts(piece)
        with self.source.conversion.located(piece, None, {}):
            times = _nanoseconds(plain, self.time, self.unit)
        return piece._replace(columns=piece.columns | {_TIME: pa.array(times.view(np.uint64) ^ _SIGN)})


def _nanoseconds(piece: Piece, name: str, unit: TimeUnit) -> Int64Array:
    """Returns the times of events in nanoseconds since 1970, int64 `[rows]`.

    Raises:
        DataError: a time is missing, of another type, or out of range.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    column = _column(piece, name)
    try:
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        if pa.types.is_binary(column.type) or pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            column = times_of_text(name, column)
        kind = column.type
        if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
            column = column.cast(pa.timestamp("ns")).cast(pa.int64())
        elif pa.types.is_integer(kind):
            column = pc.multiply_checked(column.cast(pa.int64()), _NANOSECONDS[unit])
        elif pa.types.is_floating(kind):
            number = column.cast(pa.float64())
            number = pc.if_else(pc.is_nan(number), None, number)
            column = pc.round(pc.multiply(number, float(_NANOSECONDS[unit]))).cast(pa.int64())
        else:
            raise DataError(
                f"column {name!r} is {kind}; give integers, floats, dates or timestamps as the time of events.",
                column=name,
            )
    except pa.ArrowInvalid as error:
        raise DataError(
            f"column {name!r} has a time out of range, from row {piece.row} on ({error}); times are from 1678 to 2261. "
            f"{_remedy(column, unit)}",
            column=name,
        ) from error
    if column.null_count:
        row = int(pc.index(pc.is_null(column), True).as_py())
        raise DataError(
            f"column {name!r} has no time at row {row}, but each event has one. Fill it in, or leave the row out.",
            column=name,
            row=row,
        )
    times: Int64Array = np.array(column.to_numpy(zero_copy_only=False), np.int64)
    return times


def _remedy(column: Any, unit: TimeUnit) -> str:
    """Returns what to do about times out of range: numbers may have another unit, which is told by their size."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_timestamp(column.type) or pa.types.is_date(column.type):
        return "Correct it, or leave the row out."
    least, largest = (pc.min_max(column)[end].as_py() for end in ("min", "max"))
    size = max(abs(least), abs(largest))
    fitting = next((each for each, ns in _NANOSECONDS.items() if size * ns < 2**63), None)
    if fitting is None:
        return f'Its numbers are read with time_unit="{unit}"; correct them, or leave the rows out.'
    return f'Its numbers are read with time_unit="{unit}", and fit time_unit="{fitting}": set that, or correct them.'


def _column(piece: Piece, name: str) -> Any:
    """Returns a column of a piece as an arrow array; a hive key as a constant one."""
    import pyarrow as pa

    column = piece.columns.get(name)
    if column is None:
        return pa.repeat(piece.file.keys[name], piece.rows)
    if isinstance(column, list):
        raise DataError(
            f"column {name!r} has values of several kinds; give numbers, dates or timestamps as the time of events.",
            column=name,
        )
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _source(source: Any, conversion: Conversion, form: CsvFormat) -> LogSource:
    """Returns the source of the events.

    Raises:
        ConfigError: files are of several formats, or of none that is known; or options of CSV files are for others.
        DataError: there are no files, or the source is of no known kind.
    """
    rows = _source_of_kind(source, conversion, form)
    if not isinstance(rows, CsvSource) and form != CsvFormat():
        raise ConfigError(
            "column_names and delimiter are of CSV files, and the events are not in CSV files; leave them out.",
            field="delimiter",
        )
    return rows


def _source_of_kind(source: Any, conversion: Conversion, form: CsvFormat) -> LogSource:
    if not (isinstance(source, str | os.PathLike) or _is_list_of_paths(source)):
        check_source(source)
        return ArrowSource(source, conversion)
    files = tuple(expand(source, (*PARQUET_SUFFIXES, *CSV_SUFFIXES, *JSONL_SUFFIXES)))
    if all(file.path.endswith(PARQUET_SUFFIXES) for file in files):
        return ParquetSource(files, conversion)
    if all(file.path.endswith(CSV_SUFFIXES) for file in files):
        return CsvSource(files, conversion, form)
    if all(file.path.endswith(JSONL_SUFFIXES) for file in files):
        return JsonlSource(files, conversion)
    raise ConfigError(
        f"{_names(files)}: an event log is in Parquet, CSV or JSON-lines files, told by suffixes such as "
        ".parquet, .csv and .jsonl, all of one format. Rename them, or read them as a table: "
        "event_log(pyarrow.csv.read_csv(...), ...).",
        field="source",
    )


def _is_list_of_paths(source: Any) -> bool:
    return isinstance(source, Sequence) and all(isinstance(each, str | os.PathLike) for each in source)


def _names(files: Sequence[File]) -> str:
    return ", ".join(file.path for file in files[:3]) + (" and others" if len(files) > 3 else "")


def _is_column(feature: IdFeature, column: str, rename: Mapping[str, str]) -> bool:
    """Returns whether the ids of a feature are the values of a column of the source."""
    return feature.reads_ids and not feature.split and rename.get(feature.name, feature.name) == column


def _histories(schema: Schema, histories: Mapping[str, str] | None) -> dict[str, str]:
    """Returns the feature of the events whose ids each history collects, by the history.

    Raises:
        ConfigError: there are none, a name is unknown, they do not share one `max_length`, or one keeps other events.
    """
    known = {each.name: each for each in schema.id_features}
    if histories is None:
        collected = {}
        for each in known.values():
            if each.pooling is None and not each.computed:
                same = (other for other in known.values() if other.table_name == each.table_name)
                collected[each.name] = next((other.name for other in same if other.pooling is not None), "")
        histories = {name: of for name, of in collected.items() if of}
    check_kind("histories", histories, Mapping, "a mapping such as {'history': 'item'}")
    if not histories:
        raise ConfigError(
            "The schema has no history: no un-pooled feature shares the table of a pooled one. Add "
            "IdFeature('history', table='item', pooling=None, max_length=50, keep='last'), or name the histories, such "
            "as histories={'history': 'item'}.",
            field="histories",
        )
    for name, of in histories.items():
        for feature in (name, of):
            if feature not in known:
                raise ConfigError(
                    f"histories = {dict(histories)!r} names {feature!r}, which is no ID-type feature of the schema; it "
                    f"has {', '.join(known)}.",
                    field="histories",
                )
        if of in histories:
            raise ConfigError(
                f"histories has {of!r} as a history and as what one collects; name a feature of the events.",
                field="histories",
            )
    lengths = {name: known[name].max_length for name in histories}
    if None in lengths.values() or len(set(lengths.values())) > 1:
        raise ConfigError(
            f"Histories need one max_length, which is {lengths} here; set the same number for all.", field="histories"
        )
    for name in histories:
        if known[name].keep != "last":
            raise ConfigError(
                f"The history {name!r} has the newest events, but the schema keeps the {known[name].keep} ids of "
                'longer lists, such as those that a server is sent; set keep="last" in its IdFeature.',
                field="histories",
            )
    return dict(histories)


def _check_ages(schema: Schema, ages: str, histories: Mapping[str, str]) -> None:
    """Raises ConfigError unless a dense feature has room for the ages of a history's events, and nothing else."""
    length = schema.feature(next(iter(histories))).max_length
    if length is None or DenseFeature(ages, size=length) not in schema.dense:
        raise ConfigError(
            f"ages = {ages!r} is to have a number for each event of a history; declare it as "
            f"DenseFeature({ages!r}, size={length}).",
            field="ages",
        )


def _events_schema(schema: Schema, histories: Mapping[str, str], ages: str | None) -> Schema:
    """Returns the schema of the events: without histories and ages.

    Raises:
        ConfigError: the schema has what samples with histories do not.
    """
    for field in ("sample_weight", "group"):
        if getattr(schema, field) is not None:
            raise ConfigError(
                f"An event log gives samples no {field}; leave Schema.{field} out, or write the samples to files "
                "yourself.",
                field=field,
            )
    # Dims and tables matter where rows are looked up only.
    features = [
        msgspec.structs.replace(each, dim=1, table=None, dtype=None)
        for each in schema.id_features
        if each.name not in histories
    ]
    dense = [each for each in schema.dense if each.name != ages]
    return Schema(features, dense_features=dense, labels=schema.labels)
