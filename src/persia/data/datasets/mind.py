"""Reads MIND: impressions of news."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

from persia.batching.batch import Batch
from persia.data.files import Paths, dataset_path, expand
from persia.data.from_csv import CsvFormat, CsvSource
from persia.data.histories import history_feature
from persia.data.reader import StreamReader
from persia.data.row_options import RowOptions, conversion_of, order_of, with_options
from persia.data.rows import Piece, require_rows
from persia.errors import DataError
from persia.schema import IdFeature, Pooling, Schema
from persia.types import SourceFingerprint

__all__ = ["mind"]

_COLUMNS = ("impression_id", "user_id", "time", "history", "impressions")


@with_options(RowOptions)
def mind(
    path: Paths | None = None,
    batch_size: int = 1024,
    *,
    dim: int = 16,
    max_length: int = 50,
    pooling: Pooling | None = "mean",
    **rows: Unpack[RowOptions],
) -> StreamReader:
    """MIND (Wu et al., ACL 2020), Microsoft News: news that users were shown, and whether they clicked.

    Reads `behaviors.tsv`: tab-separated without header, in each line an impression of several news. A sample is one of
    these news. ID-type features are `user_id`, `news_id`, and `history`, the news that the user clicked before, oldest
    first, in the table `news_id`. The label is `click`; `Batch.day` is in days since 1970. Rows, in errors and for
    `shuffle_rows`, are samples.

    Args:
        path: file, directory, glob or URL, or a list of these; None uses `find("mind")`. In a directory and its
            subdirectories, the files `behaviors.tsv` are read.
        batch_size: samples per batch.
        dim: dim of all embeddings.
        max_length: number of news of the history that count, from the newest.
        pooling: pooling of the history; None ("none" in a file) for models of sequences.
        **rows: see `RowOptions`. `where` and `split` take the columns `impression_id` and `user_id`; with by="hash" and
            column="impression_id", samples of an impression stay together. `require_labels=False` reads files whose
            impressions have no clicks, such as impressions of the test set.
    """
    path = dataset_path("mind") if path is None else path
    if isinstance(path, str | os.PathLike) and Path(path).is_dir():
        path = str(Path(path) / "**" / "behaviors.tsv")
    history = history_feature(dim, "news_id", "text", max_length, pooling)
    plain = [IdFeature(name, dim=dim, kind="text") for name in ("user_id", "news_id")]
    schema = Schema([*plain, history], labels=["click"])
    conversion = conversion_of(schema, day="time", **rows)
    source = MindSource(CsvSource(tuple(expand(path, (".tsv",))), conversion, _FORMAT))
    return StreamReader(schema, source, order_of(batch_size, **rows))


_FORMAT = CsvFormat("\t", column_names=_COLUMNS, columns=_COLUMNS[1:])


@dataclass(frozen=True)
class MindSource:
    """Samples of impressions: one row of the file gives several samples."""

    impressions: CsvSource

    def fingerprint(self) -> SourceFingerprint:
        """Returns the fingerprint of the files and the selection."""
        return self.impressions.fingerprint().merged("mind")

    def chunks(self, skip: int) -> Iterator[Batch]:
        """See `RowSource.chunks`. Skipped rows are parsed but not converted."""
        source = self.impressions
        batches = source.conversion.batches(self._pieces(), skip)
        return require_rows(batches, source.files, skip, source.conversion.selection)

    def _pieces(self) -> Iterator[Piece]:
        for file in self.impressions.files:
            row = 0
            for piece in self.impressions.pieces(file):
                samples = _samples(piece, row)
                yield samples
                row += samples.rows


def _samples(piece: Piece, first: int) -> Piece:
    """Returns a row for each shown news; `first` is the number of the first row."""
    import pyarrow as pa
    import pyarrow.compute as pc

    texts = {name: column.cast(pa.string()) for name, column in piece.columns.items()}
    shown = pc.split_pattern(texts["impressions"], " ")
    news, impression = pc.list_flatten(shown), pc.list_parent_indices(shown)
    columns = {name: column.take(impression) for name, column in texts.items()}
    parts = pc.extract_regex(news, r"^(?P<news>.+)-(?P<click>[01])$")
    if 0 < parts.null_count < len(parts):
        at = int(pc.index(pc.is_null(parts), True).as_py())
        expected = "news such as N1-1 (clicked) and N2-0, or all without clicks"
        raise _refused(piece, "impressions", news[at], first + at, expected)
    if parts.null_count:
        columns["news_id"] = news
    else:
        columns["news_id"], columns["click"] = pc.struct_field(parts, "news"), pc.struct_field(parts, "click")
    columns["history"] = pc.split_pattern(texts["history"], " ").take(impression)
    dates = pc.struct_field(pc.extract_regex(texts["time"], r"^(?P<date>\d+/\d+/\d+) "), "date")
    columns["time"] = pc.strptime(dates, format="%m/%d/%Y", unit="s", error_is_null=True).take(impression)
    if columns["time"].null_count:
        at = int(pc.index(pc.is_null(columns["time"]), True).as_py())
        value = texts["time"].take(impression)[at]
        raise _refused(piece, "time", value, first + at, "times such as 11/13/2019 8:36:57 AM")
    return Piece(piece.file, first, columns, len(news))


def _refused(piece: Piece, column: str, value: Any, row: int, expected: str) -> DataError:
    return DataError(
        f"{piece.file.path}: column {column!r} has {value.as_py()!r} at row {row}; it takes {expected}. Correct it, or "
        "leave the line out.",
        path=piece.file.path,
        column=column,
        row=row,
        value=value.as_py(),
    )
