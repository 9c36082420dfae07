"""Checkpoints: speed of writing and reading against `dd`, and what training notices of it.

    python -m benchmarks 'checkpoint.*' [--preset smoke|laptop|full] [--json FILE]

Rows have 16 floats and as many of Adagrad's state, as in the paper's model. Files go to PERSIA_BENCH_DIR, or the
directory for temporary files; each figure says how many bytes that is. The cache of files is dropped before reading.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import os
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

import persia
from benchmarks import runner
from persia import batching
from persia.checkpoint import CheckpointReader, CheckpointWriter, ReshardOptions, reshard
from persia.checkpoint.row_writing import write_rows
from persia.modes import Hybrid
from persia.optim import Adagrad
from persia.ps import EmbeddingServer
from persia.schema import IdFeature, Schema
from persia.store import NativeStore, Spill, TableConfig
from persia.types import BucketMap, Gradients, PushHeader

ROWS = {"smoke": 50_000, "laptop": 10_000_000, "full": 10_000_000}
ROUNDS = {"smoke": 1, "laptop": 5, "full": 9}
DIM = 16
SCHEMA = Schema([IdFeature("item", dim=DIM)], [], ["click"])


def directory() -> str:
    return tempfile.mkdtemp(prefix="persia-bench-", dir=os.environ.get("PERSIA_BENCH_DIR"))


@contextmanager
def folder() -> Iterator[Path]:
    path = Path(directory())
    try:
        yield path
    finally:
        shutil.rmtree(path)


def server(rows: int) -> EmbeddingServer:
    """A PS with `rows` trained rows."""
    ps = EmbeddingServer(SCHEMA.resolved_tables(), Adagrad(0.1), Hybrid(4), seed=1, threads=os.cpu_count() or 1)
    for begin in range(0, rows, 100_000):
        touch(ps, np.arange(begin, min(rows, begin + 100_000), dtype=np.uint64), begin // 100_000 + 1)
    return ps


def touch(ps: EmbeddingServer, ids: np.ndarray, sequence: int) -> None:
    ps.lookup({"item": ids}, train=True)
    header = PushHeader(1, 0, sequence, sequence, len(ids))
    ps.push(header, {"item": Gradients(ids, np.full((len(ids), DIM), 0.1, np.float32))})


def write(ps: EmbeddingServer, path: Path, step: int, since: dict[str, int], base=None) -> tuple[float, dict[str, int]]:
    """Seconds that a checkpoint of the PS takes, and what the next one may add to."""
    begin = time.perf_counter()
    info = ps.begin_snapshot(f"snapshot-{step}", since, str(path))
    assert info.whole == (base is None)
    with CheckpointWriter(path, step) as writer:
        write_rows(writer, [ps], f"snapshot-{step}")
        writer.commit(schema=SCHEMA, optimizer=Adagrad(0.1), base=base)
    ps.end_snapshot(f"snapshot-{step}")
    return time.perf_counter() - begin, info.numbers


def dd_write(path: Path, size: int) -> float:
    """Seconds; the data are random, as a disk may be quick about zeros."""
    block = np.random.default_rng(0).bytes(1 << 20)
    with subprocess.Popen(
        ["dd", f"of={path}", "bs=1M", "conv=fsync", "iflag=fullblock", "status=none"], stdin=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        begin = time.perf_counter()
        for _ in range(max(1, size >> 20)):
            process.stdin.write(block)
        process.stdin.close()
        process.wait()
        return time.perf_counter() - begin


def drop_cache(path: Path) -> None:
    for file in [path] if path.is_file() else path.rglob("*"):
        if file.is_file():
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
                os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def timed(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def read_rows(path: Path) -> int:
    return sum(len(arrays["ids"]) for _, arrays in CheckpointReader(path).rows("item"))


def dd_read(path: Path) -> object:
    return subprocess.run(["dd", f"if={path}", "of=/dev/null", "bs=1M", "status=none"], check=True)


@runner.measures("checkpoint.write", "checkpoint.read")
def write_and_read(preset: str) -> Iterator[runner.Measure]:
    """Bytes per second of a full checkpoint, writing and reading, divided by the rate of dd."""
    rows = ROWS[preset]
    ps = server(rows)
    written = []
    details: dict[str, Any] = {}
    for number in range(ROUNDS[preset]):
        with folder() as path:
            run, plain = path / "run", path / "dd"
            ours, _ = write(ps, run, 1, {})
            size = size_of(run)
            theirs = dd_write(plain, size)
            written.append(theirs / ours)
            rates = {"bytes_per_s": size / ours, "dd_bytes_per_s": size / theirs}
            details = {"of": "bytes/s, dd with fsync", "rows": rows, "bytes": size, **rates}
            if number + 1 == ROUNDS[preset]:
                read = reading(run, plain, size)
    yield runner.quantity("checkpoint.write", written, "ratio", at_least=0.7, details=details)
    yield read


def reading(run: Path, plain: Path, size: int) -> runner.Measure:
    """A checkpoint and a file of as many bytes, which are read again and again, from the disk each time."""
    paths = [run, plain]
    calls = [functools.partial(read_rows, run), functools.partial(dd_read, plain)]
    seconds: list[list[float]] = [[], []]
    for number in range(runner.MIN_ROUNDS + 2):
        for which in [0, 1] if number % 2 else [1, 0]:
            drop_cache(paths[which])
            seconds[which].append(timed(calls[which]))
    rates = [[size / s for s in some] for some in seconds]
    medians = {"bytes_per_s": statistics.median(rates[0]), "dd_bytes_per_s": statistics.median(rates[1])}
    details = {"of": "bytes/s, dd with the cache dropped", **medians}
    ratios = [a / b for a, b in zip(*rates, strict=True)]
    return runner.quantity("checkpoint.read", ratios, "ratio", at_least=0.7, details=details)


class Pace:
    """Gives batches again and again, and notes when: training has finished them then, except the few on their way."""

    def __init__(self, batches: list[persia.Batch]) -> None:
        self._batches = batches
        self._times: list[float] = []
        self.stopped = threading.Event()

    def __iter__(self) -> Iterator[persia.Batch]:
        for batch in itertools.cycle(self._batches):
            if self.stopped.is_set():
                return
            self._times.append(time.perf_counter())
            yield batch

    def rate(self, begin: float, end: float) -> float:
        """Batches per second between two moments."""
        times = self._times
        return (bisect.bisect(times, end) - bisect.bisect(times, begin)) / (end - begin)


@runner.measures("checkpoint.slowdown")
def slowdown(preset: str) -> runner.Measure:
    """How much longer steps of a whole training run take while it writes a checkpoint in the background.

    Checkpoints and pauses alternate; a checkpoint is compared with the pauses on both its sides. One core is left to
    the PS and what it writes: a thread of torch that waits for another one, which a checkpoint has put off its core,
    multiplies every delay.
    """
    rows, every = (20_000, 1.0) if preset == "smoke" else (4_000_000, 15.0)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) - 1))
    data = persia.data.synthetic(
        1024 * 100, id_features=8, ids_per_feature=rows // 8, dense_features=4, batch_size=1024
    )
    torch.manual_seed(0)
    with folder() as path:
        options = persia.TrainerOptions(
            device="cpu",
            progress=False,
            checkpoint_dir=str(path),
            checkpoint_every_seconds=every,
            keep_last=1,
        )
        trainer = persia.Trainer(
            persia.nn.models.FFNN(data.schema, hidden=(256, 128)),
            data.schema,
            optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-3),
            embedding_optimizer=Adagrad(lr=0.05),
            mode=Hybrid(4, warmup=0),
            options=options,
        )
        ps = trainer.embeddings.connection.servers[0]
        for table in ps.tables():
            for begin in range(0, rows // 8, 100_000):
                ps.lookup({table: np.arange(begin, min(rows // 8, begin + 100_000), dtype=np.uint64)}, train=True)
        pace = Pace(list(data))
        with ThreadPoolExecutor(1) as thread:
            watching = thread.submit(checkpoints_of, trainer, ROUNDS[preset], pace)
            trainer.fit(pace)
        spans = watching.result()
    ends = [spans[0][0] - every / 4, *(end for _, end in spans)]
    begins = [*(begin for begin, _ in spans), spans[-1][1] + every / 4]
    rests = [pace.rate(end, begin) for end, begin in zip(ends, begins, strict=True)]
    longer = [
        (before + after) / 2 / pace.rate(*span) - 1
        for before, after, span in zip(rests, rests[1:], spans, strict=False)
    ]
    return runner.quantity(
        "checkpoint.slowdown",
        longer,
        "fraction",
        at_most=0.15,
        details={
            "rows": rows,
            "lowest": min(longer),
            "highest": max(longer),
            "s_per_step": 1 / statistics.median(rests),
            "s_per_checkpoint": statistics.median(end - begin for begin, end in spans),
        },
    )


def checkpoints_of(trainer: persia.Trainer, rounds: int, pace: Pace) -> list[tuple[float, float]]:
    """When each of the next checkpoints of a training run, pauses between them, began and ended; then stops the run."""
    every = trainer.options.checkpoint_every_seconds or 0.0
    spans: list[tuple[float, float]] = []
    try:
        deadline = time.monotonic() + (rounds + 1) * 2 * every + 120
        step = 0.0
        while len(spans) < rounds:
            assert time.monotonic() < deadline, f"{rounds} checkpoints were not written in time"
            time.sleep(0.01)
            figures = trainer.checkpointing.metrics()
            if figures.get("checkpoint_step", step) == step:
                continue
            step = figures["checkpoint_step"]
            end = time.perf_counter() - figures["checkpoint_age_seconds"]
            begin = end - figures["checkpoint_seconds"]
            if spans and begin - spans[-1][1] <= every / 8:
                # Too little of a pause to compare them with, as where something else keeps the machine busy.
                spans.clear()
            spans.append((begin, end))
        time.sleep(every / 4)
    finally:
        pace.stopped.set()
    return spans


@runner.measures("checkpoint.memory_bytes")
def memory(preset: str) -> runner.Measure:
    """Peak of anonymous memory while a checkpoint is written and all rows change, above what it was before.

    What the store needs itself while rows change is there already: all of them have been changed before.
    """
    ps = server(ROWS[preset])
    rng = np.random.default_rng(0)
    sequence = 10_000
    stop = threading.Event()
    peak = 0

    def watch() -> None:
        nonlocal peak
        while not stop.wait(0.002):
            peak = max(peak, anonymous_memory())

    def change() -> None:
        nonlocal sequence
        while not stop.is_set():
            sequence += 1
            touch(ps, rng.integers(0, ROWS[preset], 20_000).astype(np.uint64), sequence)

    touch(ps, rng.integers(0, ROWS[preset], 20_000).astype(np.uint64), sequence)
    with folder() as path:
        write(ps, path, 1, {})  # Imports, thread pools, allocator.
        changing = threading.Thread(target=change)
        watching = threading.Thread(target=watch)
        changing.start()
        before = anonymous_memory()
        watching.start()
        write(ps, path, 2, {})
        stop.set()
        watching.join()
        changing.join()
    return runner.Measure(
        "checkpoint.memory_bytes",
        float(peak - before),
        "bytes",
        at_most=64.0 * 2**20,
        details={"rows": ROWS[preset], "chunk_bytes": 16 * 2**20},
    )


@runner.measures("checkpoint.update_first", "checkpoint.update_again")
def updates(preset: str) -> Iterator[runner.Measure]:
    """Updates with Adagrad while the store is being read, over updates while it is not; anonymous memory, 1 thread.

    At first each row is copied aside before it changes, then it only has to be seen that it was.
    """
    rows, size = ROWS[preset], min(65_536, ROWS[preset] // 8)
    random = np.random.default_rng(0)
    batches = [random.choice(rows, size, replace=False).astype(np.uint64) for _ in range(8)]
    gradients = random.normal(size=(size, DIM)).astype(np.float32)
    store = NativeStore()
    store.create_table(TableConfig("item", DIM))
    for begin in range(0, rows, 100_000):
        store.lookup([0], [np.arange(begin, min(rows, begin + 100_000), dtype=np.uint64)], True)

    def update() -> None:
        for ids in batches:
            store.update([0], [ids], [gradients], [0.05], 1)

    first, again = [], []
    update()
    with folder() as path:
        for _ in range(runner.rounds_of(preset)):
            alone = timed(update)
            store.begin_snapshot(0, 0, Spill(str(path), 1 << 20, 0))
            first.append(alone / timed(update))
            again.append(alone / timed(update))
            store.end_snapshot(0)
    details = {"of": "rows/s", "rows": rows, "updates": size * len(batches)}
    yield runner.quantity("checkpoint.update_first", first, "ratio", details=details)
    yield runner.quantity("checkpoint.update_again", again, "ratio", details=details)


def anonymous_memory() -> int:
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith("RssAnon"):
                return int(line.split()[1]) * 1024
    raise RuntimeError("no RssAnon in /proc/self/status")


@runner.measures("checkpoint.incremental_bytes", "checkpoint.incremental_time")
def incremental(preset: str) -> Iterator[runner.Measure]:
    """A checkpoint of the 1 % of rows that have changed, over a full one."""
    rows = ROWS[preset]
    ps = server(rows)
    rng = np.random.default_rng(0)
    sizes, times = [], []
    with folder() as path:
        whole, epochs = write(ps, path, 1, {})
        full = size_of(path)
        for number in range(2, 2 + ROUNDS[preset]):
            touch(ps, rng.choice(rows, rows // 100, replace=False).astype(np.uint64), 10_000 + number)
            base = CheckpointReader(path).base
            seconds, epochs = write(ps, path, number, epochs, base)
            sizes.append(size_of(path / f"step-{number:012d}") / full)
            times.append(seconds / whole)
    yield runner.quantity("checkpoint.incremental_bytes", sizes, "fraction", at_most=0.03)
    yield runner.quantity("checkpoint.incremental_time", times, "fraction", at_most=0.1, details={"full_s": whole})


@runner.measures("checkpoint.reshard")
def resharding(preset: str) -> runner.Measure:
    """Rows per second from 2 to 3 PSs, from disk to disk, checks and fsync included."""
    rows = ROWS[preset]
    ps = server(rows)
    with folder() as path:
        ps.begin_snapshot("snapshot", {}, str(path))
        with CheckpointWriter(path / "a", 1) as writer:
            for chunk in ps.snapshot_rows("snapshot"):
                owners = batching.owners("item", chunk.arrays["ids"], BucketMap.even(2))
                for owner in range(2):
                    own = {name: array[owners == owner] for name, array in chunk.arrays.items()}
                    writer.add_rows("item", owner * 1024 + chunk.shard, own)
            writer.commit(schema=SCHEMA, optimizer=Adagrad(0.1))
        ps.end_snapshot("snapshot")
        del ps
        rates = []
        for number in range(ROUNDS[preset]):
            target = path / f"b{number}"
            rates.append(rows / timed(functools.partial(reshard, path / "a", target, ReshardOptions(3))))
            shutil.rmtree(target)
        disk = size_of(path) / dd_write(path / "dd", size_of(path))
    return runner.quantity(
        "checkpoint.reshard", rates, "rows/s", at_least=2e6, details={"rows": rows, "dd_bytes_per_s": disk}
    )
