"""Rows on disk of embedding PSs that are killed: whether anything is lost, and how soon they answer again.

    python -m benchmarks ssd.lost ssd.restart_s [--preset smoke|laptop|full] [--json FILE]

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
from benchmarks.recovery import BATCH, DEADLINE, Server, fill, free_address, ids_of, regions
from benchmarks.recovery_load import Load, kills
from persia import rpc
from persia.services import EmbeddingPS


@dataclass(frozen=True)
class Scale:
    """How much of everything a preset does."""

    kills: int
    rows: int
    memory_rows: int
    rounds: int


SCALES = {
    "smoke": Scale(3, 400_000, 100_000, 5),
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
    found = {key: sum(v.recovery[key] > 0 for v in comparisons) for key in ("busy", "undone", "open", "rebuilt")}
    last = comparisons[-1]
    assert last.tier["spilled"] > last.tier["promoted"] > 0
    details = {"kills": len(comparisons), "rows_compared": sum(v.rows for v in comparisons), **found, "tier": last.tier}
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
            found = stub.lookup(probe, False)["table"]
            seconds.append(time.perf_counter() - began)
            successor.rebuilt()
            server.end()
            server = successor
            assert np.array_equal(found, expected)
        counts = stub.statistics()["table"]
    assert counts["rows"] == scale.rows
    details = {
        "rows": counts["rows"], "disk_rows": counts["disk_rows"], "disk_bytes": counts["disk_bytes"],
        "slowest": max(seconds), "filled_rows_per_s": filled, "batch": BATCH,
    }  # fmt: skip
    return runner.quantity("ssd.restart_s", seconds, "s", at_most=5.0, details=details)
