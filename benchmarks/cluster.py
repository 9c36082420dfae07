"""Processes on Ray: against one process, Hybrid against Sync, several NN workers, and what each role costs.

    python -m benchmarks 'cluster.*' [--preset smoke|laptop|full] [--json FILE]

Where the network is emulated, a step waits 40 ms in place of computing, and a lookup takes 30 ms at least: then several
NN workers fit on few cores, and what is measured is who waits for whom.
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch

from benchmarks import runner
from benchmarks.baselines.step_torch import generate
from benchmarks.elsewhere import tests_support
from benchmarks.step import ROUNDS, STEPS, WORK, Persia
from persia import Batch, IdColumn, IdFeature, Schema, rpc
from persia.cluster import Ray, RayOptions
from persia.modes import Hybrid, Mode, Sync
from persia.nn import EmbeddingCollection, collection
from persia.schema import Adagrad
from persia.services import EmbeddingPS

COMPUTE_SECONDS = 0.040
LOOKUP_SECONDS = 0.030
EMULATED_STEPS = {"smoke": 10, "laptop": 50, "full": 300}
EMULATED_ROUNDS = {"smoke": 1, "laptop": 5, "full": 9}
WARM_STEPS = 10
MANY = {"smoke": 2, "laptop": 8, "full": 8}
FEATURES, DIM, ROWS = 4, 8, 128
SCALING_FEATURES = 1
"""Fewer, so that the processors of one machine are enough for as many NN workers as a cluster has machines for."""


@contextmanager
def ray_here(preset: str = "laptop", log_to_driver: bool = True) -> Iterator[None]:
    """One Ray for all clusters of a measure; in a smoke run, for the clusters of all measures.

    Args:
        preset: of the run.
        log_to_driver: whether it shows what its processes print, also that they were killed.
    """
    import ray

    shared = preset == "smoke"  # To start it takes several seconds, and so does each of its processes, but for forks.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if not (shared and ray.is_initialized()):
        if shared:
            runner.RESOURCES.enter_context(tests_support("ray_forks").forking())
        ray.init(address="local", include_dashboard=False, logging_level="error", log_to_driver=log_to_driver)
        if shared:
            runner.RESOURCES.callback(ray.shutdown)
    try:
        yield
    finally:
        if not shared:
            ray.shutdown()


# --- against one process ------------------------------------------------------------------------------------------


@runner.measures("cluster.vs_embedded")
def vs_embedded(preset: str) -> runner.Measure:
    """Samples/s of 1 PS + 1 embedding worker + 1 NN worker, over samples/s of one process; each with all cores."""
    work, steps = WORK[preset], STEPS[preset]
    data = generate(work)
    here = Persia(work, data, Adagrad(lr=0.05))
    threads = torch.get_num_threads()
    with ray_here(preset), Ray(options=RayOptions(threads=threads)) as cluster:

        def there(warm: int) -> float:
            variant = Persia(work, generate(work), Adagrad(lr=0.05), cluster)
            try:
                variant.time(warm)
                return variant.time(steps)
            finally:
                variant.close()

        try:
            for _ in range(2):
                here.time(len(data))
            cluster.run(lambda: there(2 * len(data)))
            return runner.ratio(
                "cluster.vs_embedded",
                ours=lambda: work.batch * steps / cluster.run(lambda: there(5))[0],
                theirs=lambda: work.batch * steps / here.time(steps),
                of="rows/s",
                rounds=ROUNDS[preset],
                at_least=0.6,
            )
        finally:
            here.close()


# --- emulated network ---------------------------------------------------------------------------------------------


@contextmanager
def waiting(ahead: bool) -> Iterator[None]:
    """Lets lookups of `Sync` wait for the step before, unless they are to run ahead; in this process."""
    with nullcontext() if ahead else mock.patch.object(collection, "refreshes", return_value=None):
        yield


class SlowNetwork:
    """An embedding worker whose lookups last 30 ms, and whose refreshes last less, as they have fewer rows."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._rows = 1

    def lookup(self, batch_id: int, train: bool = True, pool: bool = False) -> Any:
        began = time.monotonic()
        return self._late(began, self._worker.lookup(batch_id, train, pool), 1.0)

    def lookup_ahead(self, batch_id: int, pool: bool = False, recent: int = 0) -> Any:
        began = time.monotonic()
        found = self._worker.lookup_ahead(batch_id, pool, recent)
        self._rows = max(1, sum((found.left_out or found.rows).counts))
        return self._late(began, found, 1.0)

    def refresh(self, batch_id: int, seen: Any, left_out: Any = None) -> Any:
        began = time.monotonic()
        fresh = self._worker.refresh(batch_id, seen, left_out)
        return self._late(began, fresh, sum(fresh.rows.counts) / self._rows)

    def _late(self, began: float, result: Any, share: float) -> Any:
        time.sleep(max(0.0, share * LOOKUP_SECONDS - (time.monotonic() - began)))
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)


