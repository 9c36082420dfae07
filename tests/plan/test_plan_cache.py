"""Distinct ids and missing rows, against draws and an LRU."""

from collections import OrderedDict

import numpy as np
import pytest

from persia.data.zipf import Zipf
from persia.plan.distinct_ids import distinct_ids, missing_share


@pytest.mark.parametrize("zipf", [0.0, 1.05])
def test_distinct_ids(zipf):
    drawn = Zipf(20_000, zipf) if zipf else None
    rng = np.random.default_rng(0)
    batches = [drawn.sample(rng, 5000) if drawn else rng.integers(0, 20_000, 5000) for _ in range(10)]
    mean = np.mean([len(np.unique(batch)) for batch in batches])
    assert distinct_ids(20_000, zipf, 5000) == pytest.approx(mean, rel=0.02)


@pytest.mark.parametrize(("zipf", "share"), [(0.0, 0.3), (1.05, 0.1), (1.05, 0.5)])
def test_missing_rows_are_those_of_an_lru(zipf, share):
    rows, samples = 20_000, 500
    drawn = Zipf(rows, zipf) if zipf else None
    rng = np.random.default_rng(1)
    memory, capacity = OrderedDict(), int(rows * share)
    missed = asked = 0
    for batch in range(400):
        for row in np.unique(drawn.sample(rng, samples) if drawn else rng.integers(0, rows, samples)).tolist():
            asked += batch >= 200
            missed += batch >= 200 and row not in memory
            memory[row] = True
            memory.move_to_end(row)
            if len(memory) > capacity:
                memory.popitem(last=False)
    assert missing_share(rows, capacity, zipf, samples) == pytest.approx(missed / asked, rel=0.06)


def test_nothing_is_missing_where_all_fits():
    assert missing_share(1000, 1000, 1.05, 10) == 0.0
