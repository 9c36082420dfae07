"""Rows in files: they outlive a process, and what is wrong with a file is said."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from benchmarks.recovery_load import Load, Victim, columns, kills
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from persia.errors import StoreError, StoreFullError
from persia.store import NativeStore, TableConfig, native
from support.examples import examples

CONFIG = TableConfig("item", 4, capacity=1000, shards=2)
HEADER = 16384


def ids(*values):
    return np.array(values, np.uint64)


@pytest.fixture
def directory():
    path = Path(tempfile.mkdtemp(prefix="persia-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(native, "LOCK_SECONDS", 0.05)


def make(directory, attach=False, config=CONFIG):
    store = NativeStore()
    store.create_table(config, str(directory / "t"), attach)
    return store


def filled(directory, rows=300, config=CONFIG):
    store = make(directory, config=config)
    keys = np.arange(rows, dtype=np.uint64)
    store.lookup([0], [keys], True)
    store.update([0], [keys], [np.ones((rows, config.dim), np.float32)], [0.1], 1, 5, 1)
    return store


def test_rows_outlive_the_store(directory):
    store = filled(directory)
    before, counters = columns(store), store.statistics(0)
    del store
    again = make(directory, attach=True)
    assert columns(again) == before
    assert again.statistics(0) == counters
    assert again.recovery(0) == {"shards": 2, "busy": 0, "undone": 0, "open": 0, "rebuilt": 0}
    again.update([0], [ids(1)], [np.ones((1, 4), np.float32)], [0.1], 1, 5, 1)
    assert again.statistics(0)["duplicates"] == 1
    again.lookup([0], [np.arange(300, 2000, dtype=np.uint64)], True)
    assert again.size(0) == 1000


def test_last_steps_are_kept_from_a_moment_on(directory):
    """A process that attaches goes on keeping them; rows that have not been updated since that moment have 0."""
    store = filled(directory, 900)
    store.update([0], [ids(1, 2)], [np.ones((2, 4), np.float32)], [0.1], 7)
    before = store.memory_bytes(0)
    assert store.last_steps(0, ids(1, 2)).tolist() == [0, 0]
    store.keep_last_steps(0)
    assert store.memory_bytes(0) == before + 4 * 900
    store.update([0], [ids(2)], [np.ones((1, 4), np.float32)], [0.1], 8)
    del store
    again = make(directory, attach=True)
    again.keep_last_steps(0)
    again.lookup([0], [np.arange(900, 1000, dtype=np.uint64)], True)
    again.update([0], [ids(3, 950)], [np.ones((2, 4), np.float32)], [0.1], 9)
    assert again.last_steps(0, ids(1, 2, 3, 950, 5000)).tolist() == [0, 8, 9, 9, 0]
    again.lookup([0], [np.arange(5000, 6500, dtype=np.uint64)], True)  # Takes the places of all rows.
    again.lookup([0], [ids(950)], True)
    assert again.last_steps(0, ids(950, *range(5500, 6500))).tolist() == [0] * 1001


@pytest.mark.processes
def test_a_copy_without_its_zeros_gets_memory_for_them(directory):
    """Else a full file system would be a SIGBUS at the first write."""
    store = make(directory)
    store.keep_last_steps(0)
    store.lookup([0], [np.arange(900, dtype=np.uint64)], True)
    rows = columns(store)
    del store
    paths = [directory / "t.0", directory / "t.1"]
    before = [path.stat().st_blocks for path in paths]
    for path in paths:
        subprocess.run(["cp", "--sparse=always", path, f"{path}.copy"], check=True)
        Path(f"{path}.copy").replace(path)
        assert path.stat().st_blocks < before[paths.index(path)]
    again = make(directory, attach=True)
    assert [path.stat().st_blocks for path in paths] == before
    assert columns(again) == rows


def test_two_stores_on_one_region(directory):
    store = filled(directory)
    for attach in (True, False):
        with pytest.raises(StoreError, match="another process has it in use"):
            make(directory, attach)
    assert store.size(0) == 300


def test_memory_follows_rows_not_capacity(directory):
    config = TableConfig("item", 16, capacity=10**9, shards=8)
    store = make(directory, config=config)
    used = lambda: sum(path.stat().st_blocks * 512 for path in directory.iterdir())  # noqa: E731
    assert used() < 2 << 20
    store.lookup([0], [np.arange(100_000, dtype=np.uint64)], True)
    payload = 100_000 * (16 + 4 * 32)
    assert payload < used() < payload * 1.5
    store.clear(0)
    assert used() < payload / 2


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"name": "user"}, "shard 0 of table 'item', not shard 0 of 'user'"),
        ({"seed": 1}, "another seed: 0, not 1"),
        ({"optimizer": "sgd", "optimizer_params": {"momentum": 0.9}}, "another optimizer"),
        ({"initializer_b": 0.5}, "parameters, initializer, admission or spill"),
        ({"optimizer_params": {"eps": 0.1}}, "parameters, initializer, admission or spill"),
        ({"capacity": 900_000}, "has .* bytes"),
        ({"dim": 400}, "has .* bytes"),
    ],
)
def test_regions_of_another_table(directory, changed, message):
    del_me = filled(directory)
    del del_me
    config = TableConfig(**{"name": "item", "dim": 4, "capacity": 1000, "shards": 2, **changed})
    with pytest.raises(StoreError, match=message):
        make(directory, attach=True, config=config)


def overwrite(path, offset, data):
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


@pytest.mark.parametrize(
    ("offset", "data", "message"),
    [
        (0, bytes(8), "never completed"),
        (0, b"SQLite f", "no region of an embedding store"),
        (8, b"\x01", "format 1, and this version of persia reads format 3"),
        (30, b"\xff", "header is damaged"),
        (160, b"\xff" * 8, "header is damaged: it says"),
        (168, b"\xff" * 8, "header is damaged: it says"),
        (184, b"\xff" * 8, "header is damaged: it says"),
    ],
)
def test_damaged_headers(directory, offset, data, message):
    store = filled(directory)
    del store
    overwrite(directory / "t.0", offset, data)
    with pytest.raises(StoreError, match=message):
        make(directory, attach=True)


@pytest.mark.parametrize("size", [0, 100, HEADER, 5 << 20])
def test_truncated_files(directory, size):
    store = filled(directory)
    del store
    os.truncate(directory / "t.1", size)
    with pytest.raises(StoreError, match="cut short"):
        make(directory, attach=True)


def test_missing_and_foreign_files(directory):
    store = filled(directory)
    del store
    (directory / "t.1").unlink()
    with pytest.raises(StoreError, match="cannot be opened"):
        make(directory, attach=True)
    (directory / "t.1").symlink_to("/etc/passwd")
    with pytest.raises(StoreError, match="cannot be opened"):
        make(directory, attach=True)
    (directory / "t.1").unlink()
    (directory / "t.1").mkdir()
    with pytest.raises(StoreError, match="cannot be opened"):
        make(directory, attach=True)


def test_a_damaged_index_is_rebuilt(directory):
    store = filled(directory)
    before = columns(store)
    del store
    # The index begins at the first huge page: rows that do not exist, in slots where they would be found.
    overwrite(directory / "t.0", 2 << 20, b"\xff" * 4096)
    again = make(directory, attach=True)
    assert again.recovery(0)["rebuilt"] == 1
    assert columns(again) == before
    assert again.contains(0, np.arange(300, dtype=np.uint64)).all()


def test_rows_of_another_shard_are_refused(directory):
    store = filled(directory)
    del store
    overwrite(directory / "t.0", 2 << 20, b"\xff" * 4096)  # So that rows are read.
    shard = 4 << 20
    overwrite(directory / "t.0", shard, np.uint64(0).tobytes() * 8)
    overwrite(directory / "t.1", shard, np.uint64(0).tobytes() * 8)
    overwrite(directory / "t.1", 2 << 20, b"\xff" * 4096)
    with pytest.raises(StoreError, match="belongs to another shard"):
        make(directory, attach=True)


def refused(call):
    """The message of its error, or None."""
    try:
        call()
    except StoreError as error:
        return str(error)
    return None


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_hostile_bytes(directory, data):
    """Whatever lies in a file: an error that says so, or a store that works on what is there."""
    store = filled(directory)
    del store
    place = st.one_of(
        st.integers(0, 1600), st.integers(HEADER, HEADER + 64), st.integers(2 << 20, (2 << 20) + 40000),
        st.integers(4 << 20, (4 << 20) + 20000),
    )  # fmt: skip
    for _ in range(data.draw(st.integers(1, 6))):
        overwrite(directory / f"t.{data.draw(st.integers(0, 1))}", data.draw(place), data.draw(st.binary(max_size=64)))
    refusal = refused(lambda: make(directory, attach=True))
    if refusal:
        assert str(directory) in refusal
        return
    store = make(directory, attach=True)
    keys = np.arange(2500, dtype=np.uint64)
    store.lookup([0], [keys[:1200]], False)
    store.update([0], [keys[:400]], [np.ones((400, 4), np.float32)], [0.1], 1, 5, 2)
    assert "is damaged" in (refused(lambda: store.lookup([0], [keys], True)) or "is damaged")
    assert sum(len(rows.ids) for _, rows in store.iterate_rows(0)) == store.size(0) <= 1000


@pytest.fixture
def small(directory):
    """A file system of 4 MiB."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(directory)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here")
    yield directory
    subprocess.run(["umount", str(directory)], check=True)