class Slow:
    """A cluster with such embedding workers."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster

    def connect(self, *arguments: Any) -> Any:
        connection = self._cluster.connect(*arguments)
        return connection._replace(worker=SlowNetwork(connection.worker))


def batches(count: int, rows: int, seed: int, features: int = FEATURES) -> list[Batch]:
    rng = np.random.default_rng(seed)
    return [
        Batch(
            {f"f{i}": IdColumn(rng.integers(0, 10_000, rows, dtype=np.uint64)) for i in range(features)},
            np.zeros((rows, 0), np.float32),
            rng.integers(0, 2, (rows, 1)).astype(np.float32),
        )
        for _ in range(count)
    ]


class Loop(NamedTuple):
    """Seconds of a loop on one NN worker, CPU seconds of its process in it, and seconds with constant embeddings."""

    seconds: float
    cpu: float
    floor: float


def emulated(
    cluster: Any, mode: Mode, steps: int, features: int = FEATURES, floor: bool = False, real_rows: int = 0
) -> Loop:
    """Trains on this NN worker, with embeddings of the cluster; and, if asked for, with constant ones.

    Lookups of `Sync` wait for the step before, as in the Persia paper. With `real_rows`, batches have this many rows,
    and lookups take as long as they do.
    """
    rows = real_rows or ROWS
    reached = cluster if real_rows else Slow(cluster)
    warm = WARM_STEPS
    rank, count = torch.distributed.get_rank(), torch.distributed.get_world_size()
    schema = Schema([IdFeature(f"f{i}", dim=DIM) for i in range(features)])
    embeddings = EmbeddingCollection(schema, optimizer=Adagrad(lr=0.05), mode=mode, cluster=reached)
    net: torch.nn.Module = torch.nn.Linear(features * DIM, 1)
    if count > 1:
        net = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.Adam(net.parameters(), 1e-3, fused=True)

    def step(inputs: list[torch.Tensor], labels: torch.Tensor) -> None:
        time.sleep(COMPUTE_SECONDS)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(net(torch.cat(inputs, 1)), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    began = cpu = 0.0
    with waiting(ahead=not isinstance(mode, Sync)):
        for number, batch in enumerate(embeddings.prefetch(batches(warm + steps, rows, rank, features))):
            if number == warm:
                began, cpu = time.perf_counter(), time.process_time()
            step(list(embeddings(batch).values()), batch.labels)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    if not floor:
        return Loop(seconds, cpu, 0.0)

    leaves = [torch.zeros(rows, DIM, requires_grad=True) for _ in range(features)]
    labels = torch.zeros(rows, 1)
    began = time.perf_counter()
    for _ in range(steps):
        step(leaves, labels)
    return Loop(seconds, cpu, time.perf_counter() - began)


@runner.measures("cluster.hybrid_vs_sync", "cluster.hybrid_floor")
def hybrid(preset: str) -> list[runner.Measure]:
    """Hybrid against Sync, and against the same loop without embeddings."""
    steps, options = EMULATED_STEPS[preset], RayOptions(threads=1)
    against_sync, against_floor = [], []
    with ray_here(preset), Ray(options=options) as synchronous, Ray(options=options) as asynchronous:
        for number in range(EMULATED_ROUNDS[preset]):
            runs = [
                lambda: synchronous.run(lambda: emulated(synchronous, Sync(), steps))[0],
                lambda: asynchronous.run(lambda: emulated(asynchronous, Hybrid(4, warmup=0), steps, floor=True))[0],
            ]
            if number % 2:
                ours, theirs = runs[1](), runs[0]()
            else:
                theirs, ours = runs[0](), runs[1]()
            against_sync.append(theirs.seconds / ours.seconds)
            against_floor.append(ours.floor / ours.seconds)
    details = {"of": "rows/s"}
    return [
        runner.quantity("cluster.hybrid_vs_sync", against_sync, "ratio", at_least=1.6, details=details),
        runner.quantity("cluster.hybrid_floor", against_floor, "ratio", at_least=0.95, details=details),
    ]


@runner.measures("cluster.scaling")
def scaling(preset: str) -> runner.Measure:
    """Samples/s of many NN workers over samples/s of one, and CPU of each role."""
    steps, many = EMULATED_STEPS[preset], MANY[preset]
    options = RayOptions(threads=1)
    ratios: list[float] = []
    step_seconds: list[tuple[float, float]] = []
    cpu: list[float] = []
    free = available_bytes()
    with ray_here(preset), Ray(options=options) as one, Ray(nn_workers=many, options=options) as all_of_them:
        before: dict[str, Any] = {}
        after: dict[str, Any] = {}
        used = 0.0
        for number in range(EMULATED_ROUNDS[preset]):
            if number % 2:
                alone = one.run(lambda: emulated(one, Hybrid(4, warmup=0), steps, SCALING_FEATURES))[0].seconds
            before = all_of_them.statistics() if number else {}
            loops = all_of_them.run(lambda: emulated(all_of_them, Hybrid(4, warmup=0), steps, SCALING_FEATURES))
            after = all_of_them.statistics()
            if not number % 2:
                alone = one.run(lambda: emulated(one, Hybrid(4, warmup=0), steps, SCALING_FEATURES))[0].seconds
            together = max(loop.seconds for loop in loops)
            step_seconds.append((alone / steps, together / steps))
            cpu += [loop.cpu / steps for loop in loops]
            used = max(used, free - available_bytes())
            ratios.append(many * alone / together)
    trained = many * (steps + WARM_STEPS)
    spent = {**cpu_seconds(before, after, trained), "nn_worker": statistics.median(cpu)}
    details: dict[str, Any] = {"of": f"rows/s, {many} NN workers over 1"}
    details |= {f"{name} CPU s/batch": value for name, value in spent.items()}
    details |= {"workload": f"{SCALING_FEATURES} ID-type feature of dim {DIM}, batch {ROWS}", "bytes of memory": used}
    details |= {"s/step of 1 and of all": [round(statistics.median(t), 4) for t in zip(*step_seconds, strict=True)]}
    return runner.quantity("cluster.scaling", ratios, "ratio", at_least=7.0 * many / 8, details=details)


def available_bytes() -> float:
    """Memory that this machine has left."""
    line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
    return int(line.split()[1]) * 1024.0


def cpu_seconds(before: dict[str, Any], after: dict[str, Any], count: int) -> dict[str, float]:
    """CPU seconds per batch of each role, all its processes together."""
    spent: dict[str, float] = {}
    for name, counters in after.items():
        role = name.rpartition("-")[0]
        used = counters["cpu_seconds"] - before.get(name, {}).get("cpu_seconds", 0.0)
        spent[role] = spent.get(role, 0.0) + used / count
    return spent


# --- start of a PS process --------------------------------------------------------------------------------------------

RESTART_ROUNDS = {"smoke": 1, "laptop": 11, "full": 31}
DEADLINE = 30.0

SERVE = """
import sys
from persia import rpc
from persia.modes import Hybrid
from persia.ps import EmbeddingServer
from persia.schema import Adagrad, Table
from persia.services import EmbeddingPS

