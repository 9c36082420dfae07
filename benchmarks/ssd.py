"""Rows on disk of embedding PSs: their memory, whether a kill loses any, and how soon a PS answers again.

    python -m benchmarks ssd.lost ssd.restart_s ssd.cold_bytes [--preset smoke|laptop|full] [--json FILE]

Rows of dim 16 with Adagrad. Regions are in /dev/shm, files of rows in the directory PERSIA_SSD, else in a temporary
one: set it to a directory of the disk that is to be measured.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks import runner
from benchmarks.recovery import BATCH, DEADLINE, DIM, Server, fill, free_address, ids_of, regions
from benchmarks.recovery_load import Load, kills
from persia import rpc
from persia.services import EmbeddingPS
from persia.store import COLD_ROW_BYTES, ROW_OVERHEAD, NativeStore, TableConfig

SLOT_BYTES = 10
"""Of a row in the index, at least."""


@dataclass(frozen=True)
class Scale:
    """How much of everything a preset does."""

    kills: int
    rows: int
    memory_rows: int
    rounds: int


SCALES = {
    "smoke": Scale(3, 400_000, 100_000, 1),
    "laptop": Scale(50, 50_000_000, 1_000_000, 5),
    "full": Scale(200, 50_000_000, 1_000_000, 11),
}


@contextlib.contextmanager
def ssd() -> Iterator[Path]:
    """A new directory on the disk that is measured."""
    path = Path(tempfile.mkdtemp(prefix="persia-bench-", dir=os.environ.get("PERSIA_SSD")))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@runner.measures("ssd.lost")
def lost(preset: str) -> runner.Measure:
    """Rows that are neither as before nor as after the request in flight, or not as they should be once it is repeated.

    The process is killed at random moments while rows move between memory, which has a tenth of them, and disk. Every
    row is compared, optimizer state included: an acknowledged update that is lost makes its row wrong.
    """
    load = Load(5, ids=40_000, capacity=80_000, batch=8000, memory_rows=4000)
    with regions() as shared, ssd() as disk:
        load = load._replace(spill=str(disk))
        comparisons = kills(shared / "persia-bench" / "ps-0", load, SCALES[preset].kills, 0.05)
    counts = {key: sum(v.recovery[key] > 0 for v in comparisons) for key in ("busy", "undone", "open", "rebuilt")}
    last = comparisons[-1]
    assert last.tier["spilled"] > last.tier["promoted"] > 0
    details = {
        "kills": len(comparisons),
        "rows_compared": sum(v.rows for v in comparisons),
        **counts,
        "tier": last.tier,
    }
    wrong = sum(v.wrong for v in comparisons)
    return runner.Measure("ssd.lost", float(wrong), "rows", at_most=0.0, details=details)


@runner.measures("ssd.restart_s")
def restart(preset: str) -> runner.Measure:
    """From the kill of an idle PS to the first answer, rows on disk among them, to a caller that has been waiting."""
    scale = SCALES[preset]
    address = free_address()
    probe = {"table": ids_of(np.arange(0, scale.rows, scale.rows // 1000))}
    seconds = []
    with regions() as shared, ssd() as disk, contextlib.ExitStack() as stack:
        directory = shared / "persia-bench" / "ps-0"
        settings = {"spill": str(disk), "memory_rows": scale.memory_rows, "capacity": 2 * scale.rows}
        server = Server(address, directory, **settings)
        stack.callback(lambda: server.end())
        server.begin()
        server.rebuilt()
        stub = rpc.connect(address, EmbeddingPS, peer="embedding PS 0", timeout=DEADLINE)
        stack.callback(rpc.close, stub)
        began = time.perf_counter()
        fill(stub, scale.rows)
        filled = scale.rows / (time.perf_counter() - began)
        expected = stub.lookup(probe, False)["table"].copy()
        for _ in range(scale.rounds):
            successor = Server(address, directory, **settings)
            began = time.perf_counter()
            server.kill()
            successor.begin()
            rows = stub.lookup(probe, False)["table"]
            seconds.append(time.perf_counter() - began)
            successor.rebuilt()
            server.end()
            server = successor
            assert np.array_equal(rows, expected)
        counts = stub.statistics()["table"]
    assert counts["rows"] == scale.rows
    details = {
        "rows": counts["rows"], "disk_rows": counts["disk_rows"], "disk_bytes": counts["disk_bytes"],
        "slowest": max(seconds), "filled_rows_per_s": filled, "batch": BATCH,
    }  # fmt: skip
    return runner.quantity("ssd.restart_s", seconds, "s", at_most=5.0, details=details)


@runner.measures("ssd.cold_bytes")
def cold_bytes(preset: str) -> runner.Measure:
    """Bytes of memory of a row on disk, as the store counts them: the most at any size while a table is filled."""
    rows, hot = SCALES[preset].rows // 10, 16_384
    config = TableConfig("table", DIM, capacity=2 * rows, memory_rows=hot)
    each = []
    with ssd() as path:
        store, empty = NativeStore(1), NativeStore(1)
        store.create_table(config, spill=str(path / "rows"))
        empty.create_table(TableConfig("table", DIM, capacity=config.capacity, shards=config.resolved_shards))
        fixed = empty.memory_bytes(0) + hot * (config.row_bytes - ROW_OVERHEAD + 16)
        out = np.empty((hot, DIM), np.float32)
        for start in range(0, rows, hot):
            part = ids_of(np.arange(start, min(start + hot, rows)))
            store.lookup([0], [part], True, [out[: len(part)]])
            cold = store.tier_counts(0)["rows"]
            if cold > rows // 2:
                each.append((store.memory_bytes(0) - fixed - (store.size(0) - cold) * SLOT_BYTES) / cold)
        del store
    details = {"rows": rows, "least": min(each), "shards": config.resolved_shards}
    return runner.Measure("ssd.cold_bytes", max(each), "bytes", at_most=float(COLD_ROW_BYTES), details=details)
