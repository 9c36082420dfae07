"""Rows of a prediction server: the delay that updates add to requests, the time to start, lookups.

    python -m benchmarks serve.rows_pause_p999 serve.start_s serve.lookup_vs_store [--preset smoke|laptop|full]

Rows have 16 floats. A request looks up 256 ids in each of 26 tables, in one call of `persia.store.served`. One thread
sends requests. In serve.rows_pause_p999 another one applies 100,000 rows per second meanwhile, of which a tenth are
new and as many older ones are removed. The tables are snapshots with changes, so rows come from both. That is the share
of the tables in serve.update_pause_p999 (`serve_updates.py`), where a predictor follows a log of changes.

Times are wall-clock times, so they contain what other processes take, and waits for the interpreter lock. The detail
`cpu` is the same difference in processor time of the thread that sends requests.
"""

from __future__ import annotations

import math
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import persia
from benchmarks import runner
from benchmarks.elsewhere import run_python
from benchmarks.store import BATCH, DIM, filled, ids_of
from benchmarks.store_pauses import timed
from persia.checkpoint.storage import Storage
from persia.nn.models import FFNN
from persia.publish.epochs import begin_epoch
from persia.publish.format import NETWORK, TableChanges, stream_of
from persia.publish.stream import StreamWriter
from persia.store.served import ServedTable, lookup_packed
from persia.types import BucketMap

TABLES, IDS = 26, 256
UPDATES_PER_SECOND, UPDATE = 100_000, 1_000
"""Changed rows per second, and changed rows of one call."""

APPLIED = 0.99
"""Share of the changed rows that must have been applied: a round ends between two calls."""

NEW = 10
"""Changed rows for each new row."""

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
    out, present = np.empty(TABLES * IDS * DIM, np.float32), np.empty(TABLES * IDS, np.bool_)
    seconds = np.empty((2, count))
    for number in range(count):
        ids = ids_of(random.integers(0, rows, TABLES * IDS))
        seconds[:, number] = timed(lambda ids=ids: lookup_packed(tables, counts, ids, out, present))
    return seconds


@runner.measures("serve.rows_pause_p999")
def rows_pause(preset: str) -> runner.Measure:
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
    pauses = p999[0] - p999[1]
    if preset != "smoke" and updates.rate() < APPLIED * UPDATES_PER_SECOND:
        pauses = np.full_like(pauses, math.nan)  # Which fails: fewer changes pause less.
    return runner.quantity(
        "serve.rows_pause_p999", pauses.tolist(), "s",
        at_most=None if preset == "smoke" else PAUSE, details=details,
    )  # fmt: skip


START_PROGRAM = """
import sys, time
import numpy as np
import persia
from persia.nn.models import FFNN
from persia.serve import Predictor, ServeOptions

url, cache, times = sys.argv[1], sys.argv[2], int(sys.argv[3])
ids = np.array(sys.argv[4].split(","), np.uint64)
for _ in range(times):
    predictor = Predictor(url, lambda schema: FFNN(schema, hidden=(8,)), ServeOptions(cache_dir=cache))
    begin = time.perf_counter()
    predictor.start()
    started = time.perf_counter()
    found = predictor.embeddings("item", ids)[0]
    print(started - begin, time.perf_counter() - begin, found.sum(), predictor.state().rows)
    predictor.close()
"""
"""Program of a process that starts: what it prints leaves imports out."""


def publish_rows(url: str, rows: int) -> None:
    """Writes a log of changes with one PS, `rows` rows of one table, and a network."""
    schema = persia.Schema([persia.IdFeature("item", DIM)])
    storage = Storage(url)
    epoch = begin_epoch(storage, BucketMap.even(1), schema)
    stream = StreamWriter(storage, epoch.epoch, epoch.run, stream_of(0), keep=3)
    for start in range(0, rows, BATCH):
        ids = ids_of(np.arange(start, min(start + BATCH, rows)))
        stream.add_part({"0.ids": ids, "0.values": np.ones((len(ids), DIM), np.float32)})
    tables = [TableChanges(name="item", dim=DIM, rows=rows, removed=0)]
    stream.commit("snapshot", 1, time.monotonic(), tables)
    network = StreamWriter(storage, epoch.epoch, epoch.run, NETWORK, keep=3)
    state = FFNN(schema, hidden=(8,)).state_dict()
    network.add_part({name: tensor.numpy() for name, tensor in state.items()})
    network.commit("network", 1, time.monotonic(), [])


@runner.measures("serve.start_s")
def start(preset: str) -> runner.Measure:
    """Seconds until the `Predictor` of a second process has started from `cache_dir` and read its first 256 rows."""
    rows = SCALES[preset].snapshot
    with tempfile.TemporaryDirectory() as directory:
        url, cache = f"{directory}/log", f"{directory}/cache"
        publish_rows(url, rows)
        ids = ",".join(map(str, ids_of(np.random.default_rng(0).integers(0, rows, IDS)).tolist()))
        program = ["-c", START_PROGRAM, url, cache]
        # The first process writes the cache. Imports take longer than all else in smoke: one process starts it often.
        rounds = [1, runner.MIN_ROUNDS] if preset == "smoke" else [1] * (1 + runner.MIN_ROUNDS)
        runs = []
        for times in rounds:
            run = run_python([*program, times, ids])
            run.check_returncode()
            runs += [tuple(map(float, line.split())) for line in run.stdout.splitlines()]
        for measured in runs:
            if measured[2:] != (IDS, rows):
                raise RuntimeError(f"{measured[2]:.0f} of {IDS} and {measured[3]:.0f} of {rows} rows were found.")
        kept = sum(file.stat().st_size for file in Path(cache).rglob("*.rows"))
    details = {
        "rows": rows,
        "start": float(np.median([run[0] for run in runs[1:]])),
        "first_process": runs[0][1],
        "bytes": kept,
    }
    return runner.quantity("serve.start_s", [run[1] for run in runs[1:]], "s", at_most=START, details=details)


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
