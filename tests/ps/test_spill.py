"""An embedding PS with rows on disk: its files, deaths, and disks that are full, slow or gone."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import shutil
import stat
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import persia
from persia import rpc
from persia.errors import ConfigError, StoreError, StoreFullError
from persia.memory import Memory
from persia.modes import Hybrid, Sync
from persia.nn import EmbeddingCollection
from persia.ps import EmbeddingServer, ServerOptions, latest_reading
from persia.ps import space as ps_space
from persia.ps.regions import leftovers
from persia.ps.shares import Shares, divide_tables
from persia.ps.sizes import declared_sizes
from persia.ps.space import SpaceWait
from persia.schema import SGD, IdFeature, Schema, Steps, Table, Zeros
from persia.services import EmbeddingPS, RowChunk
from persia.store import COLD_ROW_BYTES
from persia.types import Gradients, PushHeader
from support.disks import filled, freezing_disk, frozen, small_disk

DEADLINE = 60.0
DIM = 16
ROWS = 3000


def tables(spill, **changes):
    settings = {"capacity": 100_000, "memory_rows": 500, "initializer": Zeros(), **changes}
    return {"item": Table("item", DIM, spill=str(spill), **settings)}


def started(spill, regions=None, mode=None, timeout=DEADLINE, **changes):
    options = ServerOptions(timeout=timeout, regions=None if regions is None else str(regions))
    return EmbeddingServer(tables(spill, **changes), SGD(lr=1.0), mode or Hybrid(4, combine=False), 3, 1, options)


def lookup(server, ids, train=True):
    return server.lookup({"item": np.asarray(ids, np.uint64)}, train)["item"].copy()


def push(server, sequence, ids):
    ids = np.asarray(ids, np.uint64)
    gradients = {"item": Gradients(ids, np.full((len(ids), DIM), -1.0, np.float32))}
    return server.push(PushHeader(1, 0, sequence, sequence, len(ids)), gradients)["item"]


def fill(server, rows=ROWS):
    for start in range(0, rows, 500):
        lookup(server, range(start, min(start + 500, rows)))


@pytest.fixture
def places(tmp_path):
    """Directories of regions and of rows on disk, in a cluster of this name."""
    regions, spill = tmp_path / "shm" / "persia-x" / "ps-0", tmp_path / "ssd"
    yield regions, spill
    gc.collect()


def test_a_restarted_ps_has_the_rows_on_either_side(places):
    regions, spill = places
    server = started(spill, regions)
    fill(server)
    push(server, 1, range(0, ROWS, 2))
    counts = server.statistics()["item"]
    assert counts["rows"] == ROWS
    assert ROWS - 500 <= counts["disk_rows"] < ROWS
    assert counts["disk_bytes"] >= counts["disk_rows"] * DIM * 4
    assert counts["spilled"] > counts["promoted"] > 0
    directory = spill / "persia-x" / "ps-0"
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    del server
    gc.collect()
    again = started(spill, regions)
    np.testing.assert_array_equal(lookup(again, range(ROWS), train=False)[:, 0], np.arange(ROWS) % 2 == 0)
    push(again, 1, range(0, ROWS, 2))  # It has been applied.
    assert lookup(again, range(ROWS), train=False)[:, 0].sum() == ROWS / 2
    again.close()
    assert not directory.parent.exists()
    assert not regions.parent.exists()
    assert spill.exists()


def test_without_regions_the_files_have_no_name(places):
    _, spill = places
    server = started(spill)
    fill(server)
    assert server.statistics()["item"]["disk_rows"] > 0
    assert list(spill.iterdir()) == []
    assert lookup(server, range(ROWS), train=False).shape == (ROWS, DIM)


def test_leftovers_have_their_rows_on_disk(places):
    regions, spill = places
    server = started(spill, regions)
    fill(server)
    root = str(regions.parents[1])
    (left,) = leftovers(root)
    assert left.in_use
    assert left.disk >= ROWS * DIM * 4 / 2
    assert not left.remove()
    (alone,) = leftovers(str(spill))
    assert (alone.memory, alone.tables, alone.in_use) == (0, ["item"], True)
    del server
    gc.collect()
    shutil.copytree(regions.parent, regions.parents[1] / "kept")
    assert leftovers(root)[0].remove()
    assert not (spill / "persia-x").exists()
    # Of regions that are gone with their host, the files alone are left.
    shutil.copytree(regions.parents[1] / "kept", regions.parent)
    shutil.rmtree(regions.parent)
    server = started(spill, regions)
    del server
    gc.collect()
    shutil.rmtree(regions.parent)
    (alone,) = leftovers(str(spill))
    assert not alone.in_use
    assert alone.remove()
    assert not (spill / "persia-x").exists()


def test_a_list_of_directories_leads_nowhere_else(places, tmp_path):
    """Whoever cleans as root must not remove what someone's list names."""
    regions, spill = places
    victim = tmp_path / "home" / "persia-x" / "ps-1"
    victim.mkdir(parents=True)
    (victim / "000-item.cold.0").write_text("precious")
    named_alike = tmp_path / "home" / "persia-x" / "ps-0"
    named_alike.mkdir()
    (named_alike / "letters").write_text("precious")
    server = started(spill, regions)
    (regions / "spill.json").write_text(f'["{victim}", "{named_alike}", "relative"]')
    del server
    gc.collect()
    assert leftovers(str(regions.parents[1]))[0].remove()
    assert (victim / "000-item.cold.0").exists()
    assert (named_alike / "letters").exists()


