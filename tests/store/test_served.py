"""Rows of a prediction server: like the dict, from several threads and processes, and with bad files and arguments."""

import mmap
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia.errors import StoreError
from persia.store.served import ServedTable, lookup_packed
from support.twins.served import ReferenceServedTable

DIM = 3
IDS = [0, 1, 2, 3, 2**32, 2**63, 2**64 - 1, *range(100, 130)]


def ids_of(values):
    return np.array(values, np.uint64)


def looked_up(table, ids):
    out, found = np.full((len(ids), table.dim), -1, np.float32), np.ones(len(ids), np.bool_)
    assert table.lookup(ids, out, found) == found.sum()
    return out, found


def assert_same(table, reference):
    for ours, theirs in zip(looked_up(table, ids_of(IDS)), looked_up(reference, ids_of(IDS)), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert len(table) == len(reference)
    assert sorted(table.ids().tolist()) == sorted(reference.rows)
    rows = {
        id_: row
        for ids, values in table.iterate_rows(max_rows=3)
        for id_, row in zip(ids.tolist(), values, strict=True)
    }
    assert rows.keys() == reference.rows.keys()
    assert all(np.array_equal(rows[id_], row) for id_, row in reference.rows.items())


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["set", "set", "remove", "remove", "reopen"]), st.lists(st.sampled_from(IDS), max_size=8)
        ),
        max_size=15,
    )
)
def test_like_the_dict(calls):
    table, reference, version = ServedTable(DIM), ReferenceServedTable(DIM), 0
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:  # where a sync costs nothing
        path = Path(directory) / "rows"
        for call, chosen in calls:
            ids = ids_of(chosen)
            if call == "set":
                values = (version + np.arange(len(ids) * DIM, dtype=np.float32)).reshape(-1, DIM)
                version += values.size
                for each in (table, reference):
                    each.set(ids, values)
            elif call == "remove":
                assert table.remove(ids) == reference.remove(ids)
            else:
                table.write_snapshot(path, "users")
                table, reference = ServedTable(DIM, path), ReferenceServedTable(DIM, reference)
                table.verify()
                assert table.base_name == "users"
        assert_same(table, reference)


def test_iteration_leaves_out_what_is_removed_meanwhile():
    table = ServedTable(DIM)
    table.set(ids_of(range(10)), np.arange(30, dtype=np.float32).reshape(-1, DIM))
    parts = table.iterate_rows(max_rows=4)
    first, _ = next(parts)
    table.remove(ids_of(range(8)))
    rest = list(parts)
    assert sorted(id_ for ids, _ in rest for id_ in ids.tolist()) == sorted({8, 9} - set(first.tolist()))
    assert all((values[:, 0] == 3 * ids).all() for ids, values in rest)


def test_tables_of_a_request_in_one_call():
    tables = [ServedTable(1), ServedTable(4), ServedTable(2)]
    for number, table in enumerate(tables):
        table.set(ids_of([1, 2]), np.full((2, table.dim), number + 1, np.float32))
    ids, counts = ids_of([1, 9, 2, 2, 1]), [2, 0, 2, 1]
    packed = [tables[0], tables[1], tables[1], tables[2]]
    out, found = np.full(2 * 1 + 2 * 4 + 2, -1, np.float32), np.zeros(5, np.bool_)
    assert lookup_packed(packed, counts, ids, out, found) == 4
    assert out.tolist() == [1, 0, *[2] * 8, 3, 3]
    assert found.tolist() == [True, False, True, True, True]
    assert lookup_packed(packed, counts, ids, out) == 4
    assert lookup_packed([], [], ids[:0], out[:0]) == 0


