"""A PS process dies and comes back: what was acknowledged is there exactly once, and others do not notice."""

from __future__ import annotations

import gc
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import persia
from persia import rpc
from persia.batching.id_column import IdColumn
from persia.errors import ConfigError, DeadlineError, StalePushError, StoreError, StoreFullError
from persia.modes import Async, Hybrid, Sync, encode
from persia.ps import EmbeddingServer, ServerOptions
from persia.ps.regions import LAYOUT, Regions, leftovers
from persia.ps.space import SpaceWait
from persia.schema import SGD, Adagrad, IdFeature, Schema, Table
from persia.services import EmbeddingPS
from persia.store import NativeStore, TableConfig
from persia.types import Contribution, Gradients, PushHeader
from persia.worker import Worker
from support import ps_of_16_bits
from support.ps_process import TABLES

pytestmark = pytest.mark.processes

SCRIPT = Path(__file__).parents[1] / "support" / "ps_process.py"
DEADLINE = 60.0
SCHEMA = Schema(id_features=[IdFeature("item", dim=4)], labels=["click"])
IDS = 400
LEAST = 400
"""Updates of rows by NN workers whose PSs die: more than those of one step."""


class Server:
    """A PS process that can be killed and started again, at the same address."""

    def __init__(self, regions, mode, servers=2):
        self.regions = str(regions)
        self.servers = servers
        self.mode = mode
        self.address = "tcp://127.0.0.1:*"
        self.next_version = persia.__version__
        self.start()

    def start(self):
        self.process = subprocess.Popen(
            [
                sys.executable, str(SCRIPT), self.address, self.regions, encode(self.mode), str(self.servers),
                self.next_version,
            ],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.address, self.version = self.process.stdout.readline().split()

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.end()

    def end(self):
        self.process.stdin.close()
        self.process.wait(DEADLINE)
        self.process.stdout.close()


@pytest.fixture
def root():
    path = Path(tempfile.mkdtemp(prefix="persia-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def mode():
    """Applies pushes on arrival."""
    return Hybrid(4, combine=False)


@pytest.fixture
def servers(root, mode):
    found = [Server(root / f"ps-{number}", mode) for number in range(2)]
    yield found
    for server in found:
        if server.process.poll() is None:
            server.end()
    assert not root.exists()  # A clean end leaves no regions.


class NNWorker(threading.Thread):
    """Looks up and pushes gradients of -1, so that with SGD(lr=1) the value of a row is its number of updates."""

    def __init__(self, worker, rank, lasts):
        super().__init__()
        self.worker, self.rank, self.lasts = worker, rank, lasts
        self.counts = np.zeros(IDS, np.int64)
        self.error = None
        self.generator = np.random.default_rng(rank)

    def run(self):
        try:
            for sequence in itertools.takewhile(self.lasts, itertools.count(1)):
                ids = self.generator.choice(IDS, 100, replace=False).astype(np.uint64)
                batch = self.worker.register({"item": IdColumn(ids, None)})
                rows = self.worker.lookup(batch).rows["item"]
                gradients = {"item": -np.ones_like(rows)}
                header = PushHeader(1, self.rank, sequence, sequence, len(ids))
                self.worker.push(header, [Contribution(batch, gradients)])
                self.counts[ids.astype(np.int64)] += 1
        except Exception as error:
            self.error = error


def values(worker):
    found = worker.evaluate({"item": IdColumn(np.arange(IDS, dtype=np.uint64), None)})
    return found.rows["item"][found.inverse["item"]]


def trained_through(servers, deaths, seed):
    """The sum of what the NN workers were told is done, and the rows, after so many deaths under load."""
    stubs = [rpc.connect(s.address, EmbeddingPS, peer=f"embedding PS {n}", timeout=DEADLINE) for n, s in
             enumerate(servers)]  # fmt: skip
    worker = Worker(SCHEMA, stubs)
    stop, lock = threading.Event(), threading.Lock()
    trained: dict[int, bool] = {}

    def lasts(step):
        """Whether this step is trained; the same for all NN workers, which wait for each other in some modes."""
        with lock:
            return trained.setdefault(step, not stop.is_set())

    threads = [NNWorker(worker, rank, lasts) for rank in range(4)]
    draw = random.Random(seed)
    try:
        for thread in threads:
            thread.start()
        for _ in range(deaths):
            time.sleep(draw.random() * 0.1)  # The moment of the kill is what is drawn.
            victim = draw.randrange(2)
            servers[victim].kill()
            # The other one answers meanwhile.
            other = rpc.within(stubs[1 - victim], 10.0)
            assert other.lookup({"item": np.arange(3, dtype=np.uint64)}, False)["item"].shape == (3, 4)
            servers[victim].start()
        while sum(int(thread.counts.sum()) for thread in threads) <= LEAST:  # However little they did meanwhile.
            assert all(thread.is_alive() for thread in threads)
            time.sleep(0.01)
        stop.set()
        for thread in threads:
            thread.join(DEADLINE)
            assert not thread.is_alive()
            assert thread.error is None
        return sum(thread.counts for thread in threads), values(worker)
    finally:
        stop.set()
        for stub in stubs:
            rpc.close(stub)


ON_ARRIVAL_AND_COMBINED = pytest.mark.parametrize("mode", [Hybrid(4, combine=False), Hybrid(4)], ids=str)


def assert_applied_once(mode, expected, found):
    """A combined step changes a row by the mean of the four gradients."""
    assert expected.sum() > LEAST
    updates = expected / mode.group(4, 1)
    np.testing.assert_array_equal(found, np.repeat(updates[:, None], 4, 1).astype(np.float32))


@ON_ARRIVAL_AND_COMBINED
def test_every_push_is_applied_once_through_deaths(servers, mode):
    assert_applied_once(mode, *trained_through(servers, 4, seed=1))


@ON_ARRIVAL_AND_COMBINED
def test_ps_of_another_version_take_over_one_by_one(servers, mode):
    """As in an upgrade while training runs, between versions with the same layout of regions and of messages."""
    for server in servers:
        server.next_version = "0.2.99"
    applied = trained_through(servers, 4, seed=1)
    assert {server.version for server in servers} == {"0.2.99"}
    assert_applied_once(mode, *applied)


@pytest.mark.slow
@ON_ARRIVAL_AND_COMBINED
def test_every_push_is_applied_once_through_many_deaths(servers, mode):
    assert_applied_once(mode, *trained_through(servers, 60, seed=2))


@pytest.mark.parametrize(("mode", "parts"), [(Sync(), [0, 0]), (Hybrid(2), [0, 0]), (Hybrid(2, combine=False), [0, 1])])
def test_calls_not_answered_before_the_death_are_answered_after(root, mode, parts):
    """The other one was, and does not push that step again."""

    def begun():
        options = ServerOptions(nn_workers=2, timeout=DEADLINE, regions=str(root / "ps-0"))
        return EmbeddingServer(TABLES, SGD(lr=1.0), mode, 0, 1, options)

    def push(server, sequence, part):
        ranks = [0, 0] if 1 in parts else [0, 1]
        header = PushHeader(1, ranks[part], sequence, sequence - 1, 4, parts[part], 1 + max(parts))
        gradients = {"item": Gradients(np.arange(3, dtype=np.uint64), np.full((3, 4), -1.0, np.float32))}
        server.push(header, gradients)

    def step(server, sequence):
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda part: push(server, sequence, part), range(2)))

    def rows(server):
        return server.lookup({"item": np.arange(3, dtype=np.uint64)}, False)["item"].copy()

    before = begun()
    before.switch(mode, 1, 7)
    before.lookup({"item": np.arange(3, dtype=np.uint64)}, True)
    step(before, 8)
    applied = rows(before)
    del before
    gc.collect()
    after = begun()
    push(after, 8, 1)
    np.testing.assert_array_equal(rows(after), applied)
    push(after, 7, 1)  # A late repetition.
    np.testing.assert_array_equal(rows(after), applied)
    step(after, 9)
    assert (rows(after) > applied).all()
    # Another mode counts its turns anew.
    after.switch(mode, 1, 3)
    del after
    gc.collect()
    again = begun()
    step(again, 4)
    again.close()


def test_late_pushes_of_restarted_nn_workers_change_nothing(root):
    """Pushes that arrive late are refused, also by a process that starts before the first new step."""
    options = ServerOptions(nn_workers=2, timeout=DEADLINE, regions=str(root / "ps-0"))

    def begun():
        return EmbeddingServer(TABLES, SGD(lr=1.0), Hybrid(4), 0, 1, options)

    before = begun()
    before.switch(Hybrid(4), 1, 950)
    before.switch(Hybrid(4), 2, 900)  # From a recovery point.
    before._regions.keep_step(0, 1, 957)  # Of a step that was being applied meanwhile.
    late = PushHeader(1, 0, 9, 958, 4)
    with pytest.raises(StalePushError, match="generation 1"):
        before.push(late, {})
    del before
    gc.collect()
    after = begun()
    with pytest.raises(StalePushError, match="generation 1"):
        after.push(late, {})
    sent = [PushHeader(2, rank, step - 899, step, 4) for step in (901, 900) for rank in range(2)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda header: after.push(header, {}), sent))
    assert after._regions.last_step(0) == (2, 901)
    after.close()


