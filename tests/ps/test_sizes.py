"""Capacities of a cluster: how they are divided among PSs, and when they are refused."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import persia
from persia.batching import owners
from persia.errors import ConfigError
from persia.memory import Memory, host_memory
from persia.modes import Sync
from persia.nn import EmbeddingCollection
from persia.optim import SGD, Adagrad, Adam, RowwiseAdagrad
from persia.ps import EmbeddingServer, ServerOptions
from persia.ps.memory_checks import check_free, check_share
from persia.ps.shares import ADDRESS_SPACE, LEAST_ROWS, Shares, divide, divide_here, rows_of_undeclared
from persia.ps.sizes import MIN_SHARE, TableSize, declared_sizes, size_of, text_of_bytes
from persia.ps.table_configs import table_config
from persia.schema import IdFeature, Schema, Table
from persia.store import MAX_ROWS, ROW_OVERHEAD
from persia.testing import Threads
from persia.types import BucketMap
from support.several_ps import Several

GIB = 1 << 30
HOST = "the memory of the host"


def memory(total, free=None):
    return Memory(total, total if free is None else free, HOST)


def size(rows, row_bytes=100, name="item"):
    return TableSize(name, rows, row_bytes, 4, 4)


# --- dividing --------------------------------------------------------------------------------------------------------

rows_of_tables = st.lists(st.integers(1, 10**12), min_size=1, max_size=5)


@given(rows_of_tables, st.integers(1, 40))
def test_shares_of_equal_memory_add_up_and_are_equal(rows, count):
    sizes = [size(n, name=f"t{i}") for i, n in enumerate(rows)]
    shares = divide(sizes, [None] * count)
    assert len(shares) == count
    for one in sizes:
        mine = [share[one.name] for share in shares]
        if one.rows > count * MIN_SHARE:
            assert sum(mine) == one.rows
            assert max(mine) - min(mine) <= 1
        else:
            assert set(mine) == {min(one.rows, MIN_SHARE)}


@given(rows_of_tables, st.lists(st.integers(1, 2000), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_shares_fit_add_up_and_follow_the_memory_not_the_order(rows, memories, random):
    """PSs with too little memory for an equal share are full, and the others have equal shares."""
    sizes = [size(n, random.choice((50, 168, 16_424)), f"t{i}") for i, n in enumerate(rows)]
    limits = [memory(m * GIB) for m in memories]
    floor = sum(min(MIN_SHARE, one.rows) * one.row_bytes for one in sizes)
    have = sum(one.total for one in limits)
    if sum(one.bytes for one in sizes) > have:
        with pytest.raises(ConfigError) as caught:
            divide(sizes, limits)
        assert caught.value.fields["wanted"] > caught.value.fields["memory"] == have
        return
    assume(sum(one.bytes for one in sizes) < have - floor * len(limits))  # Else shares of 1,024 rows may be too much.
    shares = divide(sizes, limits)
    slack = sum(one.row_bytes for one in sizes)  # Rounding, at most one row of each table.
    used = [sum(share[one.name] * one.row_bytes for one in sizes) for share in shares]
    level = max(used)
    for mine, limit in zip(used, limits, strict=True):
        assert mine <= max(limit.total, floor) + slack + floor
        assert mine >= min(limit.total, level) - 2 * slack - floor
    for one in sizes:
        mine = [share[one.name] for share in shares]
        assert min(mine) >= min(one.rows, MIN_SHARE)
        if min(mine) > MIN_SHARE:
            assert sum(mine) == one.rows
    order = list(range(len(limits)))
    random.shuffle(order)
    again = divide(sizes, [limits[number] for number in order])
    for one in sizes:
        by_memory = sorted((limits[n].total, share[one.name]) for n, share in enumerate(shares))
        shuffled = sorted((limits[n].total, share[one.name]) for n, share in zip(order, again, strict=True))
        for (total, mine), (other, theirs) in zip(by_memory, shuffled, strict=True):
            assert total == other
            assert abs(mine - theirs) <= 1  # Which of several alike gets what is left over depends on the rank.


def test_a_host_with_more_memory_gets_no_larger_share():
    assert divide([size(10_000)], [memory(10 * GIB), memory(GIB)]) == [{"item": 5000}, {"item": 5000}]


def test_a_share_that_does_not_fit_goes_to_others(caplog):
    sizes = [size(1_000_000), size(2_000_000, 200, "user")]  # 500 MB
    shares = divide(sizes, [memory(100_000_000), memory(GIB), memory(GIB)])
    assert shares == [
        {"item": 200_000, "user": 400_000},
        {"item": 400_000, "user": 800_000},
        {"item": 400_000, "user": 800_000},
    ]
    assert "too small for an equal share of the tables: PS 0 has 95.4 MiB (" in caplog.text
    assert "keeps 60 % of one. Each PS owns an equal part of the ids, so these evict rows" in caplog.text
    assert "or lower `capacity` to 60.000 % of what is declared" in caplog.text
    caplog.clear()
    sixty = [one._replace(rows=one.rows * 6 // 10) for one in sizes]
    assert len({tuple(share.items()) for share in divide(sixty, [memory(100_000_000), memory(GIB), memory(GIB)])}) == 1
    divide([size(1_000_000)], [None, memory(GIB), None])
    assert not caplog.text


@given(rows_of_tables, st.lists(st.integers(0, 200_000), min_size=1, max_size=6))
def test_a_ps_without_memory_for_the_least_shares_is_refused(rows, memories):
    sizes = [size(n, name=f"t{i}") for i, n in enumerate(rows)]
    least = sum(min(MIN_SHARE, one.rows) * one.row_bytes for one in sizes)
    assume(min(memories) < least)
    with pytest.raises(ConfigError, match=r"each PS needs .*: for up to 1,024 rows of each of \d tables") as caught:
        divide(sizes, [memory(m) for m in memories])
    assert memories[caught.value.fields["rank"]] == caught.value.fields["memory"] < caught.value.fields["wanted"]


def test_a_ps_without_memory_is_refused_not_left_to_the_others():
    with pytest.raises(ConfigError, match=r"Embedding PS 0 has 0\.0 MiB of memory"):
        divide([size(100_000_000)], [memory(0), memory(100 * GIB)])


def test_many_small_tables_that_do_not_fit_are_named_as_reason():
    sizes = [size(1_000, 168, f"t{i}") for i in range(20_000)]
    with pytest.raises(ConfigError, match=r"PS 0 has 3\.0 GiB of memory .* each PS needs 3\.1 GiB: .* 20,000 tables"):
        divide(sizes, [memory(3 * GIB), memory(400 * GIB)])


def test_the_largest_table_of_a_ps():
    assert divide([size(4 * MAX_ROWS)], [None] * 4) == [{"item": MAX_ROWS}] * 4
    with pytest.raises(ConfigError, match=r"one of 4 .* at most .* Lower `capacity`, or use 5 PSs or more"):
        divide([size(4 * MAX_ROWS + 1)], [None] * 4)


def test_bytes_of_a_row():
    tables = {
        "a": Table("a", dim=16, capacity=10),
        "b": Table("b", dim=8, capacity=20, optimizer=Adam(lr=0.1)),
        "c": Table("c", dim=8),
    }
    a, b = declared_sizes(tables, RowwiseAdagrad(lr=0.1))
    assert (a.rows, a.row_bytes, a.bytes) == (10, 4 * 17 + ROW_OVERHEAD, 10 * a.row_bytes)
    assert (b.rows, b.row_bytes) == (20, 4 * 24 + ROW_OVERHEAD)


def test_a_row_takes_no_more_memory_than_is_planned_for_it():
    table = Table("item", dim=4, capacity=60_000)
    ps = EmbeddingServer({"item": table}, Adagrad(0.1), Sync(), 0, 1)
    empty = ps.statistics()["item"]["bytes"]
    ps.lookup({"item": np.arange(60_000, dtype=np.uint64)}, True)
    taken = ps.statistics()["item"]
    (planned,) = declared_sizes({"item": table}, Adagrad(0.1))
    assert (taken["bytes"] - empty) / taken["rows"] <= planned.row_bytes


# --- what skew costs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("servers", [2, 8])
def test_a_table_that_is_just_full_evicts_few_rows(servers):
    """docs/guide/table-memory.md: about 0.4 * sqrt(parts / capacity) of the rows, for parts = PSs * shards."""
    capacity = 200_000
    table = Table("item", dim=1, capacity=capacity, optimizer=SGD(0.1))
    shares = divide(declared_sizes({"item": table}, SGD(0.1)), [None] * servers)
    ids = np.arange(capacity, dtype=np.uint64)
    owner = owners("item", ids, BucketMap.even(servers))
    parts, kept = 0, 0
    for rank, share in enumerate(shares):
        parts += table_config(table, 0, share["item"]).resolved_shards
        ps = EmbeddingServer({"item": table}, SGD(0.1), Sync(), 0, 1, ServerOptions(capacities=share))
        ps.lookup({"item": ids[owner == rank]}, True)
        kept += ps.statistics()["item"]["rows"]
    expected = 0.4 * (parts / capacity) ** 0.5
    assert 0.5 * expected < 1 - kept / capacity < 2 * expected


def test_small_tables_lose_no_row_by_chance():
    """Each PS may keep 1,024 rows: 100 ids in a table of 100 rows stay, though a PS may own more than an eighth."""
    schema = Schema([IdFeature("item", dim=1)], tables=[Table("item", dim=1, capacity=100)])
    embeddings = EmbeddingCollection(schema, optimizer=SGD(0.1), mode=Sync(), cluster=Several(8))
    embeddings.set_rows("item", np.arange(100, dtype=np.uint64), np.zeros((100, 1), np.float32))
    assert embeddings.statistics()["item"]["rows"] == 100
    assert embeddings.statistics()["item"]["evicted"] == 0


# --- clusters --------------------------------------------------------------------------------------------------------


def rows_after(cluster, schema, ids=60_000):
    embeddings = EmbeddingCollection(schema, optimizer=SGD(0.1), mode=Sync(), cluster=cluster)
    embeddings.set_rows("item", np.arange(ids, dtype=np.uint64), np.zeros((ids, 1), np.float32))
    return embeddings.statistics()["item"]["rows"]


@pytest.mark.parametrize("cluster", [persia.cluster.Embedded(), Several(3), Threads(1, ps=2).member(0)])
def test_capacity_is_of_the_whole_cluster(cluster):
    schema = Schema([IdFeature("item", dim=1)], tables=[Table("item", dim=1, capacity=20_000)])
    assert rows_after(cluster, schema) == 20_000


@pytest.mark.parametrize("cluster", [persia.cluster.Embedded(), Threads(1, ps=2).member(0)])
def test_what_cannot_fit_is_refused_before_training(cluster):
    rows = 1 << 40
    schema = Schema([IdFeature("item", dim=64)], tables=[Table("item", dim=64, capacity=rows)])
    with pytest.raises(
        ConfigError, match=r"table 'item': 1,099,511,627,776 rows of 548 bytes .* = 548.0 TiB"
    ) as caught:
        EmbeddingCollection(schema, optimizer=Adagrad(0.1), mode=Sync(), cluster=cluster)
    assert "lower `capacity`" in caught.value.message
    assert caught.value.fields["field"] == "capacity"
    assert caught.value.fields["wanted"] == rows * 548


def test_what_cannot_fit_is_accepted_with_a_warning_if_asked_for(caplog):
    schema = Schema([IdFeature("item", dim=1)], tables=[Table("item", dim=1, capacity=10**11)])
    assert rows_after(persia.cluster.Embedded(overcommit=True), schema) == 60_000
    assert "its tables may grow to 3.6 TiB" in caplog.text


def test_what_the_refusal_proposes_fits():
    sizes = [size(5_000_000_000, 168), *(size(1_000_000, 64, f"t{i}") for i in range(6))]
    limits = [memory(64 * GIB)] * 4
    with pytest.raises(ConfigError, match=r"; 3 other tables = 183\.1 MiB\. ") as caught:
        divide(sizes, limits)
    assert "use 13 PSs with 64.0 GiB each, on other hosts" in caught.value.message
    divide(sizes, [memory(64 * GIB)] * 13)
    with pytest.raises(ConfigError):
        divide(sizes, [memory(64 * GIB)] * 12)
    share = caught.value.fields["memory"] / caught.value.fields["wanted"]
    fitting = int(caught.value.message.split("to ")[1].split(" for table")[0].replace(",", ""))
    assert fitting == pytest.approx(share * 5_000_000_000)
    divide([one._replace(rows=int(one.rows * share)) for one in sizes], limits)


@given(rows_of_tables, st.integers(1, 12), st.integers(1, 2000))
def test_what_the_refusal_proposes_fits_with_least_shares_too(rows, count, gib):
    sizes = [size(n, 16_424, f"t{i}") for i, n in enumerate(rows)]
    try:
        divide(sizes, [memory(gib * GIB)] * count)
    except ConfigError as error:
        if "PSs with" in error.message:
            enough = int(error.message.split("; use ")[1].split(" PSs")[0].replace(",", ""))
            if enough < 200:
                divide(sizes, [memory(gib * GIB)] * enough)
        name = error.message.split("for table '")[1].split("'")[0]
        fitting = int(error.message.split("`capacity`, to ")[1].split(" for table")[0].replace(",", ""))
        fits = Fraction(fitting, next(one.rows for one in sizes if one.name == name))
        lower = [one._replace(rows=max(1, int(one.rows * fits))) for one in sizes]
        bound = count * MIN_SHARE  # Of a table that falls below it, the least shares are more.
        assume(all((one.rows > bound) == (other.rows > bound) for one, other in zip(sizes, lower, strict=True)))
        divide(lower, [memory(gib * GIB)] * count)


def test_the_proposed_number_of_ps_counts_the_least_shares():
    """Small tables take 1 GiB in each PS, and so of each PS of 2 GiB only one is left for the large table."""
    sizes = [size(1024, GIB >> 10, "small"), size(10 << 20, 1 << 10, "large")]
    with pytest.raises(ConfigError, match=r"use 10 PSs with 2\.0 GiB each"):
        divide(sizes, [memory(2 * GIB)])
    divide(sizes, [memory(2 * GIB)] * 10)
    with pytest.raises(ConfigError):
        divide(sizes, [memory(2 * GIB)] * 9)


def test_a_ps_refuses_a_share_beyond_the_memory_of_its_own_host():
    """Ray may start it elsewhere than where memory was measured."""
    declared = {"item": Table("item", dim=1, capacity=10**12)}
    with pytest.raises(ConfigError, match=r"This host has .* needs .*: 1,000,000,000,000 rows of 'item'"):
        EmbeddingServer(declared, SGD(0.1), Sync(), 0, 1, ServerOptions(capacities={"item": 10**12}))
    EmbeddingServer(declared, SGD(0.1), Sync(), 0, 1, ServerOptions(capacities={"item": 10**12}, overcommit=True))


@given(rows_of_tables, st.lists(st.integers(1, 2000), min_size=1, max_size=12))
def test_a_ps_accepts_each_share_computed_for_its_memory(rows, memories):
    sizes = [size(n, name=f"t{i}") for i, n in enumerate(rows)]
    limits = [memory(m * 100_000_000) for m in memories]
    try:
        shares = divide(sizes, limits)
    except ConfigError:
        return
    for share, limit in zip(shares, limits, strict=True):
        mine = [one._replace(rows=share[one.name]) for one in sizes]
        check_share(mine, limit)
        with pytest.raises(ConfigError, match="its share of the tables needs"):
            check_share([one._replace(rows=one.rows + 2 * MIN_SHARE) for one in mine], memory(1))


def test_tables_without_a_declared_capacity_are_not_refused():
    assert divide_here({"item": Table("item", dim=4096)}, Adam(0.1), 3) == [Shares({}, {})] * 3


def test_what_does_not_fit_now_is_warned_of(caplog):
    caplog.set_level("INFO", "persia.ps")
    check_free([size(10_000_000)], memory(4 * GIB, GIB), None)
    assert caplog.records[0].levelname != "WARNING"
    check_free([size(20_000_000)], memory(4 * GIB, GIB), None)
    assert "1.0 GiB free for an embedding PS, but its tables may grow to 1.9 GiB: when it is full, the" in caplog.text


def test_units():
    assert [text_of_bytes(n) for n in (0, 1 << 20, 1 << 30, 3 << 40)] == ["0.0 MiB", "1.0 MiB", "1.0 GiB", "3.0 TiB"]


# --- memory of a host ------------------------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path):
    """A root with /proc and /sys as they are on a host of 8 GiB, of which 6 are free."""
    files = {
        "proc/meminfo": "MemTotal: 8388608 kB\nMemFree: 1000 kB\nMemAvailable: 6291456 kB\n",
        "proc/self/cgroup": "0::/\n",
    }
    return written(tmp_path, files)


def written(root, files):
    for name, text in files.items():
        path = Path(root, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_memory_of_a_host_without_limits(root):
    assert host_memory(root=str(root)) == Memory(8 * GIB, 6 * GIB, HOST)
    (root / "proc/self/cgroup").unlink()
    assert host_memory(root=str(root)) == Memory(8 * GIB, 6 * GIB, HOST)


def test_memory_within_cgroups_of_version_2(root):
    """The smallest limit of all levels counts; cached files can be freed."""
    files = {
        "proc/self/cgroup": "0::/a/b\n",
        "sys/fs/cgroup/a/memory.max": f"{4 * GIB}\n",
        "sys/fs/cgroup/a/memory.current": f"{3 * GIB}\n",
        "sys/fs/cgroup/a/memory.stat": f"anon 1\ninactive_file {GIB}\n",
        "sys/fs/cgroup/a/b/memory.max": "max\n",
    }
    found = host_memory(root=str(written(root, files)))
    assert found[:2] == (4 * GIB, 2 * GIB)
    assert found.limit.endswith("sys/fs/cgroup/a/memory.max")


def test_memory_within_cgroups_of_version_1(root):
    """In a container the path is the host's, and the limit of the container is at the top."""
    files = {
        "proc/self/cgroup": "5:cpu:/docker/x\n4:memory:/docker/x\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GIB}\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
    }
    assert host_memory(root=str(written(root, files)))[:2] == (2 * GIB, GIB)