@pytest.mark.parametrize("damage", ["gone", "cut", "foreign"])
def test_a_file_that_is_gone_or_another_one(places, damage, monkeypatch):
    regions, spill = places
    server = started(spill, regions)
    fill(server)
    del server
    gc.collect()
    (file,) = (spill / "persia-x" / "ps-0").glob("*.cold.0")
    if damage == "gone":
        file.unlink()
    elif damage == "cut":
        os.truncate(file, 70_000)
    else:
        other = started(spill, regions.parent / "ps-1")
        fill(other)
        del other
        gc.collect()
        shutil.copy(spill / "persia-x" / "ps-1" / file.name, file)
    with pytest.raises(StoreError, match=r"rows on disk .*checkpoint"):
        started(spill, regions)


def test_a_directory_that_cannot_be_made(places, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"Cannot create the directory .* Set `spill` of 'item' to another one"):
        started(tmp_path / "file" / "x")


# --- disks that are full, and one that stalls ----------------------------------------------------------------------


@pytest.fixture
def mounted(tmp_path):
    """A file system of 24 MiB."""
    with small_disk(tmp_path / "mounted") as place:
        yield place


def await_log(caplog, text, thread):
    deadline = time.monotonic() + DEADLINE
    while text not in caplog.text:
        assert thread.is_alive()
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Call(threading.Thread):
    def __init__(self, function):
        super().__init__()
        self.function, self.error = function, None
        self.start()

    def run(self):
        try:
            self.function()
        except Exception as error:
            self.error = error


@pytest.mark.processes
def test_lookups_and_pushes_wait_while_the_disk_is_full(mounted, caplog):
    caplog.set_level(logging.WARNING, "persia.ps")
    server = started(mounted / "ssd", memory_rows=2000)
    fill(server, 2000)
    filler = filled(mounted)
    begun = [0]

    def look_up():
        for start in range(2000, 40_000, 500):
            lookup(server, range(start, start + 500))
            begun[0] = start

    looking = Call(look_up)
    await_log(caplog, "lookup waits for space", looking)
    pushing = Call(lambda: push(server, 1, range(begun[0])))
    assert "no room to grow" in caplog.text
    assert str(mounted) in caplog.text
    assert "free there: 0" in caplog.text
    assert lookup(server, range(100), train=False).shape == (100, DIM)  # Others are answered.
    filler.unlink()
    for thread in (looking, pushing):
        thread.join(DEADLINE)
        assert not thread.is_alive()
        assert thread.error is None
    assert caplog.text.count("waits for space") == 1
    assert "training continues" in caplog.text
    assert server.statistics()["item"]["rows"] == 40_000
    push(server, 1, range(begun[0]))
    values = lookup(server, range(40_000), train=False)[:, 0]
    assert set(values[begun[0] :]) == {0.0}
    server = None


@pytest.mark.processes
def test_a_push_that_the_full_disk_interrupted_is_applied_once(mounted, caplog):
    """Its rows come back from disk, so others have to leave memory."""
    server = started(mounted / "ssd", memory_rows=2000)
    fill(server, 30_000)
    filler = filled(mounted)
    pushing = Call(lambda: [push(server, n, np.random.default_rng(n).permutation(30_000)) for n in range(1, 9)])
    await_log(caplog, "push waits for space", pushing)
    filler.unlink()
    pushing.join(DEADLINE)
    assert pushing.error is None
    assert set(lookup(server, range(30_000), train=False).ravel()) == {8.0}
    server = None


