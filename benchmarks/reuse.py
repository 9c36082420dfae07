"""The most that a cache of rows at the NN worker could save: how often a batch meets ids of the batches before it.

    python -m benchmarks 'reuse.*' [--preset smoke|laptop|full] [--json FILE]

A copy of a row may serve later batches until it is as old as the mode allows; then it is fetched again. Each measure is
the share of distinct rows, over all tables, that need no fetch if a copy serves 4 batches after its own, in a cache
that holds every row; `details` has other ages. docs/decisions/0009-device-cache.md uses it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import numpy as np

from benchmarks import runner
from benchmarks.baselines.step_torch import Workload, generate
from benchmarks.public_data import is_here
from persia import Batch, data

AGES = (1, 2, 4, 8, 16)
AGE = 4
BATCHES = {"smoke": 12, "laptop": 100, "full": 300}

Distinct = list[np.ndarray]
"""Distinct ids of a batch, by table."""


def saved(batches: Iterable[Distinct], age: int) -> float:
    """Returns the share of distinct rows whose last fetch is at most `age` batches ago."""
    fetched: dict[tuple[int, int], int] = {}
    hits = total = 0
    for number, tables in enumerate(batches):
        for table, ids in enumerate(tables):
            total += len(ids)
            for id_ in ids.tolist():
                if number - fetched.get((table, id_), -age - 1) <= age:
                    hits += 1
                else:
                    fetched[table, id_] = number
    return hits / max(1, total)


def shares(name: str, batches: Iterable[Distinct]) -> runner.Measure:
    """Returns the measure of a stream."""
    kept = list(batches)
    shares = {age: saved(kept, age) for age in AGES}
    rows = sum(len(ids) for tables in kept for ids in tables) / max(1, len(kept))
    details = {f"age_{age}": round(share, 4) for age, share in shares.items()}
    return runner.Measure(name, shares[AGE], "fraction", details={**details, "rows_per_batch": rows})


def distinct(batches: Iterable[Batch], table_of: dict[str, str]) -> Iterator[Distinct]:
    """Yields the distinct ids of each batch."""
    for batch in batches:
        tables: dict[str, list[np.ndarray]] = {}
        for name, column in batch.id_features.items():
            tables.setdefault(table_of[name], []).append(column.values)
        yield [np.unique(np.concatenate(tables[name])) for name in sorted(tables)]


@runner.measures("reuse.step")
def step(preset: str) -> runner.Measure:
    """The work of `benchmarks/step.py`, cubic skew, of 4 of its 26 features, which are alike."""
    work = Workload(features=4, batches=min(BATCHES[preset], 100))
    return shares("reuse.step", [[np.unique(ids) for ids in samples.ids] for samples in generate(work)])


@runner.measures("reuse.zipf")
def zipf(preset: str) -> runner.Measure:
    """A million ids of Zipf exponent 1.05, batches of 4096."""
    reader = data.synthetic(
        4096 * BATCHES[preset], id_features=1, ids_per_feature=1_000_000, zipf=1.05, batch_size=4096
    )
    return shares("reuse.zipf", distinct(reader, {f.name: f.table_name for f in reader.schema.id_features}))


@runner.measures("reuse.globo")
def globo(preset: str) -> runner.Measure | None:
    """Clicks in time order, in batches of 2048."""
    if not is_here("globo_ctr"):
        return None
    reader = data.globo(batch_size=2048)
    batches = itertools.islice(reader, BATCHES[preset])
    return shares("reuse.globo", distinct(batches, {f.name: f.table_name for f in reader.schema.id_features}))