@pytest.mark.processes
def test_a_full_file_system_is_an_error_and_no_signal(small):
    store = make(small, config=TableConfig("item", 16, capacity=10**6, shards=2))
    with pytest.raises(StoreFullError, match=r"no room to grow to \d+ MiB .*; free there: \d+ MiB.*remount") as caught:
        for start in range(0, 10**6, 1000):
            store.lookup([0], [np.arange(start, start + 1000, dtype=np.uint64)], True)
    assert isinstance(caught.value, StoreError)
    rows = store.size(0)
    assert rows > 10_000
    before = columns(store)
    # What is there goes on.
    keys = np.array(sorted(before), np.uint64)
    store.lookup([0], [keys], True)
    assert store.update([0], [keys], [np.ones((rows, 16), np.float32)], [0.1], 1)[0].applied == rows
    before = columns(store)
    del store, caught
    again = make(small, attach=True, config=TableConfig("item", 16, capacity=10**6, shards=2))
    assert columns(again) == before


@pytest.mark.processes
@pytest.mark.parametrize("last_steps", [False, True])
def test_wherever_space_ends_nothing_is_lost_and_none_is_taken(small, last_steps):
    """Pieces of rows, last steps and index: the file system is full at each of them."""
    config = TableConfig("item", 16, capacity=10**6, shards=1)
    used = lambda: sum(path.stat().st_blocks for path in small.glob("t.*"))  # noqa: E731
    rows = 1
    for filler in reversed(range(1 << 20, (1 << 20) + (600 << 10), 16 << 10)):
        store = make(small, config=config)
        if last_steps:
            store.keep_last_steps(0)
        (small / "filler").write_bytes(bytes(filler))
        rows -= 1  # at least as many as beside a larger filler
        store.lookup([0], [np.arange(rows, dtype=np.uint64)], True)
        with pytest.raises(StoreFullError, match="no room to grow"):
            while True:
                before = used()
                store.lookup([0], [ids(rows)], True)
                rows += 1
        assert used() <= before + 8  # the rest of a page
        keys = np.arange(rows, dtype=np.uint64)
        assert store.update([0], [keys], [np.ones((rows, 16), np.float32)], [0.1], 3)[0].applied == rows
        with suppress(StoreFullError):
            store.keep_last_steps(0)
            assert not (store.last_steps(0, keys) - 3 * last_steps).any()
        expected = columns(store)
        assert expected.keys() == set(range(rows))
        del store
        store = make(small, attach=True, config=config)
        assert columns(store) == expected
        (small / "filler").unlink()
        store.lookup([0], [np.arange(rows + 100, dtype=np.uint64)], True)
        assert store.size(0) == rows + 100
        del store