def test_however_many_calls_wait_the_log_has_one_line_for_all(caplog):
    caplog.set_level(logging.WARNING, "persia.ps")
    space, full, tried = SpaceWait(DEADLINE), threading.Event(), [threading.Event() for _ in range(3)]

    def attempt(number):
        if not full.is_set():
            if tried[number].is_set():
                again[number].set()
            tried[number].set()
            raise StoreFullError("no room there")

    again = [threading.Event() for _ in tried]
    calls = [Call(lambda number=number: space.retry(lambda: attempt(number), "lookup")) for number in range(3)]
    assert all(event.wait(DEADLINE) for event in again)  # All of them wait.
    full.set()
    for call in calls:
        call.join(DEADLINE)
        assert call.error is None
    assert caplog.text.count("lookup waits for space, so training pauses: no room there") == 1
    assert caplog.text.count("training continues") == 1


@pytest.mark.processes
def test_a_checkpoint_that_is_loaded_waits_for_the_disk(mounted, caplog):
    chunk = RowChunk("item", 0, {
        "ids": np.arange(9000, dtype=np.uint64), "embeddings": np.ones((9000, DIM), np.float32),
        "last_step": np.zeros(9000, np.uint32), "stamp": np.ones(9000, np.uint32),
    })  # fmt: skip
    server = started(mounted / "ssd", memory_rows=2000)
    filler = filled(mounted)
    loading = Call(lambda: server.import_rows(chunk))
    await_log(caplog, "import_rows waits for space", loading)
    filler.unlink()
    loading.join(DEADLINE)
    assert loading.error is None
    assert set(lookup(server, range(9000), train=False).ravel()) == {1.0}
    server = None


@pytest.mark.processes
def test_a_disk_that_stays_full_is_an_error_that_loses_nothing(mounted):
    server = started(mounted / "ssd", memory_rows=2000, timeout=0.3)
    fill(server, 2000)
    push(server, 1, range(2000))
    filler = filled(mounted)
    with pytest.raises(StoreFullError, match=r"no room to grow .*lookup waited \d+\.\d s for space"):
        fill(server, 100_000)
    found = lookup(server, range(2000), train=False)
    assert set(found.ravel()) == {1.0}
    filler.unlink()
    fill(server, 5000)
    server = None


@pytest.mark.processes
def test_training_in_this_process_waits_for_the_disk(mounted, caplog):
    schema = Schema([IdFeature("item", dim=DIM)], tables=list(tables(mounted / "ssd", memory_rows=2000).values()))
    embeddings = EmbeddingCollection(
        schema, optimizer=SGD(1.0), mode=Sync(), cluster=persia.cluster.Embedded(threads=1)
    )
    filler = filled(mounted)
    setting = Call(
        lambda: embeddings.set_rows("item", np.arange(9000, dtype=np.uint64), np.ones((9000, DIM), np.float32))
    )
    await_log(caplog, "set_rows waits for space", setting)
    filler.unlink()
    setting.join(DEADLINE)
    assert setting.error is None
    assert embeddings.statistics()["item"]["rows"] == 9000
    embeddings = None


@contextlib.contextmanager
def reached(server, timeout):
    """A stub of a PS; both have this timeout."""
    with rpc.serve(server, protocol=EmbeddingPS) as served:
        stub = rpc.connect(served.address, EmbeddingPS, timeout=timeout)
        yield stub
        rpc.close(stub)


@pytest.mark.processes
def test_a_caller_gets_the_error_of_the_disk_not_a_late_ps(mounted, monkeypatch):
    monkeypatch.setattr(ps_space, "GRACE_SHARE", 0.8)  # Seconds, so that a stall does not use them up.
    timeout = 5.0
    server = started(mounted / "ssd", memory_rows=2000, timeout=timeout)
    fill(server, 2000)
    filled(mounted)
    with reached(server, timeout) as stub:
        expected = r"no room to grow .*{} waited \d\.\d s for space"
        with pytest.raises(StoreFullError, match=expected.format("lookup")):
            fill(stub, 100_000)
        ids = np.arange(10**6, 10**6 + 9000, dtype=np.uint64)

        def set_rows(number):
            stub.set_rows(number, "item", ids, np.ones((len(ids), DIM), np.float32), None)

        # One after the other: the second has used up its time when it is its turn.
        for call in [Call(lambda number=number: set_rows(number)) for number in range(2)]:
            call.join(DEADLINE)
            with pytest.raises(StoreFullError, match=expected.format("set_rows")):
                raise call.error
    server = stub = set_rows = call = None


