"""Embedding PSs that are killed: how soon they answer again, and whether anything is lost.

    python -m benchmarks 'recovery.*' [--preset smoke|laptop|full] [--json FILE]

Rows of dim 16 with Adagrad, in /dev/shm.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks import runner
from benchmarks.recovery_load import Load, kills
from persia import rpc
from persia.services import EmbeddingPS
from persia.store import NativeStore, TableConfig

BATCH = 65_536
BURST = 8
DIM = 16
DEADLINE = 120.0
SHM = "/dev/shm"


@dataclass(frozen=True)
class Scale:
    """How much of everything a preset does."""

    rows: int
    rounds: int
    kills: int
    batches: int


SCALES = {
    "smoke": Scale(100_000, 1, 1, 4),
    "laptop": Scale(10_000_000, 5, 100, 20),
    "full": Scale(10_000_000, 11, 300, 60),
}

SERVE = """
import json, os, sys
from persia import rpc
from persia.modes import Hybrid
from persia.ps import EmbeddingServer, ServerOptions
from persia.schema import Adagrad, Table
from persia.services import EmbeddingPS

address, regions, settings = sys.argv[1:]
print("imported", flush=True)
sys.stdin.readline()
tables = {"table": Table("table", dim=16, **json.loads(settings))}
threads = len(os.sched_getaffinity(0))
servant = EmbeddingServer(tables, Adagrad(0.05), Hybrid(4), 0, threads, ServerOptions(1, 60.0, regions))
with rpc.serve(servant, address, protocol=EmbeddingPS):
    print(servant._store.recovery(0)["rebuilt"], flush=True)
    sys.stdin.read()