def test_rows_of_16_bits_outlive_their_process(root):
    """A PS that attaches the regions of one that was killed goes on with the bits of one that was not."""
    regions = str(root / "ps-0")
    script = [sys.executable, ps_of_16_bits.__file__, regions, "7"]
    with subprocess.Popen(script, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        rows = int(process.stdout.readline())
        process.kill()
    whole, attached = ps_of_16_bits.begin(None), ps_of_16_bits.begin(regions)
    try:
        ps_of_16_bits.train(whole, range(7))
        assert sum(counts["rows"] for counts in attached.statistics().values()) == rows > 200
        assert_same_rows(attached, whole)
        for server in (whole, attached):
            ps_of_16_bits.train(server, range(7, 12))
        assert_same_rows(attached, whole)
    finally:
        attached.close()
        whole.close()


def assert_same_rows(one, other):
    ids = np.arange(200, dtype=np.uint64)
    for table in ps_of_16_bits.TABLES:
        mine, theirs = (server.read_rows(table, ids, True) for server in (one, other))
        np.testing.assert_array_equal(mine.found, theirs.found)
        np.testing.assert_array_equal(mine.values, theirs.values)
        for name, array in mine.state._asdict().items():
            np.testing.assert_array_equal(array, getattr(theirs.state, name))


def test_a_caller_waits_until_its_deadline_and_says_for_whom(servers):
    stub = rpc.connect(servers[0].address, EmbeddingPS, peer="embedding PS 0", timeout=0.3)
    try:
        rpc.within(stub, DEADLINE).tables()
        servers[0].kill()
        with pytest.raises(DeadlineError, match=r"embedding PS 0 .*lookup"):
            stub.lookup({"item": np.arange(3, dtype=np.uint64)}, True)
        servers[0].start()
        assert rpc.within(stub, DEADLINE).lookup({"item": np.arange(3, dtype=np.uint64)}, True)["item"].shape == (3, 4)
    finally:
        rpc.close(stub)


def make(regions, tables=TABLES):
    return EmbeddingServer(tables, SGD(lr=1.0), Hybrid(4), 3, 1, ServerOptions(1, 60.0, str(regions)))


def test_two_servers_on_one_directory(servers, monkeypatch):
    monkeypatch.setattr("persia.store.native.LOCK_SECONDS", 0.05)
    with pytest.raises(StoreError, match="two servers on one region"):
        make(servers[0].regions)


def test_an_interrupted_start_begins_anew(root):
    directory = root / "ps-0"
    server = make(directory)
    server.lookup({"item": np.arange(10, dtype=np.uint64)}, True)
    del server
    gc.collect()
    (directory / "regions.json").unlink()  # It is written when all tables are made.
    server = make(directory)
    assert server.statistics()["item"]["rows"] == 0
    server.close()
    assert not directory.exists()


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b'{"format": 1}', b'{"format": 1, "tables": ["user"]}', b'{"format": 2, "tables": ["item"]}'],
)
def test_a_bad_manifest(root, text):
    directory = root / "ps-0"
    make(directory)
    (directory / "regions.json").write_bytes(text)
    with pytest.raises(StoreError, match="regions --clean"):
        make(directory)


