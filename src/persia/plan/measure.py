"""Measures the rates of this machine that do not depend on data or network: rows, calls, checkpoints, disks.

Costs are processor time wherever a processor does the work, so other programs on the machine change them little.
"""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Protocol

import numpy as np

from persia import rpc
from persia.checkpoint import CheckpointReader, CheckpointWriter
from persia.errors import ConfigError, DeadlineError
from persia.modes import Hybrid
from persia.plan.rates import CheckpointRate, DiskRate, RowRate, WireRate
from persia.ps import EmbeddingServer
from persia.schema import Adagrad, IdFeature, Schema
from persia.services import RowChunk
from persia.store import NativeStore, TableConfig
from persia.store.disk import random_reads
from persia.types import Floats, Packed

__all__ = ["measure_checkpoint", "measure_disk", "measure_rows", "measure_wire"]

TABLE_BYTES = 1 << 28
"""Maximum memory of a table: far more than the caches of a core, far less than the memory of a machine."""
TABLE_ROWS = 2_000_000
REQUEST_IDS = 16_384
THREADS = 8
"""Maximum threads of a PS that writes or loads a checkpoint: the default number."""
ROUNDS = 5
SECONDS = 0.4
"""Minimum duration of a measurement."""
DEADLINE = 60.0
CALL_BYTES = 4 << 20
CHECKPOINT_ROWS = 1_000_000
COLD_ROWS = 400_000
MOVED_IDS = 1024
"""Ids of a request for rows on disk: so few that each has its own page, as in the large files of training."""
DISK_BYTES = 512 << 20
READ_BYTES = 4096
WRITE_BYTES = 64 << 10


