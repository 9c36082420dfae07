"""Reads MovieLens ratings as likes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Unpack

from persia.batching.numbers import number_column
from persia.data.files import expand
from persia.data.from_csv import CSV_SUFFIXES, CsvFormat, CsvSource
from persia.data.reader import StreamReader
from persia.data.row_options import RowOptions, conversion_of, order_of, with_options
from persia.errors import DataError
from persia.schema import IdFeature, Schema

__all__ = ["movielens"]

_NAMES = ("userId", "movieId", "rating", "timestamp")
_FORMATS = {  # Layout by field separator. "::" is read as two delimiters with an empty field between them.
    "::": (":", ("userId", "", "movieId", " ", "rating", "  ", "timestamp")),
    "\t": ("\t", _NAMES),
    ",": (",", _NAMES),
}
_FILES = ("ratings.csv", "ratings.dat", "u.data")


@with_options(RowOptions)
def movielens(
    path: str | os.PathLike[str],
    batch_size: int = 1024,
    *,
    dim: int = 16,
    **rows: Unpack[RowOptions],
) -> StreamReader:
    """MovieLens ratings, from `ratings.csv`, `ratings.dat` or `u.data`; a like is a rating of 4 or more.

    ID-type features `user` and `movie`, label `like`, `Batch.day` in days since 1970.

    Args:
        path: a file of any name, with or without a header line, or a directory with one of these files.
        batch_size: samples per batch.
        dim: dim of all embeddings.
        **rows: see `RowOptions`.

    Raises:
        DataError: the directory has none of the files.
    """
    text = os.fspath(path)
    if Path(text).is_dir():
        present = [name for name in _FILES if (Path(text) / name).exists()]
        if not present:
            raise DataError(f"{text} holds none of {', '.join(_FILES)}; give the file itself.", path=text)
        text = str(Path(text) / present[0])
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
    conversion = conversion_of(schema, day="timestamp", day_unit="s", **rows)
    return StreamReader(schema, CsvSource(files, conversion, form), order_of(batch_size, **rows))


def _movielens_columns(columns: dict[str, Any]) -> dict[str, Any]:
    named = {"user": columns["userId"], "movie": columns["movieId"], "timestamp": columns["timestamp"]}
    if "rating" in columns:
        named["like"] = number_column("rating", columns["rating"]) >= 4.0
    return named