@pytest.mark.processes
def test_another_process_reads_the_snapshot(tmp_path):
    table = ServedTable(DIM)
    table.set(np.arange(1000, dtype=np.uint64), np.arange(3000, dtype=np.float32).reshape(-1, DIM))
    table.write_snapshot(tmp_path / "rows")
    program = (
        "import sys, numpy as np\n"
        "from persia.store.served import ServedTable\n"
        "table, out = ServedTable(3, sys.argv[1]), np.empty((2, 3), np.float32)\n"
        "print(len(table), table.lookup(np.array([7, 5000], np.uint64), out), out.tolist())"
    )
    run = subprocess.run([sys.executable, "-c", program, tmp_path / "rows"], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "1000 1 [[21.0, 22.0, 23.0], [0.0, 0.0, 0.0]]"


def test_requests_while_rows_change():
    table, ids = ServedTable(8), np.arange(2000, dtype=np.uint64)
    table.set(ids, np.zeros((2000, 8), np.float32))
    stop, problems = threading.Event(), []

    def request():
        out, last = np.empty((2000, 8), np.float32), np.zeros(2000, np.float32)
        while not stop.is_set():
            if table.lookup(ids, out) != 2000 or (out != out[:, :1]).any() or (out[:, 0] < last).any():
                problems.append(out.copy())
                return
            last[:] = out[:, 0]

    threads = [threading.Thread(target=request, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for version in range(1, 60):
            table.set(ids, np.full((2000, 8), version, np.float32))
            extra = np.arange(10_000 * version, 10_000 * version + 500, dtype=np.uint64)
            table.set(extra, np.zeros((500, 8), np.float32))
            assert table.remove(extra[:250]) == 250
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not problems
    assert len(table) == 2000 + 59 * 250


def read_only(array):
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("call", "because"),
    [
        (lambda t: t.lookup(np.zeros(2, np.int64), np.zeros((2, 3), np.float32)), "ids must be .* uint64"),
        (lambda t: t.lookup(np.zeros((2, 1), np.uint64), np.zeros((2, 3), np.float32)), "ids must be .* uint64"),
        (lambda t: t.lookup(np.zeros(4, np.uint64)[::2], np.zeros((2, 3), np.float32)), "ids must be .* uint64"),
        (lambda t: t.lookup([1, 2], np.zeros((2, 3), np.float32)), "ids must be .* uint64"),
        (
            lambda t: t.lookup(np.zeros(2, np.uint64), np.zeros((2, 4), np.float32)),
            r"out must be .*\[2, 3\] of float32",
        ),
        (
            lambda t: t.lookup(np.zeros(2, np.uint64), np.zeros((3, 2), np.float32)),
            r"out must be .*\[2, 3\] of float32",
        ),
        (lambda t: t.lookup(np.zeros(2, np.uint64), np.zeros((2, 3))), r"out must be .*\[2, 3\] of float32"),
        (lambda t: t.lookup(np.zeros(2, np.uint64), read_only(np.zeros((2, 3), np.float32))), "out must be a writable"),
        (
            lambda t: t.lookup(np.zeros(2, np.uint64), np.zeros((2, 3), np.float32), np.zeros(3, np.bool_)),
            r"found must be .*\[2\] of bool",
        ),
        (
            lambda t: t.lookup(np.zeros(2, np.uint64), np.zeros((2, 3), np.float32), np.zeros(2, np.uint8)),
            r"found must be .*\[2\] of bool",
        ),
        (
            lambda t: t.set(np.zeros(2, np.uint64), np.zeros((1, 3), np.float32)),
            r"values must be .*\[2, 3\] of float32",
        ),
        (lambda t: t.set(np.zeros(2, np.uint64), None), r"values must be .*\[2, 3\] of float32"),
        (lambda t: t.remove(np.zeros(2)), "ids must be .* uint64"),
        (lambda t: lookup_packed([t, t], [1], np.zeros(1, np.uint64), np.zeros(3, np.float32)), "counts must be"),
        (lambda t: lookup_packed([t], [2], np.zeros(1, np.uint64), np.zeros(6, np.float32)), "their sum is larger"),
        (lambda t: lookup_packed([t], [1], np.zeros(2, np.uint64), np.zeros(3, np.float32)), "their sum is smaller"),
        (lambda t: lookup_packed([t], [1], np.zeros(1, np.uint64), np.zeros((1, 3), np.float32)), "out must be"),
        (lambda t: lookup_packed([t], [-1], np.zeros(1, np.uint64), np.zeros(3, np.float32)), "counts 0: must be"),
        (lambda t: t.write_snapshot("/nonexistent/rows"), "cannot be created"),
        (lambda t: t.write_snapshot("rows", "x" * 1025), "1024"),
        (lambda t: ServedTable(0), "dim must be within"),
        (lambda t: ServedTable(-1), "dim must be within"),
        (lambda t: ServedTable(65537), "dim must be within"),
        (lambda t: ServedTable(3, "/nonexistent/rows"), "/nonexistent/rows: the file cannot be opened"),
    ],
)
def test_bad_arguments_are_refused(call, because):
    table = ServedTable(DIM)
    with pytest.raises(StoreError, match=because):
        call(table)
    assert len(table) == 0


def test_bad_files_are_refused(tmp_path):
    good, bad = tmp_path / "good", tmp_path / "bad"
    table = ServedTable(DIM)
    table.set(np.arange(100, dtype=np.uint64), np.ones((100, DIM), np.float32))
    table.write_snapshot(good)
    content = good.read_bytes()
    for damaged, because in [
        (b"", "not a file of served rows"),
        (b"PK\x03\x04" + content[4:], "not a file of served rows"),
        (content[:-1], "bytes instead of"),
        (content[: mmap.PAGESIZE // 2], "truncated"),
        (content[:20] + b"\xff" + content[21:], "the header is damaged"),
    ]:
        bad.write_bytes(damaged)
        with pytest.raises(StoreError, match=because):
            ServedTable(DIM, bad)
    bad.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(StoreError, match="checksum"):
        ServedTable(DIM, bad).verify()
    with pytest.raises(StoreError, match="3 values instead of 4"):
        ServedTable(4, good)
