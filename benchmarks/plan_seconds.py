"""The times of checkpoints and restarts that `persia plan` predicts, over the measured times of a run on this machine.

    python -m benchmarks 'plan.seconds*' [--preset smoke|laptop|full] [--json FILE]

A trainer saves and loads rows of dim 16 with Adagrad, of which the plan's rates were measured with a tenth. A PS with
as many is killed; its successor is a new process, which imports Python's modules and attaches to its regions.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator

import numpy as np

from benchmarks import runner
from benchmarks.plan import HYBRID, SMALL, config, near, short_measurements
from benchmarks.plan_disk import BATCH
from benchmarks.recovery import DEADLINE, Server, fill, free_address, ids_of, regions
from persia import IdColumn, rpc
from persia.cli.plan import measure_rates, request_of
from persia.plan import plan_deployment
from persia.services import EmbeddingPS

ROWS = {"smoke": 50_000, "laptop": 10_000_000, "full": 10_000_000}
ROUNDS = {"smoke": 1, "laptop": 3, "full": 3}
NAMES = ("checkpoint", "restore", "restart")


@runner.measures(*(f"plan.seconds.{name}" for name in NAMES), "plan.seconds")
def seconds(preset: str) -> Iterator[runner.Measure]:
    """Seconds to write a checkpoint, to load it, and until a restarted PS answers."""
    rows = ROWS[preset]
    run = config(
        {"kind": "embedded"}, HYBRID, 4096, "adagrad", SMALL, id_features=1, ids_per_feature=rows, dim=16, zipf=0.0
    )
    with short_measurements(preset):
        rates = measure_rates(run, "plan.seconds", "python -m benchmarks plan.seconds")
    plan = plan_deployment(request_of(run, rates, {"id_0": rows}))
    rounds = ROUNDS[preset]
    taken = {**saved_and_loaded(run, rows, rounds), "restart": restarted(rows, rounds)}
    expected = (plan.checkpoint_seconds, plan.restore_seconds, plan.restart_seconds)
    measures = []
    for name, predicted in zip(NAMES, expected, strict=True):
        measure = near(
            f"plan.seconds.{name}", predicted, statistics.median(taken[name]), 0.3, rows=rows, all=taken[name]
        )
        measures.append(measure)
        yield measure
    yield runner.worst("plan.seconds", measures)


def saved_and_loaded(run: object, rows: int, rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of `Trainer.save` and `Trainer.load`."""
    reader = run.reader()  # type: ignore[attr-defined]
    taken: dict[str, list[float]] = {"checkpoint": [], "restore": []}
    trainer = run.build_trainer(reader.schema)  # type: ignore[attr-defined]
    trainer.fit(reader, max_steps=2)
    worker = trainer.embeddings.connection.worker
    for start in range(0, rows, BATCH):
        number = worker.register({"id_0": IdColumn(np.arange(start, min(start + BATCH, rows), dtype=np.uint64))})
        worker.lookup(number)
        worker.release(number)
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(prefix="persia-plan-") as folder:
            began = time.perf_counter()
            trainer.save(folder)
            taken["checkpoint"].append(time.perf_counter() - began)
            other = run.build_trainer(reader.schema)  # type: ignore[attr-defined]
            began = time.perf_counter()
            other.load(folder)
            taken["restore"].append(time.perf_counter() - began)
            del other
    return taken


def restarted(rows: int, rounds: int) -> list[float]:
    """Returns the seconds from the start of a PS process to its first answer, with its rows in /dev/shm."""
    address, taken = free_address(), []
    probe = {"table": ids_of(np.arange(0, rows, rows // 1000))}
    with regions() as shared, contextlib.ExitStack() as stack:
        directory = shared / "persia-bench" / "ps-0"
        server = Server(address, directory)
        stack.callback(lambda: server.end())
        server.begin()
        server.rebuilt()
        stub = rpc.connect(address, EmbeddingPS, peer="embedding PS 0", timeout=DEADLINE)
        stack.callback(rpc.close, stub)
        fill(stub, rows)
        for _ in range(rounds):
            server.kill()
            server.end()
            began = time.perf_counter()
            server = Server(address, directory)
            server.begin()
            stub.lookup(probe, False)
            taken.append(time.perf_counter() - began)
            server.rebuilt()
    return taken
