"""Hit rates of eviction policies, on streams of ids as a store meets them: the distinct ids of each batch.

    python -m benchmarks 'store.hit_rates.*' [--preset smoke|laptop|full] [--json FILE]

A name ends in the stream and the capacity, in percent of the distinct ids of the stream. The value is the hit rate of
exact LRU; the details have those of the policies of `eviction.py`, of the store itself with each of its policies, and
of the store if it gives a row to an id from its second appearance on only. Repetitions within a batch do not count, as
a worker removes them; first appearances do, so the hit rate of the optimum is below 1 at any capacity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pyarrow.parquet as parquet

from benchmarks import runner
from benchmarks.eviction import POLICIES
from benchmarks.public_data import is_here
from benchmarks.store import ids_of
from persia import data
from persia.store import NativeStore, TableConfig

PERCENT = (1, 5, 10, 25)
IDS = {"smoke": 10_000, "laptop": 1_000_000, "full": 8_000_000}
"""Length of a stream, in ids of batches whose repetitions have been removed."""
SAMPLES = {"smoke": 100, "laptop": 1024, "full": 1024}
"""Per batch of globo_ctr; Zipf streams have 4 ids a sample."""
VOCABULARY = 1_000_000
CHURN_EVERY, CHURN = 10, 0.01
"""Batches after which a share of the ranks gets ids that have not been there before."""

Batches = Iterator[np.ndarray]


def zipf(exponent: float, samples: int, churn: float = 0.0) -> Batches:
    """Batches of ids whose frequency is a power of their rank; each 10 batches, `churn` of all ranks get new ids."""
    random = np.random.default_rng(0)
    weights = np.cumsum(np.arange(1, VOCABULARY + 1, dtype=np.float64) ** -exponent)
    id_of_rank = random.permutation(VOCABULARY)
    first_new, number = VOCABULARY, 0
    while True:
        yield id_of_rank[np.searchsorted(weights, random.random(4 * samples) * weights[-1])]
        number += 1
        if churn and number % CHURN_EVERY == 0:
            changed = random.random(VOCABULARY) < churn
            id_of_rank[changed] = np.arange(first_new, first_new + changed.sum())
            first_new += int(changed.sum())


def globo(column: str, samples: int) -> Batches:
    """Batches of globo_ctr in time order: users, or the articles of a click and of its history, which share a table."""
    directory = data.find("globo_ctr")
    assert directory is not None
    columns = ["user_id"] if column == "user" else ["article_id", "history"]
    for path in sorted(directory.glob("*.parquet")):
        for part in parquet.ParquetFile(path).iter_batches(samples, columns=columns):
            first = part.column(0).to_numpy()
            yield first if column == "user" else np.concatenate([first, part.column(1).flatten().to_numpy()])


STREAMS: dict[str, Callable[[int], Batches]] = {
    "globo_article": partial(globo, "article"),
    "globo_user": partial(globo, "user"),
    "zipf_1.05": partial(zipf, 1.05),
    "zipf_1.2": partial(zipf, 1.2),
    "zipf_1.05_churn": partial(zipf, 1.05, churn=CHURN),
}


def distinct_by_batch(batches: Batches, ids: int) -> list[np.ndarray]:
    """The ids of each batch once, in order of first appearance, until there are `ids` of them; numbered from 0."""
    taken, count = [], 0
    for batch in batches:
        _, first = np.unique(batch, return_index=True)
        taken.append(batch[np.sort(first)])
        count += len(first)
        if count >= ids:
            break
    _, numbers = np.unique(np.concatenate(taken), return_inverse=True)
    return np.split(numbers, np.cumsum([len(batch) for batch in taken])[:-1])


def hits_of_the_store(batches: list[np.ndarray], capacity: int, **settings: Any) -> int:
    """Hits of a table of this capacity. Rows of one request are equally recent, and each shard evicts for itself."""
    store = NativeStore()
    store.create_table(TableConfig("table", 1, capacity=capacity, optimizer="sgd", **settings))
    for batch in batches:
        store.lookup([0], [ids_of(batch)], True)
    return store.statistics(0)["hits"]


def hit_rates(name: str, preset: str) -> Iterator[runner.Measure]:
    """Of one stream, at each capacity."""
    if name.startswith("globo") and not is_here("globo_ctr"):
        return
    batches = distinct_by_batch(STREAMS[name](SAMPLES[preset]), IDS[preset])
    ids = np.concatenate(batches).tolist()
    distinct = max(ids) + 1
    for percent in PERCENT:
        capacity = max(1, distinct * percent // 100)
        rates = {policy: hits(ids, capacity) / len(ids) for policy, hits in POLICIES.items()}
        rates["store"] = hits_of_the_store(batches, capacity) / len(ids)
        rates["store_midpoint"] = hits_of_the_store(batches, capacity, eviction="midpoint") / len(ids)
        second = hits_of_the_store(batches, capacity, admission="min_frequency", admission_value=2)
        rates["store_min_frequency_2"] = second / len(ids)
        details = {**rates, "ids": len(ids), "distinct": distinct, "capacity": capacity}
        yield runner.Measure(f"store.hit_rates.{name}.{percent}", rates["lru"], "fraction", details=details)


for _stream in STREAMS:
    runner.measures(*(f"store.hit_rates.{_stream}.{percent}" for percent in PERCENT))(partial(hit_rates, _stream))
