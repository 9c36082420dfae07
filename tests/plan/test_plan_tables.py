"""Bytes of tables, against a store that has the rows."""

import numpy as np
import pytest

from persia import IdFeature, Schema
from persia.errors import ConfigError
from persia.plan.table_bytes import PAGE_BYTES, bytes_of, disk_row_bytes, index_slots, planned_tables
from persia.schema import SGD, Adagrad, Adam, Buckets, RowwiseAdagrad, Table, TimePart
from persia.store import NativeStore, TableConfig


def planned(rows, dim=16, dtype="float32", optimizer=None, **options):
    schema = Schema([IdFeature("item")], tables=[Table("item", dim, dtype=dtype, **options)])
    (table,) = planned_tables(schema, optimizer or Adagrad(0.05), {"item": rows} if rows else {}, False)
    return table


def stored(rows, config):
    store = NativeStore(1)
    store.create_table(config)
    ids = np.arange(rows, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    store.lookup([0], [ids], True, [np.empty((rows, config.row_words), np.float32)])
    return store


@pytest.mark.parametrize(
    ("dim", "dtype", "optimizer"),
    [
        (16, "float32", Adagrad(0.05)),
        (5, "bfloat16", RowwiseAdagrad(0.05)),
        (8, "float16", Adam(0.01)),
        (8, "bfloat16", Adam(0.01)),
        (3, "float32", SGD(0.1)),
    ],
)
@pytest.mark.parametrize("last_steps", [False, True])
def test_memory_is_what_the_store_counts(dim, dtype, optimizer, last_steps):
    rows = 60_000
    table = planned(rows, dim, dtype, optimizer)._replace(last_steps=last_steps)
    store = stored(rows, table.config)
    if last_steps:
        store.keep_last_steps(0)
    # Shards are not equally large, so some have grown their index before others.
    assert bytes_of(table, 1).memory == pytest.approx(store.memory_bytes(0), rel=0.03)
    slot = 8 * sum(index_slots(rows // 8, 1 << 27) for _ in range(8))
    assert store.memory_bytes(0) - slot == pytest.approx(rows * table.row_bytes + 8 * 20_480, rel=0.03)


def test_a_shard_grows_its_index_as_the_plan_says():
    config = TableConfig("item", 1, shards=1, optimizer="sgd")
    store = NativeStore(1)
    store.create_table(config)
    out = np.empty((200, 1), np.float32)
    for start in range(0, 12_000, 200):
        ids = np.arange(start, start + 200, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        store.lookup([0], [ids], True, [out])
        rows = start + 200
        table = planned(rows)._replace(config=config)
        # What a shard has besides rows: header, marks of changes, and the index.
        slots = (store.memory_bytes(0) - rows * table.row_bytes - 20_480) / 8
        assert index_slots(rows, config.capacity) == pytest.approx(slots, rel=0.05, abs=300), rows


def test_the_index_ends_at_its_capacity():
    assert index_slots(1_000_000, 1_000_000) == 1_250_064
    assert index_slots(10, 10) == 64


def test_large_shards_leave_a_part_of_their_last_pages_unused():
    table = planned(4_000_000)
    plain = 4_000_000 * table.row_bytes + 8 * (20_480 + 8 * index_slots(500_000, 1 << 27))
    assert bytes_of(table, 1).memory == plain + 8 * PAGE_BYTES
    assert bytes_of(planned(1000), 1).memory < 1000 * table.row_bytes + 8 * 40_000


def test_rows_beyond_memory_have_slots_bits_and_disk_records():
    table = planned(2_000_000)
    whole, spilled = bytes_of(table, 2), bytes_of(table, 2, 500_000)
    assert (whole.disk, whole.memory_rows, spilled.memory_rows) == (0, 2_000_000, 500_000)
    saved = 1_500_000 * table.row_bytes
    assert whole.memory - spilled.memory == pytest.approx(saved - 1_500_000 * 9 / 16, rel=0.02)
    assert spilled.memory - 500_000 * table.row_bytes <= 2_000_000 * 14 + (40 << 20)
    # 8 bytes of header, 16 + 64 + 64 of the row, two thirds of the records live.
    assert disk_row_bytes(table) == pytest.approx(152 * 1.5, rel=0.01)
    assert spilled.disk == pytest.approx(1_500_000 * 152 * 1.5, rel=0.01)
    assert spilled.checkpoint == whole.checkpoint == 2_000_000 * (8 + 64 + 64 + 12)


def test_large_records_have_a_block_of_their_own():
    table = planned(1000, dim=4096, optimizer=Adam(0.01))
    record = 8 + 16 + 4 * 3 * 4096
    assert disk_row_bytes(table) == pytest.approx((64 << 10) * 1.5)
    assert record < 64 << 10


def test_records_do_not_have_last_steps_twice():
    table = planned(1000)
    assert disk_row_bytes(table._replace(last_steps=True)) == disk_row_bytes(table)


def test_tables_need_a_number_of_rows():
    with pytest.raises(ConfigError, match=r"--rows item=N, or declare its capacity"):
        planned(None)
    assert planned(None, capacity=5000).rows == 5000
    schema = Schema([IdFeature("item", dim=4)])
    with pytest.raises(ConfigError, match=r"Invalid --rows itme: there is no such table; expected one of: item"):
        planned_tables(schema, Adagrad(0.05), {"itme": 5}, False)


def test_more_rows_than_a_ps_keeps_by_default_are_planned_for():
    table = planned(int(781.25e9), dim=128, dtype="bfloat16", optimizer=RowwiseAdagrad(0.05))
    size = bytes_of(table, 30)
    assert 284 * table.rows < size.memory < 292 * table.rows


def test_buckets_and_parts_of_times_have_a_known_number_of_rows():
    schema = Schema(
        [
            IdFeature("quantiles", 4, bucketize=Buckets("price", quantiles=16), fill=16),
            IdFeature("edges", 4, bucketize=Buckets("price", edges=(1, 2))),
            IdFeature("hour", 4, time=TimePart("ts", "hour"), table="times"),
            IdFeature("weekday", 4, time=TimePart("ts", "weekday"), table="times"),
        ]
    )
    tables = planned_tables(schema, Adagrad(0.05), {}, False)
    assert {table.config.name: table.rows for table in tables} == {"quantiles": 17, "edges": 3, "times": 31}
    for feature in (
        IdFeature("x", 4, bucketize=Buckets("price", width=1)),
        IdFeature("x", 4, time=TimePart("ts", "year")),
    ):
        with pytest.raises(ConfigError, match="rows of table 'x' is unknown"):
            planned_tables(Schema([feature]), Adagrad(0.05), {}, False)