@pytest.mark.processes
def test_a_table_that_does_not_fit_at_all(small):
    (small / "filler").write_bytes(bytes((4 << 20) - 16384))
    with pytest.raises(StoreFullError, match="choose another directory"):
        make(small)


LIMITED = """
import json, resource, sys
from persia.errors import StoreError
from persia.store import NativeStore, TableConfig
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    NativeStore().create_table(TableConfig("item", 4, capacity=1000, shards=1), sys.argv[1])
except StoreError as error:
    print(json.dumps(str(error)))
"""


@pytest.mark.processes
def test_a_limit_on_file_sizes_is_an_error_and_no_signal(directory):
    run = subprocess.run(
        [sys.executable, "-c", LIMITED, str(directory / "t")],
        capture_output=True, text=True, check=True, timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert "ulimit -f" in json.loads(run.stdout)


@pytest.mark.processes
@settings(max_examples=examples(3), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**32), st.sampled_from(["sgd", "adagrad", "adam"]), st.floats(0.0, 0.03))
def test_kill_at_any_moment(seed, optimizer, longest):
    """SIGKILL under load: every row is as before or after the operation in flight, which is repeated exactly once."""
    with tempfile.TemporaryDirectory(prefix="persia-test-", dir="/dev/shm") as directory:
        for verdict in kills(Path(directory) / "regions", Load(seed, optimizer=optimizer), 3, longest):
            assert verdict.wrong == 0


@pytest.mark.slow
def test_a_hundred_kills():
    """At least; until half a hundred have hit a request in work. On a busy machine few do: the victim seldom runs."""
    hundreds = hits = 0
    while hundreds < 1 or (hits <= 50 and hundreds < 6):
        with tempfile.TemporaryDirectory(prefix="persia-test-", dir="/dev/shm") as directory:
            verdicts = kills(Path(directory) / "regions", Load(11 + hundreds), 100, 0.05)
        assert sum(verdict.wrong for verdict in verdicts) == 0
        hits += sum(verdict.recovery["busy"] > 0 for verdict in verdicts)
        hundreds += 1
    assert hits > 50


@pytest.mark.processes
def test_a_row_that_was_changed_is_noticed(directory):
    """The comparison of the tests above sees a single wrong bit."""
    victim = Victim(directory / "regions", Load(3))
    completed = victim.run_and_kill(0.02, 3)
    store = NativeStore()
    store.create_table(Load(3).table(), str(next((directory / "regions").glob("*.0")).with_suffix("")), attach=True)
    _, rows = next(store.iterate_rows(0))
    rows.embeddings[0, 0] += 1e-3
    store.import_rows(0, rows)
    del store
    assert victim.compare(completed).wrong > 0
