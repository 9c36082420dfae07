"""Counts of ids that are not admitted yet, in a store with other PSs, shards and counters than before."""

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from persia import batching
from persia.checkpoint import AdmissionSketches, sketches
from persia.store import NativeStore, TableConfig
from persia.types import BucketMap
from support.examples import examples
from support.stores import lookup

NEEDED = 5


def store_of(shards, capacity):
    store = NativeStore(1)
    store.create_table(
        TableConfig(
            "t", 1, capacity=max(capacity, shards), shards=shards, admission="min_frequency", admission_value=NEEDED
        )
    )
    return store


def split(ids, stores):
    owners = batching.owners("t", ids, BucketMap.even(len(stores)))
    return [(store, ids[owners == number]) for number, store in enumerate(stores)]


def pieces_of(stores, part):
    """As a checkpoint has them: arrays in parts, with others between."""
    for number, store in enumerate(stores):
        found = []
        for shard in range(store.config(0).resolved_shards):
            for array in ("clocks", "sketch"):
                values = store.export_state(0, shard)[array]
                found += [
                    {
                        "table": "t",
                        "shard": shard,
                        "array": array,
                        "start": start,
                        "values": values[start : start + part],
                    }
                    for start in range(0, len(values), part)
                ]
        middle = len(found) // 2  # Two parts.
        yield number, found[:middle]
        yield number, found[middle:]


LAYOUTS = st.lists(st.tuples(st.sampled_from([1, 2, 8]), st.sampled_from([600, 3_000, 17_000])), min_size=1, max_size=3)


@settings(max_examples=examples(40), deadline=None)
@given(before=LAYOUTS, after=LAYOUTS, seed=st.integers(0, 99), part=st.sampled_from([1000, 1 << 20]))
def test_no_id_is_admitted_late_and_few_are_early(before, after, seed, part):
    random = np.random.default_rng(seed)
    old, new = [store_of(*layout) for layout in before], [store_of(*layout) for layout in after]
    ids = random.integers(0, 2**64, 60, dtype=np.uint64)
    occurred = random.integers(0, NEEDED, len(ids))
    for store, part_ids in split(np.repeat(ids, occurred), old):
        lookup(store, part_ids, True)
    original = sketches.server_pieces
    sketches.server_pieces = lambda reader: pieces_of(old, part)
    try:
        merged = AdmissionSketches(None)
    finally:
        sketches.server_pieces = original
    assert "t" in merged
    assert "u" not in merged
    assert 0 <= merged.used("t") < 0.3
    for store in new:
        shards = store.config(0).resolved_shards
        for shard in range(shards):
            state = store.export_state(0, shard)
            state["sketch"] = merged.of_shard("t", shard, shards, len(state["sketch"]))
            store.import_state(0, shard, state)
    admitted_at = {}
    for occurrence in range(1, NEEDED + 1):
        for store, part_ids in split(ids, new):
            lookup(store, part_ids, True)
            for id_, found in zip(part_ids, store.contains(0, part_ids), strict=True):
                if found:
                    admitted_at.setdefault(int(id_), occurrence)
    early = Counter(NEEDED - count - admitted_at[int(id_)] for id_, count in zip(ids, occurred, strict=True))
    assert min(early) >= 0, early  # 0: exactly at the NEEDED-th occurrence.
    assert early[0] >= 0.95 * len(ids), early
