"""Eviction by midpoint insertion: rows of ids that come once leave before those of ids that have come again."""

import numpy as np
import pytest

from persia.errors import ConfigError, StoreError
from persia.schema import Days, Table
from persia.store import NativeStore, ReferenceStore, TableConfig

HOT = np.arange(500, dtype=np.uint64)


def after_a_scan(eviction):
    """Returns how many of 500 rows that have come twice are left after 20,000 ids that come once, of 1,000 rows."""
    store = NativeStore()
    config = TableConfig("t", 4, capacity=1000, shards=1, optimizer="sgd", eviction=eviction)
    table = store.create_table(config)
    for id_ in range(1000):
        store.lookup([table], [np.array([id_], np.uint64)], True)
    store.lookup([table], [HOT], True)
    for first in range(1000, 21_000, 100):
        store.lookup([table], [np.arange(first, first + 100, dtype=np.uint64)], True)
    assert store.size(table) == 1000
    assert store.statistics(table)["evicted"] == 20_000
    return int(store.contains(table, HOT).sum())


def test_ids_that_come_once_displace_few_others():
    assert after_a_scan("lru") == 0
    assert after_a_scan("midpoint") >= 480


def test_what_needs_the_time_of_the_last_use_is_refused():
    for more in ({"ttl": 5}, {"memory_rows": 100}):
        with pytest.raises(ConfigError, match='eviction must be "lru" with ttl or memory_rows'):
            TableConfig("t", 4, capacity=1000, eviction="midpoint", **more)
    for more in ({"ttl": Days(1)}, {"spill": "/mnt"}):
        with pytest.raises(ConfigError, match="does not go with ttl or spill"):
            Table("t", 4, eviction="midpoint", **more)
    with pytest.raises(ConfigError, match=r"Invalid Table\('t'\).eviction = 'fifo'; expected one of: lru, midpoint"):
        Table("t", 4, eviction="fifo")
    with pytest.raises(StoreError, match="use NativeStore"):
        ReferenceStore().create_table(TableConfig("t", 4, eviction="midpoint"))