def test_memory_of_regions_in_memory_is_that_of_both(root, monkeypatch):
    monkeypatch.setattr("persia.memory.file_system", lambda _: persia.memory.FileSystem("/dev/shm", "tmpfs", ""))
    written(root, {"proc/meminfo": "MemTotal: 4 kB\nMemAvailable: 2 kB\n"})
    assert host_memory(str(root / "not" / "yet" / "there"), str(root))[:2] == (4096, 2048)


def test_memory_of_regions_on_a_disk_is_that_of_the_disk(root, monkeypatch):
    monkeypatch.setattr("persia.memory.file_system", lambda _: persia.memory.FileSystem("/data", "ext4", ""))
    written(root, {"proc/meminfo": "MemTotal: 4 kB\nMemAvailable: 2 kB\n"})
    found = host_memory(str(root), str(root))
    assert found.total > 1 << 20
    assert found.limit == "the size of /data"


def test_parts_of_a_host():
    assert Memory(900, 600, "x").shared(3) == Memory(300, 200, "x")
    assert Memory(900, 600, "x").shared(3, taken=150) == Memory(300, 250, "x")


def undeclared(count, dim=64):
    return {f"t{number}": Table(f"t{number}", dim=dim) for number in range(count)}


def test_many_tables_without_capacity_fit_into_the_address_space():
    embedded = persia.cluster.Embedded(threads=1)
    schema = Schema([IdFeature(f"f{number}", dim=64) for number in range(300)], labels=["label"])
    both = [embedded.connect(schema, Adam(lr=0.1), Sync(), 0) for _ in range(2)]
    assert len(both[0].servers[0].tables()) == 300


