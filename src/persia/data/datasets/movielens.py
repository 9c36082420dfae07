"""Reads MovieLens ratings as likes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from persia.batching.columns import number_column
from persia.data.expressions import Rule
from persia.data.files import expand
from persia.data.from_csv import CSV_SUFFIXES, CsvFormat, CsvSource
from persia.data.reader import Order, StreamReader
from persia.data.rows import Conversion
from persia.data.selection import Selection, Split
from persia.errors import DataError
from persia.schema import IdFeature, Schema

__all__ = ["movielens"]

_NAMES = ("userId", "movieId", "rating", "timestamp")
_FORMATS = {  # By what separates the fields: the layout, where "::" is read as two delimiters with nothing between.
    "::": (":", ("userId", "", "movieId", " ", "rating", "  ", "timestamp")),
    "\t": ("\t", _NAMES),
    ",": (",", _NAMES),
}
_FILES = ("ratings.csv", "ratings.dat", "u.data")


def movielens(
    path: str | os.PathLike[str],
    batch_size: int = 1024,
    *,
    dim: int = 16,
    where: Rule | None = None,
    split: Split | Mapping[str, Any] | None = None,
    shuffle_rows: int = 0,
    seed: int = 0,
    drop_last: bool = False,
    shard: tuple[int, int] = (0, 1),
    require_labels: bool = True,
) -> StreamReader:
    """MovieLens ratings in any of its forms (as `ratings.csv`, `ratings.dat`, `u.data`): like is a rating of 4 or more.

    ID-type features `user` and `movie`, label `like`, `Batch.day` in days since 1970.

    Args:
        path: a file of any name, with or without a header line, or a directory with one of these.
        batch_size: samples of a batch.
        dim: of all embeddings.
        where: only rows for which this rule over the columns of the file is true; see `parquet`.
        split: only one part of the rows; see `parquet`.
        shuffle_rows: see `parquet`.
        seed: of the permutations.
        drop_last: leave out a last batch that is not full.
        shard: (index, count): only batches i with i % count == index.
        require_labels: if False, files without labels give `labels` of shape `[batch, 0]`.

    Raises:
        DataError: the directory has none of the files.
    """
    text = os.fspath(path)
    if Path(text).is_dir():
        found = [name for name in _FILES if (Path(text) / name).exists()]
        if not found:
            raise DataError(f"{text} holds none of {', '.join(_FILES)}; give the file itself.", path=text)
        text = str(Path(text) / found[0])
    files = tuple(expand(text, (*CSV_SUFFIXES, ".dat", ".data")))
    first = ""
    for file in files:
        with file.open_text() as stream:
            first = stream.readline(1 << 16)
        if first.strip():
            break
    separator = next((separator for separator in _FORMATS if separator in first), None if first.strip() else ",")
    if separator is None:
        raise DataError(
            f"{files[0].path}: the first line {first[:80]!r} is not a rating; it takes the fields user, movie, rating "
            "and time, separated by a comma, a tab or '::'.",
            path=files[0].path,
        )
    delimiter, layout = _FORMATS[separator]
    schema = Schema([IdFeature(name, dim=dim, kind="number") for name in ("user", "movie")], labels=["like"])
    form = CsvFormat(delimiter, columns=_NAMES, labels=("rating",), transform=_movielens_columns, layouts=(layout,))
    conversion = Conversion(
        schema, day="timestamp", day_unit="s", require_labels=require_labels, selection=Selection.of(where, split)
    )
    return StreamReader(
        schema, CsvSource(files, conversion, form), Order(batch_size, shuffle_rows, seed, drop_last, shard)
    )


def _movielens_columns(columns: dict[str, Any]) -> dict[str, Any]:
    named = {"user": columns["userId"], "movie": columns["movieId"], "timestamp": columns["timestamp"]}
    if "rating" in columns:
        named["like"] = number_column("rating", columns["rating"]) >= 4.0
    return named
