"""The next click on a news portal: `NextItem`, two towers and what was popular, in the order of time.

    python -m benchmarks 'seq.globo.*' [--preset smoke|laptop|full] [--json FILE]

seq.globo.next_item    HR@20 of the clicked article among all articles that were trained so far, without those of the
                       history: mean of all days after the first. HSTU, histories of 10, one pass.
seq.globo.two_tower    The same of two towers, whose user is the mean of the history and six features of the context.
seq.globo.popularity   The same of the most clicked articles of the hour before.

Each hour is evaluated before it is trained, on clicks at equal distances. The models have trained all hours before it,
popularity counts the last one. Details have the mean reciprocal rank, the days and the rate of training. It needs
globo_ctr, see benchmarks/globo.py.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from benchmarks import runner
from benchmarks.public_data import is_here
from persia import IdFeature, Schema, Trainer, TrainerOptions, data
from persia.data import Reader
from persia.modes import Sync
from persia.nn import models
from persia.optim import Adagrad

TOP, LENGTH, DIM, BATCH = 20, 10, 32, 256
HOUR_MS = 3_600_000
CONTEXT = ("environment", "device_group", "os", "country", "region", "referrer")
COLUMNS = ["label", "timestamp_ms", "article_id", "history", *CONTEXT]


class Size(NamedTuple):
    """Amount of data.

    Attributes:
        days: files to read.
        hours: most hours of them.
        tested: clicks of an hour that are ranked.
        trained: most clicks of an hour that are trained.
    """

    days: int
    hours: int
    tested: int
    trained: int


SIZES = {
    "smoke": Size(1, 2, 20, 512),
    "laptop": Size(4, 1_000, 200, 1_000_000),
    "full": Size(16, 1_000, 500, 1_000_000),
}


class Found(NamedTuple):
    """How high clicks rank: of each day, the mean over its hours.

    Attributes:
        hit_rate: HR@TOP.
        reciprocal_rank: mean of 1 / rank.
        clicks_per_s: rate of training; None without any.
    """

    hit_rate: list[float]
    reciprocal_rank: list[float]
    clicks_per_s: float | None


@functools.cache
def hours_of(size: Size) -> list[tuple[int, pa.Table]]:
    """Returns the clicks of each hour, with the number of its day."""
    files = data.find("globo_ctr")
    assert files is not None
    hours: list[tuple[int, pa.Table]] = []
    for day, path in enumerate(sorted(files.glob("*.parquet"))[: size.days]):
        clicks = pq.ParquetFile(path).read(COLUMNS)
        clicks = clicks.filter(pc.equal(clicks["label"], 1))
        hour = clicks["timestamp_ms"].to_numpy() // HOUR_MS
        borders = [0, *(np.flatnonzero(np.diff(hour)) + 1), len(hour)]
        hours += [(day, clicks[begin:end]) for begin, end in pairwise(borders)]
    return hours[: size.hours]


def evenly(clicks: pa.Table, count: int) -> pa.Table:
    """Returns clicks at equal distances."""
    return clicks.take(np.linspace(0, len(clicks) - 1, min(count, len(clicks))).astype(np.int64))


def features(pooling: Literal["mean"] | None) -> list[IdFeature]:
    """Returns the article and the history."""
    length = LENGTH if pooling is None else None
    history = IdFeature("history", table="article_id", pooling=pooling, max_length=length)
    return [IdFeature("article_id", dim=DIM), history]


def next_item(clicks: Reader, popular: data.ItemCatalog) -> Reader:
    """Adds negatives that were clicked in the hour before."""
    return data.shared_negatives(clicks, ["article_id"], BATCH, by="popularity", catalog=popular)


def two_tower(clicks: Reader, popular: data.ItemCatalog) -> Reader:
    """Adds the probability of each item in the hour before."""
    return data.shared_negatives(clicks, ["article_id"], by="in_batch", catalog=popular)


def next_item_model(schema: Schema) -> torch.nn.Module:
    """Returns HSTU over the history."""
    return models.NextItem(
        schema,
        backbone="hstu",
        history=[("history", "article_id")],
        newest_first=True,
        targets="newest",
        negatives=["negative_article_id"],
        log_q="log_q",
        negatives_log_q="negative_log_q",
        temperature=0.1,
    )


def two_tower_model(schema: Schema) -> torch.nn.Module:
    """Returns two towers."""
    return models.TwoTower(schema, item=["article_id"], log_q="log_q", temperature=0.1)


def trained(name: str, size: Size) -> Found:
    """Evaluates and trains a model hour by hour."""
    sampled, model = {"next_item": (next_item, next_item_model), "two_tower": (two_tower, two_tower_model)}[name]
    schema = Schema(
        [*features(None if name == "next_item" else "mean"), *(IdFeature(each, dim=8) for each in CONTEXT)]
        if name == "two_tower"
        else features(None)
    )
    torch.manual_seed(0)
    trainer: Trainer | None = None
    before: data.ItemCatalog | None = None
    of_day: dict[int, list[tuple[float, float]]] = defaultdict(list)
    clicks, seconds = 0, 0.0
    for day, hour in hours_of(size):
        hour = hour[: size.trained]
        reader = data.arrow(hour, schema, BATCH)
        counted = data.item_catalog(reader, ["article_id"])
        train = sampled(reader, before or counted)
        before = counted
        if trainer is None:
            trainer = Trainer(
                model(train.schema),
                train.schema,
                optimizer=functools.partial(torch.optim.Adam, lr=1e-3),
                embedding_optimizer=Adagrad(lr=0.1),
                mode=Sync(),
                options=TrainerOptions(progress=False, seed=0),
            )
        else:
            test = data.arrow(evenly(hour, size.tested), schema, BATCH)
            found = trainer.evaluate_retrieval(test, at=(TOP,), leave_out=["history"])
            of_day[day].append((found.hit_rate[TOP], found.mrr))
        began = time.perf_counter()
        trainer.fit(train)
        seconds += time.perf_counter() - began
        clicks += len(hour)
    return _by_day(of_day, clicks / seconds)


def popular(size: Size) -> Found:
    """Ranks articles by the clicks of the hour before; articles without any count as misses."""
    of_day: dict[int, list[tuple[float, float]]] = defaultdict(list)
    articles, counts = np.empty(0, np.int32), np.empty(0, np.int64)
    for day, hour in hours_of(size):
        hour = hour[: size.trained]
        if len(articles):
            tested = evenly(hour, size.tested)
            ranks = [
                _ranked(articles, counts, target, history)
                for target, history in zip(tested["article_id"].to_pylist(), tested["history"].to_pylist(), strict=True)
            ]
            of_day[day].append((statistics.fmean(hit for hit, _ in ranks), statistics.fmean(each for _, each in ranks)))
        articles, counts = np.unique(hour["article_id"].to_numpy(), return_counts=True)
    return _by_day(of_day, None)


def _ranked(
    articles: NDArray[np.int32], counts: NDArray[np.int64], target: int, history: Sequence[int]
) -> tuple[float, float]:
    """Returns the target's HR@TOP and reciprocal rank, with equal counts in random order."""
    count = counts[articles == target]
    if not len(count):
        return 0.0, 0.0
    competing = counts[~np.isin(articles, [each for each in history if each != target])]
    better, equal = int((competing > count[0]).sum()), int((competing == count[0]).sum())
    hit = min(1.0, max(0.0, (TOP - better) / equal))
    return hit, float((1 / np.arange(better + 1, better + equal + 1)).mean())


def _by_day(of_day: dict[int, list[tuple[float, float]]], clicks_per_s: float | None) -> Found:
    hours = [np.mean(each, 0) for _, each in sorted(of_day.items())]
    return Found([float(each[0]) for each in hours], [float(each[1]) for each in hours], clicks_per_s)


@runner.measures("seq.globo.next_item", "seq.globo.two_tower", "seq.globo.popularity")
def globo(preset: str, selected: set[str]) -> Iterator[runner.Measure]:
    """HR@20 of the next click, hour by hour, in the order of time."""
    if not is_here("globo_ctr"):
        return
    size = SIZES[preset]
    for name in ("next_item", "two_tower", "popularity"):
        if f"seq.globo.{name}" not in selected:
            continue
        found = popular(size) if name == "popularity" else trained(name, size)
        first = 1 if len(found.hit_rate) > 1 else 0
        details = {
            "MRR": statistics.fmean(found.reciprocal_rank[first:]),
            "HR@20 by day": found.hit_rate,
            "MRR by day": found.reciprocal_rank,
            "clicks_per_s": found.clicks_per_s,
        }
        yield runner.Measure(f"seq.globo.{name}", statistics.fmean(found.hit_rate[first:]), "fraction", details=details)