def test_a_table_without_capacity_exceeds_the_memory_of_the_host(caplog):
    host = memory(1 << 35)
    row_bytes = size_of(undeclared(1)["t0"], Adam(lr=0.1), 0).row_bytes
    assert rows_of_undeclared(undeclared(1), Adam(lr=0.1), host) == {"t0": (1 << 36) // row_bytes}
    assert rows_of_undeclared(undeclared(1), Adam(lr=0.1), memory(1 << 41)) == {"t0": 1 << 30}, "as many as ever"
    assert rows_of_undeclared(undeclared(2), Adam(lr=0.1), memory(1 << 20)) == dict.fromkeys(["t0", "t1"], LEAST_ROWS)
    assert not caplog.records


def test_tables_without_capacity_share_the_address_space(caplog):
    rooms = rows_of_undeclared(undeclared(1000), Adam(lr=0.1), memory(1 << 41))
    row_bytes = size_of(undeclared(1)["t0"], Adam(lr=0.1), 0).row_bytes
    assert len(rooms) == 1000
    assert ADDRESS_SPACE * 0.99 < sum(rooms.values()) * row_bytes <= ADDRESS_SPACE
    assert "declare the `capacity`" in caplog.text
    assert rooms == rows_of_undeclared(undeclared(1000), Adam(lr=0.1), None), "regions may move to another host"
