"""Makes the files of `persia.data.globo` from the published ones.

    python -m persia.data.datasets.prepare_globo SOURCE TARGET

SOURCE is the folder `clicks` of "News Portal User Interactions by Globo.com", version 2 (de Souza Pereira Moreira,
Jannach and da Cunha, arXiv 1904.10367), unpacked:
https://www.kaggle.com/datasets/gspmoreira/news-portal-user-interactions-by-globocom.
Its terms allow academic use (education, research), no commercial use, and ask to cite the papers. With
PERSIA_DATA/globo_ctr as TARGET, readers and benchmarks find the files.

Clicks are sorted by time, user and article. Every click on an article that is new to its user is a positive. Its
negative is an article that somebody else clicked within 1,000 clicks of it, and that is neither the clicked one nor
known to the user; the first such one of up to 8 at random. Both rows have the user's last 10 articles, and come in
random order. So the popularity of the moment says little, and no row's label can be read off another column.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from persia.errors import DataError, PersiaError
from persia.printable import say

__all__ = ["main", "prepare"]

BEGIN = 1_506_826_800_000
"""Milliseconds of 2017-10-01 00:00 in Sao Paulo, at which day 0 begins."""

DAY = 86_400_000
CANDIDATES = 8
HISTORY = 10
CONTEXTS = {
    "environment": "click_environment",
    "device_group": "click_deviceGroup",
    "os": "click_os",
    "country": "click_country",
    "region": "click_region",
    "referrer": "click_referrer_type",
}
"""Columns of the published files by column of ours."""

USER, ARTICLE, TIME = "user_id", "click_article_id", "click_timestamp"

Ints = NDArray[np.int64]


def prepare(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    seed: int = 0,
    near: int = 1_000,
    least_rows: int = 50_000,
) -> list[Path]:
    """Writes `day=NN.parquet` for each day of the published clicks.

    Args:
        source: directory with the published `clicks_hour_*.csv`, also in directories within it.
        target: directory of the files, which is created.
        seed: of the negatives, and of the order in a pair.
        near: clicks before or after a click among which its negative is drawn. As many at both ends are no positives.
        least_rows: rows of a day that is written.

    Returns:
        The paths of the files.

    Raises:
        DataError: there are no such files, or one has other columns.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    clicks = _clicks(Path(source))
    random = np.random.default_rng(seed)
    positives, negatives, lengths, articles = _pairs(clicks[USER], clicks[ARTICLE], random, near)
    second = random.random(len(positives)) < 0.5  # Whether the positive is the second row of its pair.
    labels = np.stack([~second, second], axis=1)
    clicked = clicks[ARTICLE][positives]
    shown = np.where(labels, clicked[:, None], negatives[:, None])
    ends = np.concatenate([[0], np.cumsum(lengths)])
    days = (clicks[TIME][positives] - BEGIN) // DAY
    folder, written = Path(target), []
    folder.mkdir(parents=True, exist_ok=True)
    for day in np.unique(days[days >= 0]):
        of_day = np.flatnonzero(days == day)
        if 2 * len(of_day) < least_rows:
            continue
        begin, end = of_day[0], of_day[-1] + 1  # Pairs are in time order.
        history = pa.ListArray.from_arrays(
            pa.array((ends[begin : end + 1] - ends[begin]).astype(np.int32)),
            pa.array(articles[ends[begin] : ends[end]].astype(np.int32)),
        )
        rows = np.repeat(positives[begin:end], 2)
        columns = {
            "label": labels[begin:end].ravel().astype(np.int8),
            "timestamp_ms": clicks[TIME][rows],
            "user_id": clicks[USER][rows].astype(np.int32),
            "article_id": shown[begin:end].ravel().astype(np.int32),
            "history": history.take(pa.array(np.repeat(np.arange(end - begin), 2))),
            **{name: clicks[column][rows].astype(np.int16) for name, column in CONTEXTS.items()},
        }
        path = folder / f"day={day:02}.parquet"
        pq.write_table(pa.table(columns), path, compression="zstd")
        written.append(path)
    return written


def _clicks(source: Path) -> dict[str, Ints]:
    """Reads all clicks, sorted by time, user and article."""
    import pyarrow as pa
    import pyarrow.csv

    files = sorted(source.rglob("clicks_hour_*.csv"))
    if not files:
        raise DataError(
            f"There are no files clicks_hour_*.csv in {source}; give the folder `clicks` of the unpacked data set.",
            path=str(source),
        )
    names = [TIME, USER, ARTICLE, *CONTEXTS.values()]
    options = pa.csv.ConvertOptions(include_columns=names, column_types=dict.fromkeys(names, pa.int64()))
    tables = []
    for file in files:
        try:
            tables.append(pa.csv.read_csv(file, convert_options=options))
        except (pa.ArrowInvalid, pa.ArrowKeyError) as error:
            raise DataError(
                f"{file} has other columns than version 2 of the data set: {error}. It needs {', '.join(names)}.",
                path=str(file),
            ) from error
    columns: dict[str, Ints] = {name: pa.concat_tables(tables)[name].to_numpy() for name in names}
    order = np.lexsort([columns[name] for name in (ARTICLE, USER, TIME)])
    return {name: column[order] for name, column in columns.items()}


def _pairs(users: Ints, articles: Ints, random: np.random.Generator, near: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Draws a negative for each click on an article that is new to its user.

    Returns:
        By pair the number of its click, the negative article, and the length of the history; and the articles of all
        histories, newest first, one after another.
    """
    offsets = random.integers(1, near, (len(users), CANDIDATES)) * random.choice([-1, 1], (len(users), CANDIDATES))
    known: dict[int, dict[int, None]] = {}
    positives: list[int] = []
    negatives: list[int] = []
    lengths: list[int] = []
    histories: list[int] = []
    for number, (user, article) in enumerate(zip(users.tolist(), articles.tolist(), strict=True)):
        seen = known.setdefault(user, {})
        if article in seen:
            continue
        if near <= number < len(users) - near:
            drawn: list[Any] = articles[number + offsets[number]].tolist()
            negative = next((other for other in drawn if other != article and other not in seen), None)
            if negative is not None:
                newest = list(itertools.islice(reversed(seen), HISTORY))
                positives.append(number)
                negatives.append(negative)
                lengths.append(len(newest))
                histories += newest
        seen[article] = None
    arrays = (np.array(values, np.int64) for values in (positives, negatives, lengths, histories))
    return next(arrays), next(arrays), next(arrays), next(arrays)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m persia.data.datasets.prepare_globo",
        description="Make the files of persia.data.globo from the published ones.",
    )
    parser.add_argument("source", help="folder `clicks` of the published data set, with clicks_hour_*.csv")
    parser.add_argument("target", help="folder of day=00.parquet, ...; for example $PERSIA_DATA/globo_ctr")
    given = parser.parse_args(arguments)
    try:
        files = prepare(given.source, given.target)
    except (PersiaError, OSError) as error:
        say(f"persia: {error}", error=True)
        return 1
    say(f"{len(files)} days in {given.target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
