"""Reads Amazon's reviews."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Unpack

from persia.checks import check_number
from persia.data.files import File, Paths, dataset_path, expand
from persia.data.histories import (
    EventColumns,
    EventFiles,
    HistorySource,
    LeaveOneOut,
    check_history_options,
    events_of,
    history_feature,
)
from persia.data.json_lines import json_pieces
from persia.data.reader import StreamReader
from persia.data.row_options import RowOptions, conversion_of, order_of, with_options
from persia.data.rows import Piece
from persia.errors import DataError
from persia.schema import IdFeature, Pooling, Schema

__all__ = ["amazon"]

_SUFFIXES = tuple(s + z for s in (".json", ".jsonl") for z in ("", ".gz", ".bz2", ".zst"))
_OLD = {"user_id": "reviewerID", "item_id": "asin", "rating": "overall", "timestamp": "unixReviewTime"}
_NEW = {"user_id": "user_id", "item_id": "parent_asin", "rating": "rating", "timestamp": "timestamp"}
_TYPES = {"user_id": "string", "item_id": "string", "rating": "float64", "timestamp": "int64"}


@with_options(RowOptions)
def amazon(
    path: Paths | None = None,
    batch_size: int = 1024,
    *,
    dim: int = 16,
    max_length: int = 50,
    pooling: Pooling | None = "mean",
    positive: float = 4.0,
    min_history: int = 0,
    leave_one_out: LeaveOneOut | None = None,
    **rows: Unpack[RowOptions],
) -> StreamReader:
    """Amazon reviews, of 2014 (McAuley et al., SIGIR 2015), 2018 (Ni et al., EMNLP 2019) and 2023 (Hou et al., 2024).

    Reads files with one JSON object in each line: `reviewerID`, `asin`, `overall`, `unixReviewTime` (2014 and 2018), or
    `user_id`, `parent_asin`, `rating`, `timestamp` (2023). A sample is a review; samples are in order of time. ID-type
    features are `user_id`, `item_id`, and `history`, the items that the user reviewed before, oldest first, in the
    table `item_id`. The label is `positive`; `Batch.day` is in days since 1970 (UTC).

    The files are not sorted by user, so all reviews are in memory while rows are read: 40 bytes each, about 120 while
    they are sorted. Each pass, each resumed pass and each shard reads the files from the beginning.

    Args:
        path: file, directory, glob or URL, or a list of these; None uses `find("amazon")`.
        batch_size: samples per batch.
        dim: dim of all embeddings.
        max_length: number of items of the history that count, from the newest.
        pooling: pooling of the history; None ("none" in a file) for models of sequences.
        positive: lowest rating, from 1 to 5, with the label 1. With 0 all labels are 1, so that any review is positive;
            add `negatives`.
        min_history: minimum number of earlier reviews of the user. Reviews with fewer appear in histories only.
        leave_one_out: which selected reviews of a user become samples: "test" takes the newest one, "validation" the
            one before it, "train" all earlier ones; None takes all. Histories have all earlier reviews, of any part.
        **rows: see `RowOptions`. `where` and `split` select the reviews that become samples, by `user_id`, `item_id`,
            `rating` and `timestamp` (in milliseconds); histories have all reviews. Rows are numbered as in the files.
            `require_labels=False` reads files without ratings.

    Raises:
        ConfigError: an argument is invalid.
    """
    check_number("positive", positive, 0)
    check_history_options(min_history, leave_one_out)
    ids = [IdFeature(name, dim=dim, kind="text") for name in ("user_id", "item_id")]
    time = IdFeature("timestamp", dim=1, kind="number")
    conversion = conversion_of(
        Schema([*ids, time], labels=["positive"]),
        day="timestamp",
        day_unit="ms",
        labels={"positive": f"rating >= {positive!r}"},
        **rows,
    )
    schema = Schema([*ids, history_feature(dim, "item_id", "text", max_length, pooling)], labels=["positive"])
    log = _Reviews(tuple(expand(dataset_path("amazon") if path is None else path, _SUFFIXES)), conversion)
    source = HistorySource(schema, log, "user_id", {"history": "item_id"}, min_history, leave_one_out)
    return StreamReader(schema, source, order_of(batch_size, **rows))


@dataclass(frozen=True)
class _Reviews(EventFiles):
    """See `EventLog`."""

    def events(self) -> EventColumns:
        return events_of((piece for file in self.files for piece in self._pieces(file)), self.conversion, "timestamp")

    def _pieces(self, file: File) -> Iterator[Piece]:
        import pyarrow.compute as pc

        keys = {form[name]: kind for name, kind in _TYPES.items() for form in (_OLD, _NEW)}
        for piece in json_pieces(file, keys):
            # The newer files also have a key `asin`: the id of the variant.
            form = _OLD if piece.columns[_NEW["user_id"]].null_count == piece.rows else _NEW
            columns = {name: piece.columns[key] for name, key in form.items()}
            for name in ("user_id", "item_id", "timestamp"):
                if columns[name].null_count:
                    row = piece.row + int(pc.index(pc.is_null(columns[name]), True).as_py())
                    raise DataError(
                        f"{file.path}: the object at row {row} has no {form[name]!r}. Reviews have the keys "
                        f"{', '.join(_OLD.values())}, or {', '.join(_NEW.values())}; leave out lines that lack one, "
                        "or give a file of reviews.",
                        path=file.path,
                        row=row,
                        column=form[name],
                    )
            if form is _OLD:
                columns["timestamp"] = pc.multiply(columns["timestamp"], 1_000)
            if columns["rating"].null_count == piece.rows:
                del columns["rating"]
            yield piece._replace(columns=columns)
