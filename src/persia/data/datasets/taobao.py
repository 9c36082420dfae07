"""Reads Taobao's user behaviors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Unpack

from persia.checks import check_choice
from persia.data.files import Paths, dataset_path, expand
from persia.data.from_csv import CSV_SUFFIXES, CsvFormat, CsvSource
from persia.data.histories import (
    EventColumns,
    EventFiles,
    HistorySource,
    LeaveOneOut,
    check_history_options,
    events_of,
    history_feature,
)
from persia.data.reader import StreamReader
from persia.data.row_options import RowOptions, conversion_of, order_of, with_options
from persia.data.rows import Piece
from persia.errors import ConfigError, DataError
from persia.schema import IdFeature, Pooling, Schema

__all__ = ["taobao"]

_IDS = ("user_id", "item_id", "category_id")
_COLUMNS = (*_IDS, "behavior", "timestamp")
_FIRST_SECOND = 1 << 40
"""Added to times in histories: some times in the published file are before 1970, and ids cannot be negative."""
_BEHAVIORS = ("pv", "fav", "cart", "buy")


@with_options(RowOptions)
def taobao(
    path: Paths | None = None,
    batch_size: int = 1024,
    *,
    dim: int = 16,
    positive: Sequence[str] = ("buy",),
    max_length: int | None = None,
    pooling: Pooling | None = "mean",
    min_history: int = 0,
    leave_one_out: LeaveOneOut | None = None,
    **rows: Unpack[RowOptions],
) -> StreamReader:
    """Taobao's UserBehavior.csv (Tianchi): 100 million views, favorites, carts and purchases, sorted by user.

    Comma-separated without header: user, item, category, behavior ("pv", "fav", "cart", "buy"), and a Unix timestamp
    in seconds. ID-type features `user_id`, `item_id`, `category_id`; the label is `positive`; `Batch.day` is in days
    since 1970 (UTC).

    With `max_length`, samples are in order of time, and have `history` and `category_history`: the items of earlier
    events of the user, of any behavior, oldest first, in the tables `item_id` and `category_id`. All events are then in
    memory while rows are read: 50 bytes each, about 120 while they are sorted.

    Args:
        path: file, directory, glob or URL, or a list of these; None uses `find("taobao")`.
        batch_size: samples per batch.
        dim: dim of all embeddings.
        positive: behaviors whose label is 1; others have 0. The log has no items that were shown but not chosen: to
            learn from views, name all four behaviors, and add `negatives`.
        max_length: number of events of the histories that count, from the newest. None: there are no histories, and
            rows are in the order of the file.
        pooling: pooling of the histories; None ("none" in a file) for models of sequences.
        min_history: minimum number of earlier events of the user. Events with fewer appear in histories only.
        leave_one_out: which selected events of a user become samples: "test" takes the newest one, "validation" the
            one before it, "train" all earlier ones; None takes all. Histories have all earlier events, of any part.
        **rows: see `RowOptions`. `where` and `split` take the columns `behavior`, `timestamp` and the features;
            histories have all rows. `require_labels=False` reads files without `behavior`, which then need a header.

    Raises:
        ConfigError: a behavior is unknown, or the list is empty; or another argument is invalid.
    """
    if isinstance(positive, str) or not positive:
        raise ConfigError(f'Invalid positive = {positive!r}; expected a list such as ["buy"].', field="positive")
    for behavior in positive:
        check_choice("positive", behavior, _BEHAVIORS)
    check_history_options(min_history, leave_one_out)
    if max_length is None and min_history:
        raise ConfigError(f"min_history = {min_history} needs histories; give their max_length.", field="min_history")
    if max_length is None and leave_one_out is not None:
        raise ConfigError(
            f"leave_one_out = {leave_one_out!r} needs histories; give their max_length.", field="leave_one_out"
        )
    ids = [IdFeature(name, dim=dim, kind="number") for name in _IDS]
    time = [] if max_length is None else [IdFeature("time", dim=1, kind="number")]
    conversion = conversion_of(
        Schema([*ids, *time], labels=["positive"]),
        day="timestamp",
        day_unit="s",
        labels={"positive": f"behavior in {tuple(positive)!r}"},
        **rows,
    )
    files = tuple(expand(dataset_path("taobao") if path is None else path, CSV_SUFFIXES))
    order = order_of(batch_size, **rows)
    if max_length is None:
        return StreamReader(conversion.schema, CsvSource(files, conversion, CsvFormat(layouts=(_COLUMNS,))), order)
    histories = [
        history_feature(dim, "item_id", "number", max_length, pooling),
        history_feature(dim, "category_id", "number", max_length, pooling, part="category"),
    ]
    schema = Schema([*ids, *histories], labels=["positive"])
    of = {"history": "item_id", "category_history": "category_id"}
    source = HistorySource(schema, _Behaviors(files, conversion), "user_id", of, min_history, leave_one_out)
    return StreamReader(schema, source, order)


@dataclass(frozen=True)
class _Behaviors(EventFiles):
    """See `EventLog`."""

    def events(self) -> EventColumns:
        form = CsvFormat(layouts=(_COLUMNS,), labels=("behavior",), columns=_COLUMNS)
        source = CsvSource(self.files, self.conversion, form)
        pieces = (_timed(piece) for file in self.files for piece in source.pieces(file))
        return events_of(pieces, self.conversion, "time")


def _timed(piece: Piece) -> Piece:
    """Returns a piece with a column `time` that is never negative."""
    import pyarrow as pa
    import pyarrow.compute as pc

    time = piece.columns["timestamp"]
    at = int(pc.index(pc.match_substring_regex(time, r"^(-\d{1,12}|\d{1,18})$"), False).as_py())
    if at >= 0:
        value = time[at].as_py().decode(errors="replace")
        raise DataError(
            f"{piece.file.path}: column 'timestamp' has {value!r} at row {piece.row + at}; histories take whole "
            "seconds. Correct it, or leave the line out.",
            path=piece.file.path,
            column="timestamp",
            row=piece.row + at,
            value=value,
        )
    seconds = pc.add(time.cast(pa.string()).cast(pa.int64()), _FIRST_SECOND)
    return piece._replace(columns=piece.columns | {"time": seconds})
