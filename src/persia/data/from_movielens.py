"""MovieLens ratings as likes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from persia.data.files import expand
from persia.data.from_csv import CSV_SUFFIXES, CsvFormat, CsvSource
from persia.data.reader import Order, StreamReader
from persia.data.rows import Conversion
from persia.errors import DataError
from persia.schema import IdFeature, Schema

__all__ = ["movielens"]

_MOVIELENS = {
    "ratings.csv": (",", None, ("userId", "movieId", "rating", "timestamp")),
    "ratings.dat": (
        ":",
        ("user", "", "movie", " ", "rating", "  ", "timestamp"),
        ("user", "movie", "rating", "timestamp"),
    ),
    "u.data": ("\t", ("user", "movie", "rating", "timestamp"), ("user", "movie", "rating", "timestamp")),
}


def movielens(
    path: str | os.PathLike[str],
    batch_size: int = 1024,
    *,
    dim: int = 16,
    shuffle_rows: int = 0,
    seed: int = 0,
    drop_last: bool = False,
    shard: tuple[int, int] = (0, 1),
) -> StreamReader:
    """MovieLens ratings in any of its forms (`ratings.csv`, `ratings.dat`, `u.data`): like is a rating of 4 or more.

    ID-type features `user` and `movie`, label `like`, `Batch.day` in days since 1970.

    Args:
        path: the file, or a directory with one of these.
        batch_size: samples of a batch.
        dim: of all embeddings.
        shuffle_rows: see `parquet`.
        seed: of the permutations.
        drop_last: leave out a last batch that is not full.
        shard: (index, count): only batches i with i % count == index.

    Raises:
        DataError: the directory has none of the files.
    """
    text = os.fspath(path)
    form_name = text.replace("\\", "/").rsplit("/", 1)[-1].removesuffix(".gz")
    if form_name not in _MOVIELENS:
        found = [name for name in _MOVIELENS if (Path(text) / name).exists()]
        if not found:
            raise DataError(f"{text} holds none of {', '.join(_MOVIELENS)}; give the file itself.", path=text)
        text, form_name = str(Path(text) / found[0]), found[0]
    delimiter, names, (user, movie, rating, time) = _MOVIELENS[form_name]
    schema = Schema([IdFeature("user", dim=dim), IdFeature("movie", dim=dim)], labels=["like"])
    types = {user: "uint64", movie: "uint64", rating: "double", time: "int64"}
    form = CsvFormat(delimiter, names, frozenset(), types=types, transform=_movielens_columns)
    conversion = Conversion(schema, day="timestamp", day_unit="s")
    return StreamReader(
        schema,
        CsvSource(tuple(expand(text, CSV_SUFFIXES)), conversion, form),
        Order(batch_size, shuffle_rows, seed, drop_last, shard),
    )


def _movielens_columns(columns: dict[str, Any]) -> dict[str, Any]:
    import pyarrow.compute as pc

    user, movie, rating, time = columns.values()
    return {"user": user, "movie": movie, "like": pc.greater_equal(rating, 4.0), "timestamp": time}