@pytest.mark.processes
def test_a_push_that_waited_for_others_gets_the_disk_error(mounted, monkeypatch):
    timeout, grace = 8.0, 3.5
    monkeypatch.setattr(ps_space, "GRACE_SHARE", grace / timeout)
    options = ServerOptions(2, timeout)
    server = EmbeddingServer(tables(mounted / "ssd", memory_rows=2000), SGD(lr=1.0), Sync(), 3, 1, options)
    fill(server, 30_000)
    filled(mounted)
    with pytest.raises(StoreFullError):
        fill(server, 200_000)
    ids = np.arange(5000, dtype=np.uint64)
    gradients = {"item": Gradients(ids, np.full((len(ids), DIM), -1.0, np.float32))}
    with reached(server, timeout) as stub:
        calls = []
        for rank in range(2):
            calls.append(Call(lambda rank=rank: stub.push(PushHeader(1, rank, 1, 1, len(ids)), gradients)))
            calls[0].join(grace + 0.5)  # More than what the last to arrive gives up before its own deadline.
        for call in calls:
            call.join(DEADLINE)
            with pytest.raises(StoreFullError, match=r"no room to grow .*push waited \d\.\d s for space"):
                raise call.error
    server = stub = calls = call = None


@pytest.fixture
def freezing(tmp_path):
    """A file system of its own, which holds back writes while it is frozen."""
    with freezing_disk(tmp_path) as place:
        yield place


def metrics_of(server):
    """By name; and the seconds that it took."""
    found = {}
    began = time.monotonic()
    asking = Call(lambda: found.update((metric.name, metric.value) for metric in server.observe().metrics))
    asking.join(10.0)
    assert not asking.is_alive()
    return found, time.monotonic() - began


@pytest.mark.processes
def test_metrics_are_given_while_the_disk_stalls(freezing, monkeypatch):
    """The last ones known: health checks must not take the PS for dead."""
    monkeypatch.setattr(latest_reading, "WAIT_SECONDS", 9.0)
    server = started(freezing / "ssd", memory_rows=2000)
    fill(server, 10_000)
    before, _ = metrics_of(server)
    assert (before["ps_rows"], before["ps_metrics_late_seconds"]) == (10_000, 0)
    with frozen(freezing), monkeypatch.context() as patch:
        patch.setattr(latest_reading, "WAIT_SECONDS", 1.0)
        working = Call(lambda: fill(server, 60_000))
        late = 0.0
        while working.is_alive() and not late:
            during, seconds = metrics_of(server)
            late = during["ps_metrics_late_seconds"]
        assert 1 <= late <= seconds < DEADLINE / 2
        assert 10_000 <= during["ps_rows"] < 60_000
        assert during.keys() == before.keys()
        found = []
        Call(lambda: found.append(server.latest_statistics()["item"]["rows"])).join(10.0)
        assert found == [during["ps_rows"]]
        during, seconds = metrics_of(server)
        assert during["ps_metrics_late_seconds"] > late + 1.5  # Of the same reading, not of the last one.
        assert len([t for t in threading.enumerate() if t.name == "persia-metrics"]) == 1
    working.join(DEADLINE)
    assert not working.is_alive()
    assert working.error is None
    after, _ = metrics_of(server)
    assert (after["ps_rows"], after["ps_metrics_late_seconds"]) == (60_000, 0)
    server = working = None


@pytest.mark.slow
def test_a_disk_that_stalls_for_20_seconds(freezing):
    """Calls wait, and nothing is lost."""
    server = started(freezing / "ssd", memory_rows=2000)
    fill(server, 10_000)
    with frozen(freezing):
        working = Call(lambda: [fill(server, 60_000), push(server, 1, range(60_000))])
        working.join(20.0)
        assert working.is_alive()
    working.join(DEADLINE)
    assert not working.is_alive()
    assert working.error is None
    assert set(lookup(server, range(60_000), train=False).ravel()) == {1.0}
    server = working = None


# --- sizes ---------------------------------------------------------------------------------------------------------


def memory(total):
    return Memory(total, total, "the memory of the host")


