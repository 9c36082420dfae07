"""Reads Diginetica: sessions of a shop."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Unpack

import numpy as np

from persia.checks import check_choice
from persia.data.files import File, Paths, dataset_path, expand
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
from persia.data.rows import Conversion
from persia.errors import DataError
from persia.schema import IdFeature, Pooling, Schema
from persia.types import BoolArray, Ids

__all__ = ["diginetica"]

_VIEWS = ("sessionId", "userId", "itemId", "timeframe", "eventdate")
_PURCHASES = ("sessionId", "userId", "timeframe", "eventdate", "ordernumber", "itemId")
_ALIASES = {"session_id": "sessionId", "user_id": "userId", "item_id": "itemId"}
"""Names in most public copies of the files."""
_VIEWS_FILE, _PURCHASES_FILE = "train-item-views.csv", "train-purchases.csv"
_DAY_MS = 86_400_000


@with_options(RowOptions)
def diginetica(
    path: Paths | None = None,
    batch_size: int = 1024,
    *,
    dim: int = 16,
    max_length: int = 50,
    pooling: Pooling | None = "mean",
    label: Literal["view", "purchase"] = "view",
    min_history: int = 1,
    leave_one_out: LeaveOneOut | None = None,
    **rows: Unpack[RowOptions],
) -> StreamReader:
    """Diginetica (CIKM Cup 2016): items that visitors of a shop viewed, session by session.

    Reads `train-item-views.csv`: separated by semicolons, session, user, item, milliseconds since the session began,
    and date. Columns may also be named `session_id`, `user_id` and `item_id`. A sample is a view with the earlier views
    of the session, so the task is to predict the next item; samples are in order of time. ID-type features are
    `item_id` and `history`, oldest first, in the table `item_id`. The label is `positive`; `Batch.day` is in days since
    1970.

    All views are in memory while rows are read, as for `amazon`.

    Args:
        path: file, directory, glob or URL of views, or a list of these; None uses `find("diginetica")`. In a directory,
            the file `train-item-views.csv` is read.
        batch_size: samples per batch.
        dim: dim of the embeddings.
        max_length: number of items of the history that count, from the newest.
        pooling: pooling of the history; None ("none" in a file) for models of sequences.
        label: "view": all labels are 1, as each item was viewed: add `negatives`, or train a `TwoTower`. "purchase":
            1 if the item was bought in the session, by `train-purchases.csv` next to the views.
        min_history: minimum number of earlier views of the session. Views with fewer appear in histories only.
        leave_one_out: which selected views of a session become samples: "test" takes the newest one, "validation" the
            one before it, "train" all earlier ones; None takes all. Histories have all earlier views, of any part.
        **rows: see `RowOptions`. `where` and `split` select the views that become samples, by the columns of the file
            (`sessionId`, `userId`, `itemId`, `timeframe`, `eventdate`); histories have all views. Rows are numbered as
            in the files. With by="hash" and column="sessionId", samples of a session stay together.
            `require_labels=False` reads views whose purchases are missing.

    Raises:
        ConfigError: an argument is invalid.
        DataError: a file is missing.
    """
    check_choice("label", label, ("view", "purchase"))
    check_history_options(min_history, leave_one_out)
    path = dataset_path("diginetica") if path is None else path
    if isinstance(path, str | os.PathLike) and Path(path).is_dir():
        path = Path(path) / _VIEWS_FILE
    views = tuple(expand(path, CSV_SUFFIXES))
    purchases = _purchases(views, rows.get("require_labels", True)) if label == "purchase" else None
    item = IdFeature("item_id", dim=dim, kind="number")
    others = [IdFeature(name, dim=1, kind="number") for name in ("sessionId", "timeframe")]
    conversion = conversion_of(
        Schema([item, *others], labels=[]),
        rename={"item_id": "itemId"},
        day="eventdate",
        **rows,
    )
    schema = Schema([item, history_feature(dim, "item_id", "number", max_length, pooling)], labels=["positive"])
    log = _Views(views, conversion, purchases)
    source = HistorySource(schema, log, "sessionId", {"history": "item_id"}, min_history, leave_one_out)
    return StreamReader(schema, source, order_of(batch_size, **rows))


def _purchases(views: tuple[File, ...], required: bool) -> tuple[File, ...]:
    """Returns the files of purchases next to the files of views; empty if they are missing and not required."""
    paths = dict.fromkeys("".join(file.path.rpartition("/")[:2]) + _PURCHASES_FILE for file in views)
    try:
        return tuple(expand(list(paths), CSV_SUFFIXES))
    except DataError:
        if required:
            raise
        return ()


@dataclass(frozen=True)
class _Views(EventFiles):
    """See `EventLog`."""

    purchases: tuple[File, ...] | None
    """None: every view has the label 1; empty: no labels."""

    def events(self) -> EventColumns:
        source = CsvSource(
            self.files, self.conversion, CsvFormat(";", layouts=(_VIEWS,), columns=_VIEWS, aliases=_ALIASES)
        )
        pieces = (piece for file in self.files for piece in source.pieces(file))
        events = events_of(pieces, self.conversion, "timeframe")
        labels = np.ones((len(events.time), int(self.purchases != ())), np.float32)
        if self.purchases:
            labels[:, 0] = self._bought(events.ids["sessionId"], events.ids["item_id"])
        # The time of day at which a session began is unknown, so all begin at midnight.
        assert events.day is not None
        time = events.day.astype(np.int64) * _DAY_MS + events.time
        return events._replace(time=time, labels=labels)

    def _bought(self, sessions: Ids, items: Ids) -> BoolArray:
        """Returns whether each item was bought in its session."""
        assert self.purchases is not None
        schema = Schema([IdFeature(name, dim=1, kind="number") for name in ("sessionId", "itemId")], labels=[])
        conversion = Conversion(schema)
        columns = ("sessionId", "itemId")
        source = CsvSource(
            self.purchases, conversion, CsvFormat(";", layouts=(_PURCHASES,), columns=columns, aliases=_ALIASES)
        )
        pieces = (piece for file in self.purchases for piece in source.pieces(file))
        bought = events_of(pieces, conversion, "sessionId").ids
        pairs = np.stack([np.r_[bought[name], own] for name, own in zip(columns, (sessions, items), strict=True)], 1)
        _, codes = np.unique(pairs, axis=0, return_inverse=True)
        codes = codes.reshape(-1)
        known = len(pairs) - len(sessions)
        is_bought: BoolArray = np.isin(codes[known:], codes[:known])
        return is_bought