def test_regions_of_another_layout(root):
    directory = root / "ps-0"
    server = make(directory)
    server.lookup({"item": np.arange(10, dtype=np.uint64)}, True)
    del server
    gc.collect()
    assert [left.layout for left in leftovers(str(root), "ps-*")] == [LAYOUT]
    for path in directory.glob("000-item.*"):
        with path.open("r+b") as file:
            file.seek(8)
            file.write((LAYOUT + 1).to_bytes(4, "little"))
    with pytest.raises(
        StoreError, match=f"have layout {LAYOUT + 1}, and this version of persia reads layout {LAYOUT}. Start"
    ):
        make(directory)
    assert [left.layout for left in leftovers(str(root), "ps-*")] == [LAYOUT + 1]
    assert directory.exists()


def test_a_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"Cannot create the directory"):
        Regions(str(tmp_path / "file" / "ps-0")).create_or_attach(NativeStore(), [TableConfig("item", 4)])


@pytest.fixture
def mounted(root):
    """Mounts a tmpfs with options."""
    places = []

    def mount(options):
        place = root / str(len(places))
        place.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
        if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("mounting is not allowed here")
        places.append(place)
        return place

    yield mount
    for place in places:
        subprocess.run(["umount", str(place)], check=True)


def test_capacities_that_do_not_fit_are_refused(mounted):
    place = mounted("size=4m")
    tables = {"item": Table("item", dim=16, capacity=10_000_000), "user": Table("user", dim=16)}
    options = ServerOptions(regions=str(place / "ps-0"))
    expected = r"needs 1.5 GiB.* has 4.0 MiB \(the size of .*\).* 10,000,000 rows of 164 bytes .*, to 25,575 for table"
    with pytest.raises(ConfigError, match=expected) as caught:
        EmbeddingServer(tables, Adagrad(0.1), Sync(), 0, 1, options)
    assert caught.value.fields["wanted"] == 1_640_000_000
    assert caught.value.fields["memory"] == 4 << 20
    assert not any(place.iterdir())


