"""Rows of a prediction server: the delay that updates add to requests, the time to open a snapshot, lookups.

    python -m benchmarks serve.update_pause_p999 serve.start_s serve.lookup_vs_store [--preset smoke|laptop|full]

Rows have 16 floats. A request looks up 256 ids in each of 26 tables, in one call of `persia.store.served`. One thread
sends requests. In serve.update_pause_p999 another one applies 100,000 rows per second meanwhile, of which a tenth are
new and as many older ones are removed. The tables are snapshots with changes, so rows come from both.

Times are wall-clock times, so they contain what other processes take, and waits for the interpreter lock. The detail
`cpu` is the same difference in processor time of the thread that sends requests.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks import runner
from benchmarks.store import BATCH, DIM, filled, ids_of
from benchmarks.store_pauses import timed
from persia.store.served import ServedTable, lookup_packed

TABLES, IDS = 26, 256
UPDATES_PER_SECOND, UPDATE = 100_000, 1_000
"""Changed rows per second, and those of one call."""

NEW = 10
"""One of so many changed rows is new."""

PAUSE, START = 0.002, 1.0


@dataclass(frozen=True)
class Scale:
    """How much of everything a preset does."""

    rows: int  # of each of the 26 tables
    requests: int  # of a round
    snapshot: int  # rows in serve.start_s
    lookups: int  # rows of the table in serve.lookup_vs_store


SCALES = {
    "smoke": Scale(2_000, 200, 50_000, 50_000),
    "laptop": Scale(200_000, 10_000, 10_000_000, 4_000_000),
    "full": Scale(1_000_000, 30_000, 10_000_000, 12_000_000),
}


def write_snapshot(path: Path, rows: int) -> None:
    table, values = ServedTable(DIM), np.ones((BATCH, DIM), np.float32)
    for start in range(0, rows, BATCH):
        ids = ids_of(np.arange(start, min(start + BATCH, rows)))
        table.set(ids, values[: len(ids)])
    table.write_snapshot(path)


class Updates:
    """Applies changes to the tables, one after another, at a fixed rate."""

    def __init__(self, tables: list[ServedTable], rows: int) -> None:
        self.tables, self.rows = tables, rows
        self.random = np.random.default_rng(0)
        self.values = self.random.random((UPDATE, DIM), np.float32)
        self.calls = 0
        self.seconds = 0.0

    def _next(self) -> None:
        table, first = self.tables[self.calls % TABLES], self.calls // TABLES * (UPDATE // NEW)
        fresh = ids_of(np.arange(self.rows + first, self.rows + first + UPDATE // NEW))
        known = ids_of(self.random.integers(first + UPDATE // NEW, self.rows + first, UPDATE - UPDATE // NEW))
        table.set(np.concatenate([known, fresh]), self.values)
        table.remove(ids_of(np.arange(first, first + UPDATE // NEW)))
        self.calls += 1

    @contextmanager
    def running(self) -> Iterator[None]:
        """Applies changes in a thread until the block ends."""
        stop, start, before = threading.Event(), time.perf_counter(), self.calls

        def run() -> None:
            while not stop.wait(
                max(0, start + (self.calls - before) * UPDATE / UPDATES_PER_SECOND - time.perf_counter())
            ):
                self._next()

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            self.seconds += time.perf_counter() - start

    def rate(self) -> float:
        """Rows per second that have been applied."""
        return self.calls * UPDATE / self.seconds


def requests(tables: list[ServedTable], rows: int, count: int) -> np.ndarray:
    """Returns wall-clock and processor seconds of each of `count` requests, `[2, count]`."""
    random, counts = np.random.default_rng(1), [IDS] * TABLES
    out, found = np.empty(TABLES * IDS * DIM, np.float32), np.empty(TABLES * IDS, np.bool_)
    seconds = np.empty((2, count))
    for number in range(count):
        ids = ids_of(random.integers(0, rows, TABLES * IDS))
        seconds[:, number] = timed(lambda ids=ids: lookup_packed(tables, counts, ids, out, found))
    return seconds


@runner.measures("serve.update_pause_p999")
def update_pause(preset: str) -> runner.Measure:
    """The 99.9th percentile of the time of requests while rows change, less that while none do."""
    scale = SCALES[preset]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "rows"
        tables = []
        for _ in range(TABLES):
            write_snapshot(path, scale.rows)
            tables.append(ServedTable(DIM, path))
        updates = Updates(tables, scale.rows)
        requests(tables, scale.rows, scale.requests)
        quiet, busy = [], []
        for number in range(2 * runner.MIN_ROUNDS):
            if number % 4 in (0, 3):
                quiet.append(requests(tables, scale.rows, scale.requests))
            else:
                with updates.running():
                    busy.append(requests(tables, scale.rows, scale.requests))
    (walls, cpus), (quiet_walls, quiet_cpus) = np.swapaxes(busy, 0, 1), np.swapaxes(quiet, 0, 1)
    p999 = [np.quantile(each, 0.999, axis=1) for each in (walls, quiet_walls, cpus, quiet_cpus)]
    details = {
        "requests": scale.requests,
        "rows": TABLES * scale.rows,
        "updates": updates.rate(),
        "p999": float(np.median(p999[0])),
        "p999_without": float(np.median(p999[1])),
        "cpu": float(np.median(p999[2] - p999[3])),
        "median": float(np.median(walls)),
        "median_without": float(np.median(quiet_walls)),
        "longest": float(walls.max()),
    }
    return runner.quantity(
        "serve.update_pause_p999", (p999[0] - p999[1]).tolist(), "s",
        at_most=None if preset == "smoke" else PAUSE, details=details,
    )  # fmt: skip


OPEN = """
import sys, time
import numpy as np
from persia.store.served import ServedTable

