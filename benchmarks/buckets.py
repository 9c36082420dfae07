"""How evenly buckets share ids among embedding PSs, and how many rows move with them.

    python -m benchmarks 'scale.*' ps.imbalance_patterns [--preset smoke|laptop|full] [--json FILE]

Nothing is timed: ids are counted.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from benchmarks import runner
from persia import batching
from persia.types import BucketMap, Ids

ROWS = {"smoke": 200_000, "laptop": 2_000_000, "full": 20_000_000}
STRIDES = (1, 10, 4096, 2**20, 2**32, 3**20, 2**44 - 1)
"""Ids are multiples of these, as numbers from databases, or several numbers in one, are."""


def patterns(count: int) -> Iterator[tuple[int, Ids]]:
    """Yields strides, and distinct ids with them."""
    for stride in STRIDES:
        yield stride, np.unique(np.arange(count, dtype=np.uint64) * np.uint64(stride))  # Products wrap around.


@runner.measures("scale.moved")
def moved(preset: str) -> runner.Measure:
    """Share of the rows that move when a PS joins four: the largest over patterns of ids."""
    before = BucketMap.even(4)
    after = before.moved(5)
    shares = {}
    for stride, ids in patterns(ROWS[preset]):
        changed = batching.owners("item", ids, before) != batching.owners("item", ids, after)
        shares[str(stride)] = float(changed.mean())
    of_buckets = float((before.owners != after.owners).mean())
    details = {"rows": ROWS[preset], "of_buckets": of_buckets, "by_stride": shares}
    return runner.Measure("scale.moved", max(shares.values()), "fraction", at_most=0.21, details=details)


@runner.measures("ps.imbalance_patterns")
def imbalance(preset: str) -> runner.Measure:
    """Rows of the largest PS over the mean: the largest ratio over patterns of ids, tables and maps."""
    eight = BucketMap.even(8)
    maps = {
        "8": eight,
        "8, then 5": eight.moved(5),
        "8, then 5, then 11": eight.moved(5).moved(11),
        "100": BucketMap.even(100),
    }
    ratios = {}
    for (_, ids), table in itertools.product(patterns(ROWS[preset]), ("item", "user")):
        buckets = batching.buckets_of(table, ids)
        for name, each in maps.items():
            counts = np.bincount(each.owners[buckets], minlength=each.servers)
            key = f"{name} PSs"
            ratios[key] = max(ratios.get(key, 0.0), float(counts.max() / counts.mean()))
    details = {"of": "rows of a PS, the largest and the mean", "rows": ROWS[preset], "by_map": ratios}
    return runner.Measure("ps.imbalance_patterns", max(ratios.values()), "ratio", at_most=1.06, details=details)