def test_capacities_must_fit_for_all_ps_of_a_host(mounted, caplog):
    tables = {"item": Table("item", dim=16, capacity=15_000, optimizer=SGD(lr=1.0))}  # 1.4 MiB
    place = mounted("size=4m")

    def begun(number, neighbours):
        options = ServerOptions(regions=str(place / f"ps-{number}"), neighbours=neighbours)
        return EmbeddingServer(tables, SGD(lr=1.0), Sync(), 0, 1, options)

    with pytest.raises(ConfigError, match=r"needs 1.4 MiB.* has 1.3 MiB"):
        begun(0, 3)
    servers = [begun(number, 2) for number in range(2)]
    # One that begins anew, though the other has filled its part, finds its own.
    servers[1].lookup({"item": np.arange(15_000, dtype=np.uint64)}, True)
    servers[0].close()
    servers[0] = begun(0, 2)
    assert "may grow to" not in caplog.text
    (place / "filler").write_bytes(bytes(3 << 19))
    servers[0].close()
    servers[0] = begun(0, 2)
    assert "MiB free for an embedding PS, but its tables may grow to 1.4 MiB: when it is full, lookups" in caplog.text
    for server in servers:
        server.close()
    del servers, server
    gc.collect()  # Else the place is busy.


def server_at(directory, tables):
    return EmbeddingServer(tables, SGD(lr=1.0), Sync(), 0, 1, ServerOptions(regions=str(directory)))


def huge_pages_asked():
    """Huge pages that a tmpfs has asked the kernel for, also in vain: memory may be in pieces that are too small."""
    counts = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    return int(counts["thp_file_alloc"]) + int(counts["thp_file_fallback"])