path, dim, ids = sys.argv[1], int(sys.argv[2]), np.array(sys.argv[3].split(","), np.uint64)
out = np.empty((len(ids), dim), np.float32)
start = time.perf_counter()
table = ServedTable(dim, path)
opened = time.perf_counter()
found = table.lookup(ids, out)
print(opened - start, time.perf_counter() - start, found, table.memory_bytes())
"""
"""Program of the second process: what it prints leaves imports out."""


@runner.measures("serve.start_s")
def start(preset: str) -> runner.Measure:
    """Seconds until a second process has opened a snapshot in the page cache and looked up its first 256 rows."""
    rows = SCALES[preset].snapshot
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "rows"
        write_snapshot(path, rows)
        table = ServedTable(DIM, path)
        table.verify()  # Reads all of it.
        runs = []
        for number in range(runner.MIN_ROUNDS):
            ids = ids_of(np.random.default_rng(number).integers(0, rows, IDS))
            command = [sys.executable, "-c", OPEN, str(path), str(DIM), ",".join(map(str, ids.tolist()))]
            run = subprocess.run(command, capture_output=True, text=True, check=True)
            runs.append(tuple(map(float, run.stdout.split())))
            if runs[-1][2] != IDS:
                raise RuntimeError(f"{IDS - int(runs[-1][2])} rows of the snapshot were not found.")
        details = {
            "rows": rows,
            "open": float(np.median([run[0] for run in runs])),
            "bytes": path.stat().st_size,
            "memory_bytes": runs[0][3],
        }
    return runner.quantity("serve.start_s", [run[1] for run in runs], "s", at_most=START, details=details)


@runner.measures("serve.lookup_vs_store")
def lookup_vs_store(preset: str) -> Iterator[runner.Measure]:
    """Rows/s of requests of 8,192 ids to a served table in memory, against evaluation lookups of the training store."""
    rows, size = SCALES[preset].lookups, 8192
    table, store = ServedTable(DIM), filled(rows)
    for begin in range(0, rows, BATCH):
        ids = ids_of(np.arange(begin, min(begin + BATCH, rows)))
        table.set(ids, np.ones((len(ids), DIM), np.float32))
    random, out = np.random.default_rng(0), np.empty((size, DIM), np.float32)
    batches = [ids_of(random.integers(0, rows, size)) for _ in range(100)]

    def ours() -> float:
        begin = time.perf_counter()
        for ids in batches:
            table.lookup(ids, out)
        return len(batches) * size / (time.perf_counter() - begin)

    def theirs() -> float:
        begin = time.perf_counter()
        for ids in batches:
            store.lookup([0], [ids], False, [out])
        return len(batches) * size / (time.perf_counter() - begin)

    ours(), theirs()
    yield runner.ratio("serve.lookup_vs_store", ours=ours, theirs=theirs, of="rows/s")