def core_seconds(work: Callable[[], int]) -> float:
    """Returns the processor seconds of this process for a unit of work, as the median over rounds.

    Args:
        work: does some units and returns their number.
    """
    costs = []
    for _ in range(ROUNDS):
        start, units, spent = time.process_time(), 0, 0.0
        while spent < SECONDS / ROUNDS:
            units += work()
            spent = time.process_time() - start
        costs.append(spent / units)
    return sorted(costs)[ROUNDS // 2]


def measure_rows(table: TableConfig) -> RowRate:
    """Measures lookups and updates of a table's rows on one core. Takes up to 300 MB of memory and a few seconds."""
    count = max(2 * REQUEST_IDS, min(TABLE_ROWS, TABLE_BYTES // table.row_bytes))
    store = NativeStore(1)
    store.create_table(TableConfig(
        "rates", table.dim, optimizer=table.optimizer, optimizer_params=table.optimizer_params, dtype=table.dtype
    ))  # fmt: skip
    rng = np.random.default_rng(0)
    ids = rng.permutation(count).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    requests = [ids[start : start + REQUEST_IDS] for start in range(0, count - REQUEST_IDS + 1, REQUEST_IDS)]
    out = np.empty((REQUEST_IDS, store.config(0).row_words), np.float32)
    gradients = rng.normal(size=(REQUEST_IDS, table.dim)).astype(np.float32)
    for request in requests:
        store.lookup([0], [request], True, [out])
    at = 0

    def following() -> np.ndarray:
        nonlocal at
        at += 1
        return requests[at % len(requests)]

    def look_up() -> int:
        store.lookup([0], [following()], True, [out])
        return REQUEST_IDS

    def update() -> int:
        store.update([0], [following()], [gradients], [0.05], at)
        return REQUEST_IDS

    return RowRate(core_seconds(look_up), core_seconds(update), len(requests) * REQUEST_IDS)


class _Sink(Protocol):
    def echo(self, array: Floats, answer: int) -> Floats: ...

    def spent(self) -> float: ...


class _SinkService:
    def __init__(self) -> None:
        self._answers = {0: np.zeros(0, np.float32), CALL_BYTES: np.zeros(CALL_BYTES // 4, np.float32)}

    def echo(self, array: Floats, answer: int) -> Floats:
        return self._answers[answer]

    def spent(self) -> float:
        return time.process_time()


def _serve_sink(pipe: Pipe) -> None:
    with rpc.serve(_SinkService(), protocol=_Sink) as server:
        pipe.send(server.address)
        pipe.recv()


def measure_wire() -> WireRate:
    """Measures calls between this process and another one, over loopback.

    Raises:
        DeadlineError: the other process did not start in time.
    """
    methods = multiprocessing.get_context("spawn")
    pipe, remote_pipe = methods.Pipe()
    process = methods.Process(target=_serve_sink, args=(remote_pipe,), daemon=True)
    process.start()
    try:
        if not pipe.poll(DEADLINE):
            raise DeadlineError(f"The process that measures calls did not start within {DEADLINE:g} s.")
        stub = rpc.connect(pipe.recv(), _Sink, peer="the measuring process", timeout=DEADLINE)
        try:
            empty, full = np.zeros(0, np.float32), np.zeros(CALL_BYTES // 4, np.float32)
            call, _ = _cost(stub, lambda: stub.echo(empty, 0))
            full_call, seconds = _cost(stub, lambda: stub.echo(full, CALL_BYTES))
        finally:
            rpc.close(stub)
        pipe.send(None)
    finally:
        process.join(DEADLINE)
        process.kill()
    moved = 2 * CALL_BYTES
    return WireRate(call, max(0.0, full_call - call) / moved, moved / seconds)


def _cost(stub: _Sink, call: Callable[[], object]) -> tuple[float, float]:
    """Returns the processor seconds of both processes and the seconds of a call, as medians over rounds."""
    costs, times = [], []
    for _ in range(ROUNDS):
        calls = 0
        core, start = time.process_time() + stub.spent(), time.perf_counter()
        while time.perf_counter() - start < SECONDS:
            call()
            calls += 1
        times.append((time.perf_counter() - start) / calls)
        costs.append((time.process_time() + stub.spent() - core) / calls)
    return sorted(costs)[ROUNDS // 2], sorted(times)[ROUNDS // 2]


@contextlib.contextmanager
def _scratch(directory: str | None) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="persia-rates-", dir=directory))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


_RESTART = """
import sys
from persia import rpc
from persia.modes import Hybrid
from persia.ps import EmbeddingServer
from persia.schema import Adagrad, IdFeature, Schema
tables = Schema([IdFeature("item", dim=16)]).resolved_tables()
server = rpc.serve(EmbeddingServer(tables, Adagrad(0.05), Hybrid(4), 0, 1), "tcp://127.0.0.1:*")
print(server.address, flush=True)
server.close()
"""


def measure_checkpoint(directory: str | None = None) -> CheckpointRate:
    """Measures writing and reading the rows of a PS, and the start of a PS process with and without rows.

    Args:
        directory: directory for checkpoints; None for the directory of temporary files. Needs 200 MB.
    """
    schema, threads = Schema([IdFeature("item", dim=16)]), min(THREADS, len(os.sched_getaffinity(0)))
    server = EmbeddingServer(schema.resolved_tables(), Adagrad(0.05), Hybrid(4), 0, threads)
    for start in range(0, CHECKPOINT_ROWS, 100_000):
        ids = np.arange(start, start + 100_000, dtype=np.uint64)
        server.lookup(Packed(["item"], [len(ids)], ids), True)
    written, read = [], []
    with _scratch(directory) as path:
        for step in range(1, 4):
            began = time.perf_counter()
            name = f"snapshot-{step}"
            server.begin_snapshot(name, {}, str(path))
            with CheckpointWriter(path, step, keep_last=1) as writer:
                for chunk in server.snapshot_rows(name):
                    writer.add_rows(chunk.table, chunk.shard, chunk.arrays)
                writer.commit(schema=schema, optimizer=Adagrad(0.05))
            server.end_snapshot(name)
            written.append(time.perf_counter() - began)
        size = sum(file.stat().st_size for file in path.rglob("rows/**/*") if file.is_file())
        for _ in range(3):
            other = EmbeddingServer(schema.resolved_tables(), Adagrad(0.05), Hybrid(4), 0, threads)
            began = time.perf_counter()
            for chunk in _chunks(path):
                other.import_rows(chunk)
            read.append(time.perf_counter() - began)
    del server, other
    restarts = []
    for _ in range(3):
        began = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", _RESTART], capture_output=True, timeout=DEADLINE, check=True)
        assert done.stdout.startswith(b"tcp://")
        restarts.append(time.perf_counter() - began)
    write, load, restart = (sorted(seconds)[1] for seconds in (written, read, restarts))
    return CheckpointRate(size / write, size / load, restart, _attaching(directory))


def _attaching(directory: str | None) -> float:
    """Returns the seconds per row that a store takes to attach to the regions of a previous store."""
    config, seconds = TableConfig("item", 16), []
    with _scratch(directory) as path:
        store = NativeStore(1)
        store.create_table(config, files=str(path / "rows"))
        out = np.empty((100_000, 16), np.float32)
        for start in range(0, CHECKPOINT_ROWS, len(out)):
            store.lookup([0], [np.arange(start, start + len(out), dtype=np.uint64)], True, [out])
        for _ in range(3):
            del store
            store = NativeStore(1)
            began = time.perf_counter()
            store.create_table(config, files=str(path / "rows"), attach=True)
            seconds.append(time.perf_counter() - began)
        assert store.size(0) == CHECKPOINT_ROWS
        del store
    return min(seconds) / CHECKPOINT_ROWS


def _chunks(path: Path) -> Iterator[RowChunk]:
    for shard, arrays in CheckpointReader(path).rows("item"):
        yield RowChunk("item", shard, arrays)


def measure_disk(directory: str) -> DiskRate:
    """Measures random reads and writes of an SSD, bypassing the cache of the operating system. Writes 512 MiB.

    Uses the same code as reads of rows on disk, with as many reads in flight and io_uring if the kernel has it.

    Args:
        directory: directory on the SSD.

    Raises:
        ConfigError: the file system has no direct I/O (a tmpfs, for example).
    """
    Path(directory).mkdir(parents=True, exist_ok=True)
    with _scratch(directory) as path:
        file = path / "blocks"
        block = mmap.mmap(-1, WRITE_BYTES)
        block.write(random.Random(0).randbytes(WRITE_BYTES))
        try:
            out = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
        except OSError as error:
            raise ConfigError(
                f"The file system of {directory} has no direct I/O ({error.strerror}), so its SSD cannot be measured; "
                "name a directory on the disk itself.",
                field="disk",
            ) from error
        try:
            began = time.perf_counter()
            for _ in range(DISK_BYTES // WRITE_BYTES):
                os.write(out, block)
            os.fsync(out)
            written = time.perf_counter() - began
        finally:
            os.close(out)
        reads, seconds = 0, 0.0
        while seconds < 5 * SECONDS:
            blocks = DISK_BYTES // READ_BYTES
            seconds += random_reads(str(file), blocks, REQUEST_IDS, block_bytes=READ_BYTES, seed=reads)
            reads += REQUEST_IDS
        moved = _moved_row(path)
    return DiskRate(directory, reads / seconds, DISK_BYTES / written, moved)


def _moved_row(path: Path) -> float:
    """Returns the core seconds to move a row of dim 16 back to memory, and to move another one out for it."""
    store, hot = NativeStore(1), COLD_ROWS // 10
    store.create_table(TableConfig("rates", 16, capacity=COLD_ROWS, memory_rows=hot), spill=str(path / "rows"))
    out = np.empty((REQUEST_IDS, 16), np.float32)
    ids = np.arange(COLD_ROWS, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    rng, spent, before = np.random.default_rng(0), 0.0, 0
    # The third pass is measured: by then there are records to compact. It has a new order, as rows were moved out in
    # the order of the second pass, and would come back from adjacent pages.
    for order, count in ((ids, REQUEST_IDS), (rng.permutation(ids), REQUEST_IDS), (rng.permutation(ids), MOVED_IDS)):
        before, began = store.tier_counts(0)["promoted"], time.process_time()
        for start in range(0, COLD_ROWS, count):
            request = order[start : start + count]
            store.lookup([0], [request], True, [out[: len(request)]])
        spent = time.process_time() - began
    return spent / (store.tier_counts(0)["promoted"] - before)