tables = {name: Table(name, dim=16) for name in ("item", "user")}
server = rpc.serve(EmbeddingServer(tables, Adagrad(0.05), Hybrid(4), 0, 2), sys.argv[1], protocol=EmbeddingPS)
sys.stdin.read()
assert "torch" not in sys.modules
server.close()
"""


def restart_seconds() -> float:
    """From the start of the interpreter to the first answer, the reconnection of a waiting client included."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    stub = rpc.connect(address, EmbeddingPS, peer="embedding PS 0", timeout=DEADLINE)
    source = Path(__file__).resolve().parents[1] / "src"
    paths = os.pathsep.join(filter(None, [str(source), os.environ.get("PYTHONPATH")]))
    began = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-c", SERVE, address], stdin=subprocess.PIPE, env={**os.environ, "PYTHONPATH": paths}
    ) as process:
        try:
            stub.statistics()
            return time.perf_counter() - began
        finally:
            rpc.close(stub)
            process.communicate(timeout=DEADLINE)


@runner.measures("ps.restart_s")
def restart(preset: str) -> runner.Measure:
    """Import and start of a PS process to its first rpc answer, files in the page cache."""
    restart_seconds()
    values = [restart_seconds() for _ in range(RESTART_ROUNDS[preset])]
    return runner.quantity("ps.restart_s", values, "s", at_most=0.5, details={"slowest": max(values)})