def test_rows_in_memory_are_divided_by_memory_on_disk_equally():
    item = {"item": Table("item", DIM, capacity=10_000_000, memory_rows=1_000_000, spill="/ssd")}
    (size,) = declared_sizes(item, SGD(1.0))
    assert size.bytes == 1_000_000 * 100 + 9_000_000 * COLD_ROW_BYTES
    assert divide_tables(item, SGD(1.0), [None, None]) == [Shares({"item": 5_000_000}, {"item": 500_000})] * 2
    shares = divide_tables(item, SGD(1.0), [memory(86_400_000), memory(1 << 30)])
    assert [share.memory_rows["item"] for share in shares] == [300_000, 700_000]
    assert [share.capacities["item"] for share in shares] == [5_000_000] * 2


def test_memory_that_is_too_small_is_refused_with_the_numbers():
    item = {"item": Table("item", DIM, capacity=10_000_000, memory_rows=1_000_000, spill="/ssd")}
    expected = (
        r"needs 198\.4 MiB .*1,000,000 rows of 100 bytes .* and 9,000,000 rows on disk of 12 bytes.* "
        r"lower `memory_rows`, to 431,818"
    )
    with pytest.raises(ConfigError, match=expected):
        divide_tables(item, SGD(1.0), [memory(79_000_000)] * 2)
    with pytest.raises(ConfigError, match=r"57\.2 MiB for the index of rows on disk"):
        divide_tables(item, SGD(1.0), [memory(50_000_000)] * 2)


def test_a_table_without_memory_rows_gets_the_remaining_memory():
    def shares(*found, total=2_000_000_000):
        return divide_tables({table.name: table for table in found}, SGD(1.0), [memory(total // 2)] * 2)[0]

    declared = Table("user", DIM, capacity=2_000_000)  # 200 MB
    item = Table("item", DIM, spill="/ssd", capacity=50_000_000)  # 600 MB of index
    rows = shares(declared, item).memory_rows["item"]
    assert rows == pytest.approx((2_000_000_000 * 0.9 - 200_000_000 - 600_000_000) / 88 / 2, abs=1)
    whole = Table("item", DIM, spill="/ssd")
    assert shares(whole).memory_rows["item"] == pytest.approx(2_000_000_000 * 0.9 / 2 / 100 / 2, abs=1)
    assert "item" not in shares(whole).capacities
    assert shares(whole, Table("other", DIM)).memory_rows["item"] == pytest.approx(2_250_000, abs=1)
    # What a small table does not need is left to the others.
    small = Table("small", DIM, capacity=40_000, spill="/ssd")
    found = shares(whole, small).memory_rows
    assert found["small"] == 20_000
    assert found["item"] == pytest.approx((2_000_000_000 * 0.9 - 40_000 * 100) / 2 / 100 / 2, abs=1)
    few = Table("item", DIM, spill="/ssd", capacity=10_000)
    assert shares(few) == Shares({"item": 5000}, {"item": 5000})


@pytest.mark.processes
def test_a_disk_with_too_little_space_is_a_warning(mounted, caplog):
    started(mounted / "ssd", capacity=1_000_000)
    assert "24.0 MiB free for an embedding PS, but its rows on disk may take 125.9 MiB" in caplog.text


@pytest.mark.parametrize("field", ["spill", "memory_rows"])
def test_what_a_table_says(field):
    wrong = {
        "spill": [({"spill": "ssd"}, "absolute path"), ({"spill": 7}, "absolute path"), ({"spill": ""}, "absolute")],
        "memory_rows": [
            ({"memory_rows": 5}, "needs spill"),
            ({"spill": "/ssd", "memory_rows": 0}, "from 1 to"),
            ({"spill": "/ssd", "memory_rows": True}, "from 1 to"),
            ({"spill": "/ssd", "memory_rows": 11, "capacity": 10}, "from 1 to 10"),
            ({"spill": "/ssd", "memory_rows": "many"}, "from 1 to"),
        ],
    }
    for settings, words in wrong[field]:
        with pytest.raises(ConfigError, match=words) as caught:
            Table("item", 4, **settings)
        assert caught.value.fields["field"] == f"Table('item').{field}"
    assert Table("item", 4, spill=Path("/ssd")).spill == "/ssd"
    assert Table("item", 4, spill="/ssd", memory_rows=np.int64(3), ttl=Steps(4)).memory_rows == 3
