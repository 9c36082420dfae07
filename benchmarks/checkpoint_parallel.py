"""Checkpoints of PSs that each have a link to the storage, against one process that writes and reads for all.

    python -m benchmarks checkpoint.parallel [--preset smoke|laptop|full] [--json FILE]

Four PSs run in processes of their own. The storage is a local directory behind links, one for each process: 1 Gbit/s in
each direction. Against them, the same PSs do not see the storage, so this process writes and reads all rows. Reading
verifies the checkpoint first, as `Trainer.load` does, so each file crosses a link twice.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from benchmarks import elsewhere, links, runner
from benchmarks.checkpoint import DIM, SCHEMA, folder, size_of
from persia import batching, rpc
from persia.checkpoint import CheckpointReader, CheckpointWriter
from persia.checkpoint.row_reading import ServerReading
from persia.checkpoint.row_writing import write_rows
from persia.modes import Hybrid
from persia.optim import Adagrad
from persia.ps import EmbeddingServer, ServerOptions
from persia.services import EmbeddingPS
from persia.types import BucketMap, Gradients, PushHeader, TableToRead

SERVERS = 4
ROWS = {"smoke": 40_000, "laptop": 4_000_000, "full": 20_000_000}
RATE = {"smoke": 20e6, "laptop": 125e6, "full": 125e6}
"""Bytes per second of a link. A smoke run has few rows, which would cross a link of 1 Gbit/s at once."""

TIMEOUT = 120.0
OF_EACH, OF_THIS_PROCESS = "link-of-each", "link-of-this-process"
"""Protocols of the storage: PSs know only the first."""


def serve(pipe: Connection, number: int, rows: int, rate: float) -> None:
    """Serves a PS with its part of the rows until the pipe ends."""
    links.connect(OF_EACH, rate)
    buckets = BucketMap.even(SERVERS)
    options = ServerOptions(buckets=buckets)
    ps = EmbeddingServer(SCHEMA.resolved_tables(), Adagrad(0.1), Hybrid(4), seed=1, threads=1, options=options)
    for sequence, begin in enumerate(range(0, rows, 100_000), 1):
        ids = np.arange(begin, min(rows, begin + 100_000), dtype=np.uint64)
        own = ids[batching.owners("item", ids, buckets) == number]
        ps.lookup({"item": own}, train=True)
        header = PushHeader(1, 0, sequence, sequence, len(own))
        ps.push(header, {"item": Gradients(own, np.full((len(own), DIM), 0.1, np.float32))})
    with rpc.serve(ps, protocol=EmbeddingPS) as served, contextlib.suppress(EOFError):
        pipe.send(served.address)
        pipe.recv()


@contextlib.contextmanager
def processes(rows: int, rate: float) -> Iterator[list[EmbeddingPS]]:
    """PSs in processes of their own, with all rows."""
    started = []
    with contextlib.ExitStack() as stack:
        for number in range(SERVERS):
            ours, theirs = elsewhere.methods().Pipe()
            process = elsewhere.methods().Process(target=serve, args=(theirs, number, rows, rate), daemon=True)
            process.start()
            stack.callback(process.join, TIMEOUT)
            stack.callback(process.kill)
            started.append(ours)
        stubs = []
        for pipe in started:
            assert pipe.poll(TIMEOUT), "a PS is late"
            stubs.append(rpc.connect(pipe.recv(), EmbeddingPS, timeout=TIMEOUT))
            stack.callback(rpc.close, stubs[-1])
        yield stubs


def write(servers: Sequence[EmbeddingPS], url: str, step: int) -> float:
    """Seconds that a full checkpoint takes."""
    begin, name = time.perf_counter(), f"{url}-{step}"
    for server in servers:
        server.begin_snapshot(name, {}, "")
    with CheckpointWriter(url, step, keep_last=1) as writer:
        write_rows(writer, servers, name)
        writer.commit(schema=SCHEMA, optimizer=Adagrad(0.1), buckets=BucketMap.even(SERVERS))
    for server in servers:
        server.end_snapshot(name)
    return time.perf_counter() - begin


def read(servers: Sequence[EmbeddingPS], url: str, rows: int) -> float:
    """Seconds to verify the last checkpoint and to read it into the PSs, which have its rows already."""
    begin = time.perf_counter()
    reading = ServerReading(CheckpointReader(url), servers, range(SERVERS))
    reading.verify()
    nothing = np.empty(0, np.uint64), np.empty(0, np.uint32)
    assert reading.read([TableToRead("item", "item", True, *nothing)]) == {"item": rows}
    return time.perf_counter() - begin


@runner.measures("checkpoint.parallel")
def parallel(preset: str) -> runner.Measure:
    """Seconds of one process that writes and reads for all, over those of each PS for itself: the lower ratio."""
    rows, rate = ROWS[preset], RATE[preset]
    links.connect(OF_EACH, rate)
    links.connect(OF_THIS_PROCESS, rate)
    seconds: dict[tuple[str, str], list[float]] = {}
    with folder() as path, processes(rows, rate) as servers:
        for step in range(1, runner.rounds_of(preset) + 1):
            for protocol in (OF_EACH, OF_THIS_PROCESS) if step % 2 else (OF_THIS_PROCESS, OF_EACH):
                url = f"{protocol}://{path / protocol}"
                seconds.setdefault((protocol, "write"), []).append(write(servers, url, step))
                seconds.setdefault((protocol, "read"), []).append(read(servers, url, rows))
        size = size_of(Path(path / OF_EACH))
    ratios = {what: _ratios(seconds[OF_THIS_PROCESS, what], seconds[OF_EACH, what]) for what in ("write", "read")}
    details = {
        "of": "seconds, one process for all and each PS for itself",
        "rows": rows,
        "bytes": size,
        "servers": SERVERS,
        "link_bytes_per_s": rate,
        **{f"{what}_ratio": statistics.median(each) for what, each in ratios.items()},
        **{f"{what}_bytes_per_s": size / statistics.median(seconds[OF_EACH, what]) for what in ("write", "read")},
    }
    lower = [min(pair) for pair in zip(ratios["write"], ratios["read"], strict=True)]
    return runner.quantity("checkpoint.parallel", lower, "ratio", at_least=3.0, details=details)


def _ratios(one: Sequence[float], other: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(one, other, strict=True)]
