"""The streams of the benchmarks of a full table do what their targets assume."""

import numpy as np
import pytest
from benchmarks.eviction import lru, midpoint

from benchmarks import hit_rates, store_pauses


@pytest.mark.parametrize(("eviction", "requests"), [("lru", 50), ("midpoint", 250)])
def test_each_new_id_evicts_one_row_and_no_other_misses(eviction, requests):
    """By midpoint insertion also once more ids have come than rows are not in use: those new ones evict one another."""
    rows, size = 40_000, 1000
    store = store_pauses.in_use(rows, store_pauses.capacity_of_a_full_table(rows), eviction=eviction)
    stream = store_pauses.Stream(rows, size)
    for _ in range(10):  # the margin of the capacity: some rows left before they were in use
        store.lookup([0], [next(stream)], True)
    full, before = store.size(0), store.statistics(0)
    for _ in range(requests):
        store.lookup([0], [next(stream)], True)
    after = store.statistics(0)
    assert store.size(0) == full == store_pauses.capacity_of_a_full_table(rows)
    assert after["misses"] - before["misses"] == after["evicted"] - before["evicted"] == requests * size // 10
    assert store_pauses.what_new_ids_did(before, after, size) == {"evicted_per_new": 1, "known_misses": 0}


def test_a_pause_is_beyond_the_median():
    assert store_pauses.pause([0.001] * 100) == 0
    assert store_pauses.pause([0.001] * 10_000 + [1.0] * 100) == pytest.approx(0.999)


def test_a_stream_has_each_id_once_a_batch():
    batches = hit_rates.distinct_by_batch(iter([np.array([7, 9, 7]), np.array([9, 9]), np.array([3])]), 3)
    assert [batch.tolist() for batch in batches] == [[0, 1], [1]]


def test_new_ids_take_over_ranks():
    stream = hit_rates.zipf(1.05, 50, churn=0.5)
    batches = [next(stream) for _ in range(3 * hit_rates.CHURN_EVERY)]
    first, last = batches[: hit_rates.CHURN_EVERY], batches[-hit_rates.CHURN_EVERY :]
    assert max(map(np.max, first)) < hit_rates.VOCABULARY
    assert 0.6 < np.mean(np.concatenate(last) >= hit_rates.VOCABULARY) < 0.9


def test_the_store_evicts_nearly_as_exact_lru():
    batches = hit_rates.distinct_by_batch(hit_rates.zipf(1.2, 100), 20_000)
    ids = np.concatenate(batches).tolist()
    assert hit_rates.hits_of_the_store(batches, 2000) == pytest.approx(lru(ids, 2000), rel=0.01)


@pytest.mark.parametrize("capacity", [1000, 4000])
def test_the_store_evicts_nearly_as_by_midpoint_insertion(capacity):
    batches = hit_rates.distinct_by_batch(hit_rates.zipf(1.05, 100), 40_000)
    ids = np.concatenate(batches).tolist()
    hits = hit_rates.hits_of_the_store(batches, capacity, eviction="midpoint")
    assert hits == pytest.approx(midpoint(ids, capacity), rel=0.04)
    assert hits > 1.05 * lru(ids, capacity)