"""


class Server:
    """A PS process that has imported all it needs, as Ray's processes have, and begins when it is told to.

    Args:
        address: where it listens.
        regions: directory of its regions.
        settings: of its table.
    """

    def __init__(self, address: str, regions: Path, **settings: object) -> None:
        source = Path(__file__).resolve().parents[1] / "src"
        paths = os.pathsep.join([str(source), *sys.path])
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVE, address, str(regions), json.dumps(settings)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": paths}, text=True,
        )  # fmt: skip
        self._expect()

    def begin(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def rebuilt(self) -> int:
        """Waits until it serves; how many shards needed a new index."""
        return int(self._expect())

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()

    def _expect(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the PS process has failed"
        return line


@contextlib.contextmanager
def regions(root: str = SHM) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="persia-bench-", dir=root))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def free_address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{free.getsockname()[1]}"


def ids_of(rows: np.ndarray) -> np.ndarray:
    return rows.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def fill(stub: EmbeddingPS, rows: int) -> None:
    for start in range(0, rows, BATCH):
        stub.lookup({"table": ids_of(np.arange(start, min(start + BATCH, rows)))}, True)


def recovered(preset: str, name: str, target: float, *, loaded: bool) -> runner.Measure:
    """From the kill to the first answer to a caller that has been waiting all the time."""
    scale = SCALES[preset]
    address = free_address()
    seconds, rebuilt, stored = [], [], scale.rows
    probe = {"table": ids_of(np.arange(1000))}
    with regions() as directory, contextlib.ExitStack() as stack:
        server = Server(address, directory / "ps-0")
        stack.callback(lambda: server.end())
        server.begin()
        server.rebuilt()
        stub = rpc.connect(address, EmbeddingPS, peer="embedding PS 0", timeout=DEADLINE)
        stack.callback(rpc.close, stub)
        fill(stub, scale.rows)
        while len(seconds) < scale.rounds:
            successor = Server(address, directory / "ps-0")
            if loaded:  # Its death falls into the insertion of new rows.
                starts = range(stored, stored + BURST * BATCH, BATCH)
                stored += BURST * BATCH
                work = [rpc.start(stub.lookup, {"table": ids_of(np.arange(n, n + BATCH))}, True) for n in starts]
                time.sleep(0.02)
            began = time.perf_counter()
            server.kill()
            successor.begin()
            stub.lookup(probe, False)
            elapsed = time.perf_counter() - began
            count = successor.rebuilt()
            if loaded:
                for call in work:
                    call.result()
            server.end()
            server = successor
            if not loaded or count:  # Else the kill came too late or too early.
                seconds.append(elapsed)
                rebuilt.append(count)
        rows = stub.statistics()["table"]["rows"]
    assert rows == stored, f"{stored - rows} rows are missing"
    details = {"rows": rows, "slowest": max(seconds), "rebuilt_shards": max(rebuilt)}
    return runner.quantity(name, seconds, "s", at_most=target, details=details)


@runner.measures("recovery.attach_s")
def attach(preset: str) -> runner.Measure:
    """Its shards were idle."""
    return recovered(preset, "recovery.attach_s", 1.0, loaded=False)


@runner.measures("recovery.rebuild_s")
def rebuild(preset: str) -> runner.Measure:
    """It was inserting: the index has to be rebuilt from the rows."""
    return recovered(preset, "recovery.rebuild_s", 5.0, loaded=True)


@runner.measures("recovery.lost_rows")
def lost_rows(preset: str) -> runner.Measure:
    """Rows that are neither as before nor as after the request in flight, or not as they should be once it is repeated.

    Insertions, evictions and pushes; each kill at a random moment; every row is compared, optimizer state included. As
    many kills again of a table with room for all ids.
    """
    comparisons, wrong = [], []
    for load in (Load(1, ids=60_000, capacity=40_000, batch=8000), Load(2, ids=40_000, capacity=80_000, batch=8000)):
        with regions() as directory:
            comparisons += kills(directory / "ps-0", load, SCALES[preset].kills, 0.05)
        wrong.append(sum(v.wrong for v in comparisons) - sum(wrong))
    counts = {key: sum(v.recovery[key] > 0 for v in comparisons) for key in ("busy", "undone", "open", "rebuilt")}
    details = {"kills": len(comparisons), "rows_compared": sum(v.rows for v in comparisons), **counts}
    details |= {"wrong_full": wrong[0], "wrong_roomy": wrong[1]}
    return runner.Measure("recovery.lost_rows", float(sum(wrong)), "rows", at_most=0.0, details=details)


@runner.measures("recovery.others_answer")
def others_answer(preset: str) -> runner.Measure:
    """Lookups per second that another PS answers while one is down, over those while both are up."""
    calls = 200 * SCALES[preset].batches
    probe = {"table": ids_of(np.arange(1000))}
    with regions() as directory, contextlib.ExitStack() as stack:
        addresses = [free_address() for _ in range(2)]
        servers, stubs = [], []
        for number, address in enumerate(addresses):
            servers.append(Server(address, directory / f"ps-{number}"))
            stack.callback(servers[-1].end)
            servers[-1].begin()
            servers[-1].rebuilt()
            stubs.append(rpc.connect(address, EmbeddingPS, peer=f"embedding PS {number}", timeout=DEADLINE))
            stack.callback(rpc.close, stubs[-1])
            stubs[-1].lookup(probe, True)

        def rate() -> float:
            began = time.perf_counter()
            for _ in range(calls):
                stubs[1].lookup(probe, True)
            return calls / (time.perf_counter() - began)

        rate()
        both = [rate() for _ in range(runner.rounds_of(preset))]
        servers[0].kill()
        waiting = rpc.start(stubs[0].lookup, probe, True)
        alone = [rate() for _ in range(runner.rounds_of(preset))]
        successor = Server(addresses[0], directory / "ps-0")
        stack.callback(successor.end)
        successor.begin()
        assert waiting.result()["table"].shape == (1000, DIM)  # Who waited for the dead one gets its answer.
    middle = float(np.median(both))
    return runner.quantity(
        "recovery.others_answer", [one / middle for one in alone], "ratio", at_least=0.9, details={"of": "calls/s"}
    )


def filled(directory: Path | None, rows: int) -> NativeStore:
    """A store of 1 thread: in files, or in anonymous memory."""
    store = NativeStore()
    store.create_table(TableConfig("table", DIM), None if directory is None else str(directory / "table"))
    for start in range(0, rows, BATCH):
        store.lookup([0], [ids_of(np.arange(start, min(start + BATCH, rows)))], True)
    return store


def rate(keys: list[np.ndarray], call: Callable[[np.ndarray], object]) -> Callable[[], float]:
    """Ids per second over all batches; a first pass is not counted."""

    def measure() -> float:
        began = time.perf_counter()
        for ids in keys:
            call(ids)
        return sum(map(len, keys)) / (time.perf_counter() - began)

    measure()
    return measure


def looking_up(store: NativeStore, keys: list[np.ndarray]) -> Callable[[], float]:
    out = [np.empty((len(keys[0]), DIM), np.float32)]
    return rate(keys, lambda ids: store.lookup([0], [ids], True, out))


def updating(store: NativeStore, keys: list[np.ndarray]) -> Callable[[], float]:
    gradients = np.random.default_rng(1).normal(size=(len(keys[0]), DIM)).astype(np.float32)
    return rate(keys, lambda ids: store.update([0], [ids], [gradients], [0.05], 1))


Work = Callable[[NativeStore, list[np.ndarray]], Callable[[], float]]


def shared(preset: str, name: str, work: Work, targets: tuple[float | None, float | None]) -> Iterator[runner.Measure]:
    """In files against anonymous memory: /dev/shm, and a file system with huge pages where one may mount it."""
    scale, rounds = SCALES[preset], 1 if preset == "smoke" else 7
    random = np.random.default_rng(0)
    size = min(BATCH, scale.rows // 2)
    keys = [ids_of(random.choice(scale.rows, size, replace=False)) for _ in range(scale.batches)]

    def compared(name: str, root: str, target: float | None) -> runner.Measure:
        with regions(root) as directory:
            ours, theirs = (work(filled(place, scale.rows), keys) for place in (directory, None))
            return runner.ratio(name, ours=ours, theirs=theirs, of="rows/s", rounds=rounds, at_least=target)

    yield compared(name, SHM, targets[0])
    with tempfile.TemporaryDirectory() as mount:
        command = ["mount", "-t", "tmpfs", "-o", "huge=advise,size=75%", "tmpfs", mount]
        if shutil.which("mount") and subprocess.run(command, capture_output=True, check=False).returncode == 0:
            try:
                yield compared(f"{name}_huge", mount, targets[1])
            finally:
                subprocess.run(["umount", mount], check=True)


@runner.measures("recovery.shm_lookup", "recovery.shm_lookup_huge")
def shm_lookup(preset: str) -> Iterator[runner.Measure]:
    """Lookups, 1 thread."""
    return shared(preset, "recovery.shm_lookup", looking_up, (0.55, 0.85))


@runner.measures("recovery.shm_update", "recovery.shm_update_huge")
def shm_update(preset: str) -> Iterator[runner.Measure]:
    """Updates with Adagrad, 1 thread: what undo slot and progress cost, as anonymous memory has neither."""
    return shared(preset, "recovery.shm_update", updating, (None, None))