def test_the_log_has_the_free_space_and_a_hint_for_speed(mounted, caplog):
    caplog.set_level("INFO", "persia.ps")
    place = mounted("size=4m,huge=never")
    server = server_at(place / "ps-0", {"item": Table("item", dim=16)})
    assert "4.0 MiB free: when it is full, lookups" in caplog.text
    assert "--shm-size" in caplog.text
    assert "huge=advise" in caplog.text
    caplog.clear()
    place = mounted("size=1g,huge=advise")
    server = server_at(place / "ps-0", {"item": Table("item", dim=16, capacity=1000), "user": Table("user", dim=16)})
    assert "0.1 MiB declared" in caplog.text
    assert "huge=advise" not in caplog.text
    before = huge_pages_asked()
    server.lookup({"user": np.arange(200_000, dtype=np.uint64)}, True)
    assert huge_pages_asked() >= before + 8
    del server
    gc.collect()  # Else the place is busy.


def test_a_growth_that_fails_takes_nothing(mounted):
    """Else it would keep what it could get: others that need less would find nothing, and so would the coordinator."""
    place = mounted("size=6m")
    store = NativeStore()
    Regions(str(place / "ps-0")).create_or_attach(store, [TableConfig("item", 16, shards=1)])

    def free():
        system = os.statvfs(place)
        return system.f_bavail * system.f_frsize

    with pytest.raises(StoreFullError, match="no room to grow"):
        for start in range(0, 10**6, 100):
            before = free()
            store.lookup([0], [np.arange(start, start + 100, dtype=np.uint64)], True)
    assert free() == before > 0


def test_lookups_wait_for_room_until_their_deadline():
    attempts = []

    def call():
        attempts.append(None)
        if len(attempts) < 3:
            raise StoreFullError("region x: no room")
        return "rows"

    assert SpaceWait(30.0).retry(call, "lookup") == "rows"
    attempts.clear()
    with pytest.raises(StoreFullError, match="lookup waited"):
        SpaceWait(0.0).retry(call, "lookup")


def test_a_switch_without_space_for_last_steps_is_not_stored(mounted):
    """The next process would need it to start."""
    place = mounted("size=4m")
    options = ServerOptions(regions=str(place / "ps-0"), timeout=0.2)
    ps = EmbeddingServer(SCHEMA.resolved_tables(), SGD(0.1), Sync(), seed=1, threads=1, options=options)
    for name, table in ps.tables().items():
        ps.lookup({name: np.arange(5000 // table.dim, dtype=np.uint64)}, True)
    with (place / "filler").open("wb", buffering=0) as file:
        while shutil.disk_usage(place).free > 8192:  # enough for the mode
            file.write(bytes(4096))
    with pytest.raises(StoreFullError, match="switch waited"):
        ps.switch(Async(), 1, 0)
    assert Regions(str(place / "ps-0")).mode == ""
    (place / "filler").unlink()
    ps.switch(Async(), 2, 0)
    assert Regions(str(place / "ps-0")).mode == encode(Async())
    del ps
    gc.collect()


def test_a_switch_waits_for_room(mounted, caplog):
    place = mounted("size=4m")
    options = ServerOptions(regions=str(place / "ps-0"), timeout=DEADLINE)
    ps = EmbeddingServer(SCHEMA.resolved_tables(), SGD(0.1), Hybrid(4), seed=1, threads=1, options=options)
    filler = place / "filler"
    with pytest.raises(OSError, match="No space left"), filler.open("wb", buffering=0) as file:
        while True:
            assert file.write(bytes(4096))
    switching = threading.Thread(target=ps.switch, args=(Sync(), 1, 0))
    switching.start()
    while "switch waits for space" not in caplog.text:
        assert switching.is_alive()
        time.sleep(0.01)
    assert Regions(str(place / "ps-0")).mode == ""
    filler.unlink()
    switching.join(DEADLINE)
    assert Regions(str(place / "ps-0")).mode == encode(Sync())
    del ps
    gc.collect()
