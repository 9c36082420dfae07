"""What `persia plan` predicts, over what runs on this machine measure: bytes, traffic and rates.

    python -m benchmarks 'plan.*' [--preset smoke|laptop|full] [--json FILE]

Each measure is a ratio, prediction over measurement, of one configuration; `plan.bytes` and `plan.rate` are the worst
ones. A prediction of a rate uses constants that were measured a moment before, role by role between fakes of its
neighbours (`persia bench rates`); the run that it is compared with has all roles, as `persia train` starts them. Runs
are divided into chunks, and the fastest chunk counts on both sides: other programs on the machine disturb it least.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import msgspec
import numpy as np

from benchmarks import runner
from benchmarks.checkpoint import size_of
from benchmarks.cluster import ray_here
from benchmarks.plan_disk import SpilledRun, move_rows, spilled, spilled_bytes
from benchmarks.ssd import ssd
from benchmarks.store import ids_of, resident_bytes
from benchmarks.traffic import message_bytes
from persia import IdFeature, Schema
from persia.checkpoint import CheckpointWriter
from persia.checkpoint.row_writing import write_rows
from persia.cli.plan import SHARED_RUN, core_seconds_of, measure_rates, request_of
from persia.cli.run_config import RunConfig
from persia.cluster import Ray
from persia.config import convert
from persia.modes import Hybrid
from persia.plan import (
    PlanRequest,
    Rates,
    Topology,
    bytes_of,
    plan_deployment,
    planned_tables,
    role_loads,
    this_host,
)
from persia.plan.load import batch_traffic
from persia.plan.queue_simulation import BatchCosts, SimulatedCluster, SimulatedHosts, SimulatedMode, simulate_training
from persia.plan.rates import BatchShape, RowRate, StepRate, WireRate, WorkloadRate
from persia.ps import EmbeddingServer, ServerOptions
from persia.schema import Adagrad, Adam, EmbeddingOptimizer, RowwiseAdagrad, Table
from persia.store import NativeStore, TableConfig
from persia.types import BucketMap, Contribution, Packed, PushHeader
from persia.types.half_floats import Dtype
from persia.worker import Worker, WorkerOptions
from persia.worker.feature_pooler import PoolAt

BATCH = 65_536


def near(name: str, predicted: float, measured: float, bound: float, **details: Any) -> runner.Measure:
    """A prediction over its measurement, within `bound` of 1."""
    facts = {"of": "prediction over measurement", "predicted": predicted, "measured": measured, **details}
    return runner.Measure(
        name, predicted / measured, "ratio", at_least=1 - bound, at_most=1 + bound, details=facts
    )  # fmt: skip


# --- bytes ------------------------------------------------------------------------------------------------------------


class Stored(NamedTuple):
    """A table of plan.bytes."""

    dim: int
    dtype: Any
    optimizer: EmbeddingOptimizer
    rows: int
    servers: int
    last_steps: bool = False


STORED = {
    "dim_16": Stored(16, "float32", Adagrad(0.05), 4_000_000, 1),
    "dim_128_bf16": Stored(128, "bfloat16", RowwiseAdagrad(0.05), 2_000_000, 2),
    "dim_8_adam": Stored(8, "float32", Adam(0.001), 4_000_000, 3, True),
}
SPILLED_ROWS = 6_000_000
SHRINK = {"smoke": 10, "laptop": 1, "full": 1}


@runner.measures(
    *(f"plan.bytes.{kind}.{name}" for name in STORED for kind in ("memory", "resident", "checkpoint")),
    *(f"plan.bytes.{kind}.spilled" for kind in ("memory", "resident", "disk")),
    *(f"plan.bytes.traffic.{name}" for name in ("plain", "fp16", "bf16", "pooled")),
    "plan.bytes",
)
def size(preset: str) -> Iterator[runner.Measure]:
    """Bytes of tables in memory, as the store counts them and as the system does; of checkpoints; of messages."""
    measures = []
    for name, case in STORED.items():
        for measure in stored(name, case, case.rows // SHRINK[preset]):
            measures.append(measure)
            yield measure
        gc.collect()
    for measure in [*on_disk(SPILLED_ROWS // SHRINK[preset]), *messages()]:
        measures.append(measure)
        yield measure
    yield runner.worst("plan.bytes", measures)


def stored(name: str, case: Stored, rows: int) -> Iterator[runner.Measure]:
    table = Table("item", case.dim, dtype=case.dtype)
    schema = Schema([IdFeature("item", dim=case.dim, dtype=case.dtype)])
    (planned,) = planned_tables(schema, case.optimizer, {"item": rows}, case.last_steps)
    expected = bytes_of(planned, case.servers)
    ids = ids_of(np.arange(rows))
    owners = np.random.default_rng(0).integers(0, case.servers, rows)  # At random, as hashes are.
    parts = [ids[owners == owner] for owner in range(case.servers)]
    del owners
    out = np.ones((BATCH, planned.config.row_words), np.float32)
    before = resident_bytes()
    stores = []
    for part_ids in parts:
        store = NativeStore(1)
        store.create_table(TableConfig(
            "item", case.dim, optimizer=planned.config.optimizer, dtype=table.dtype,
            optimizer_params=planned.config.optimizer_params,
        ))  # fmt: skip
        if case.last_steps:
            store.keep_last_steps(0)
        for start in range(0, len(part_ids), BATCH):
            part = part_ids[start : start + BATCH]
            store.lookup([0], [part], True, [out[: len(part)]])
        stores.append(store)
    resident = resident_bytes() - before
    counted = sum(store.memory_bytes(0) for store in stores)
    facts = {"rows": rows, "servers": case.servers, "bytes per row": counted / rows}
    yield near(f"plan.bytes.memory.{name}", expected.memory, counted, 0.15, **facts)
    yield near(f"plan.bytes.resident.{name}", expected.memory, resident, 0.15, **facts)
    del stores
    server = EmbeddingServer({"item": table}, case.optimizer, Hybrid(4), 0, 1)
    share = ids[: rows // 4]
    for start in range(0, len(share), BATCH):
        part = share[start : start + BATCH]
        server.lookup(Packed(["item"], [len(part)], part), True)
    folder = Path(tempfile.mkdtemp(prefix="persia-plan-"))
    try:
        server.begin_snapshot("s", {}, str(folder))
        with CheckpointWriter(folder, 1) as writer:
            write_rows(writer, [server], "s")
            writer.commit(schema=schema, optimizer=case.optimizer)
        written = size_of(folder)
    finally:
        shutil.rmtree(folder)
    expected = bytes_of(planned._replace(rows=len(share)), 1)
    yield near(f"plan.bytes.checkpoint.{name}", expected.checkpoint, written, 0.15, rows=len(share))


def on_disk(rows: int) -> Iterator[runner.Measure]:
    """Bytes of a table with three quarters of its rows on SSD, there and in memory."""
    expected, taken = spilled_bytes(rows, 2)
    for kind, predicted in (("memory", expected.memory), ("resident", expected.memory), ("disk", expected.disk)):
        yield near(
            f"plan.bytes.{kind}.spilled", predicted, taken[kind], 0.15, rows=rows, in_memory=expected.memory_rows
        )


class Counting:
    """A PS that counts the bytes of its messages."""

    def __init__(self, server: EmbeddingServer) -> None:
        self._server = server
        self.received = self.sent = 0

    def buckets(self) -> BucketMap:
        return self._server.buckets()

    def lookup(self, ids: Packed, train: bool, map_version: int) -> Packed:
        rows = self._server.lookup(ids, train, map_version)
        self.received += message_bytes((ids, train, map_version))
        self.sent += message_bytes(rows)
        return rows

    def push(self, header: PushHeader, gradients: Any, map_version: int) -> Any:
        self.received += message_bytes((header, gradients, map_version))
        return self._server.push(header, gradients, map_version)


def messages() -> Iterator[runner.Measure]:
    """Bytes in and out of each role for batches of 4,096 samples of 8 features, one of them with lists of ids."""
    from persia.batching.id_column import IdColumn
    from persia.nn import transfer

    rng, count, servers = np.random.default_rng(0), 4096, 3
    cases: list[tuple[str, Dtype, bool, PoolAt]] = [
        ("plain", "float32", False, "nn_worker"),
        ("fp16", "float32", True, "nn_worker"),
        ("bf16", "bfloat16", True, "nn_worker"),
        ("pooled", "float32", True, "auto"),
    ]
    for name, dtype, compressed, pool_at in cases:
        features = [IdFeature(f"f{i}", dim=32, dtype=dtype) for i in range(8)]
        schema = Schema(features, ["x"])
        columns = {f"f{i}": IdColumn((50_000 * rng.random(count) ** 2).astype(np.uint64)) for i in range(7)}
        offsets = np.arange(0, 5 * count + 1, 5, dtype=np.int64)
        columns["f7"] = IdColumn((200_000 * rng.random(5 * count)).astype(np.uint64), offsets)
        tables = schema.resolved_tables()
        options = ServerOptions(buckets=BucketMap.even(servers))
        apart = [Counting(EmbeddingServer(tables, Adagrad(0.05), Hybrid(4), 0, 1, options)) for _ in range(servers)]
        worker = Worker(schema, apart, options=WorkerOptions("fp16" if compressed else "none", pool_at))
        number = worker.register(columns)
        ids = worker.distinct_ids(number)
        rows = worker.lookup(number, pool=True)
        named = zip(rows.rows.names, rows.rows.counts, strict=True)
        gradients = {n: np.zeros((c, 32), np.float32) for n, c in named}
        packed, scales = Packed.of(gradients, np.float32), None
        if compressed:
            packed, scales = transfer.encode(packed)
        pushed = (PushHeader(1, 0, 1, 0, count), [Contribution(number, packed, scales)])
        worker.push(*pushed)
        measured = {
            "embedding_ps in": sum(ps.received for ps in apart),
            "embedding_ps out": sum(ps.sent for ps in apart),
            "embedding_worker in": message_bytes(columns) + message_bytes(pushed) + sum(ps.sent for ps in apart),
            "nn_worker in": message_bytes(rows),
            "nn_worker out": message_bytes(pushed),
        }
        shape = BatchShape(
            count,
            {n: float(len(c.values)) for n, c in columns.items()},
            {n: float(c) for n, c in zip(ids.names, ids.counts, strict=True)},
            {"f7": float(offsets.nbytes)},
            0.0,
            0,
        )
        planned = planned_tables(schema, Adagrad(0.05), dict.fromkeys(tables, 1), False)
        rates = Rates(1, [], {"32/float32/adagrad": NO_ROW, "32/bfloat16/adagrad": NO_ROW}, {}, WireRate(0, 0, 1))
        workload = WorkloadRate("", shape, 0, 0, 0, StepRate("cpu", 1, 1))
        counts = {"embedding_ps": servers, "embedding_worker": 1, "data_loader": 1, "nn_worker": 1}
        topology = Topology(counts, True, compressed, pool_at)
        loads = role_loads(planned, rates, workload, topology)
        expected = {
            "embedding_ps in": loads["embedding_ps"].received,
            "embedding_ps out": loads["embedding_ps"].sent,
            "embedding_worker in": loads["embedding_worker"].received,
            "nn_worker in": loads["nn_worker"].received,
            "nn_worker out": loads["nn_worker"].sent,
        }
        each = {what: expected[what] / measured[what] for what in measured}
        farthest = max(each, key=lambda what: abs(each[what] - 1))
        yield near(
            f"plan.bytes.traffic.{name}", expected[farthest], measured[farthest], 0.15, worst=farthest, each=each
        )  # fmt: skip


NO_ROW = RowRate(0.0, 0.0, 1)


# --- rates ------------------------------------------------------------------------------------------------------------


def config(
    cluster: dict[str, Any], mode: dict[str, Any], batch: int, optimizer: str, model: Any, **data: Any
) -> RunConfig:
    """The configuration of a run on generated clicks."""
    options = {"rows": 1 << 30, **data}
    tree = {
        "data": {"kind": "synthetic", "batch_size": batch, "options": options},
        "model": model,
        "optimizer": {"kind": "adam", "options": {"fused": True}},
        "embedding_optimizer": {"kind": optimizer, "lr": 0.05},
        "mode": mode,
        "cluster": cluster,
        "trainer": {"progress": False, "device": "cpu"},
    }
    return convert(tree, RunConfig, "plan.rate")


DEEPFM = {"kind": "deepfm", "options": {"hidden": [256, 128]}}
SMALL = {"kind": "ffnn", "options": {"hidden": [16]}}
HYBRID = {"kind": "hybrid", "staleness": 4, "warmup": 0}
RUNS = {
    # The network decides.
    "network": config({"kind": "embedded"}, HYBRID, 4096, "adagrad", DEEPFM, id_features=12, ids_per_feature=100_000),
    # The way of a batch through the roles: in Sync nothing overlaps.
    "sync_ray": config(
        {"kind": "ray"}, {"kind": "sync"}, 2048, "adagrad", SMALL, id_features=26, ids_per_feature=100_000, zipf=0.0
    ),
    # Wide rows and little to compute, on two PSs.
    "rows_ray": config(
        {"kind": "ray", "ps": 2},
        HYBRID,
        4096,
        "rowwise_adagrad",
        SMALL,
        id_features=26,
        ids_per_feature=20_000,
        dim=64,
        zipf=0.0,
    ),
    # Uniform ids, four of five rows on SSD: reads of the disk.
    "disk": config(
        {"kind": "embedded"}, HYBRID, 4096, "adagrad", SMALL, id_features=4, ids_per_feature=500_000, dim=16, zipf=0.0
    ),
}
ON_DISK = {"disk": 5}
"""Runs with rows on SSD: the number of rows for each row in memory."""
SMOKE_BATCH = 512
SMOKE: dict[str, dict[str, Any]] = {
    "persia.cli.plan": {
        "SHARED_STEPS": 1, "SHARED_ROUNDS": 1,
        "SHARED_RUN": SHARED_RUN | {"data": SHARED_RUN["data"] | {"batch_size": SMOKE_BATCH}},
    },
    "persia.plan.measure": {
        "ROUNDS": 1, "SECONDS": 0.05, "TABLE_ROWS": 40_000, "CHECKPOINT_ROWS": 100_000, "COLD_ROWS": 40_000,
        "DISK_BYTES": 16 << 20,
    },
    "persia.plan.workload": {"BATCHES": 2, "WARM_STEPS": 1, "STEPS": 2, "ROUNDS": 1},
    "benchmarks.capacity": {"SIZES": (6.25e11, 1e13), "SERVERS": 3, "WORKERS": 10, "GPUS": 8},
}  # fmt: skip
"""What `persia bench rates` measures less of in a smoke run, and a smaller cluster to simulate."""
ONCE = ("persia.cli.plan.measure_sharing", "persia.plan.measure.measure_checkpoint", "persia.plan.measure.measure_wire")
"""What it measures once there, as it is the same for all configurations."""


@functools.cache
def once(name: str) -> Callable[..., Any]:
    """Returns a function that calls another one once."""
    module, _, function = name.rpartition(".")
    return functools.cache(getattr(importlib.import_module(module), function))


@contextlib.contextmanager
def short_measurements(preset: str) -> Iterator[None]:
    """Measures less of what a plan needs meanwhile, in a smoke run."""
    with contextlib.ExitStack() as used:
        for module, constants in SMOKE.items() if preset == "smoke" else ():
            used.enter_context(mock.patch.multiple(module, **constants))
        for name in ONCE if preset == "smoke" else ():
            used.enter_context(mock.patch(name, once(name)))
        yield


LEFT_OUT = {"smoke": ("sync_ray",), "laptop": (), "full": ()}
"""A smoke run needs one cluster only: it takes seconds to start another one."""
CHUNKS = {"smoke": (2, 3), "laptop": (8, 40), "full": (20, 60)}
"""Chunks of a run, and steps of each."""


@runner.measures(
    *(f"plan.{what}.{name}" for what in ("rate", "cores") for name in RUNS),
    *(f"plan.simulated.{name}" for name in RUNS if name.endswith("_ray")),
    "plan.rate",
    "plan.cores",
    "plan.simulated",
)
def rate(preset: str, selected: set[str]) -> Iterator[runner.Measure]:
    """Samples/s of four configurations: by the plan, by simulation, and in samples per core second.

    The last ones hardly depend on what else the machine does. Only the selected configurations run.
    """
    measured: dict[str, list[runner.Measure]] = {"rate": [], "cores": [], "simulated": []}
    all_of_them = {f"plan.{what}" for what in measured} & selected
    for name, run in RUNS.items():
        if name in LEFT_OUT[preset]:
            continue
        if not all_of_them and not {f"plan.{what}.{name}" for what in measured} & selected:
            continue
        with ssd() as path, contextlib.ExitStack() as used:
            if preset == "smoke":
                used.enter_context(ray_here(preset))
                if run.cluster.kind == "embedded":  # On Ray, processor seconds are counted less finely.
                    data = msgspec.structs.replace(run.data, batch_size=SMOKE_BATCH)
                    run = msgspec.structs.replace(run, data=data)
            used.enter_context(short_measurements(preset))
            if name in ON_DISK:
                run = spilled(run, path, SHRINK[preset], ON_DISK[name])
            for measure in compared(name, run, *CHUNKS[preset]):
                measured[measure.name.split(".")[1]].append(measure)
                yield measure
            gc.collect()
    for what, measures in measured.items():
        if f"plan.{what}" in selected:
            yield runner.worst(f"plan.{what}", measures)


def compared(name: str, run: RunConfig, chunks: int, steps: int) -> Iterator[runner.Measure]:
    reader = run.reader()
    rows = dict.fromkeys(reader.schema.resolved_tables(), run.data.options["ids_per_feature"])
    disk = run.spill if isinstance(run, SpilledRun) else None
    rates = measure_rates(run, name, "python -m benchmarks plan.rate", disk)
    request = request_of(run, rates, rows)
    if disk is not None:
        request = request._replace(hosts=[msgspec.structs.replace(this_host(), disk=shutil.disk_usage(disk).free)])
    plan = plan_deployment(request)
    trainer = run.build_trainer(reader.schema)

    def fit(count: int) -> tuple[float, float]:
        """Samples/s, and core seconds of all processes."""
        before = core_seconds(trainer)
        rate = trainer.fit(reader, max_steps=count).rows_per_second
        return rate, core_seconds(trainer) - before

    try:
        if disk is not None:
            fit(1)
            move_rows(trainer, run.data.options["ids_per_feature"])
        fit(2 * steps)  # Processes start, and rows come.
        measured = [fit(steps) for _ in range(chunks)]
        longer = fit(4 * steps)[1]
    finally:
        close = getattr(trainer.cluster, "close", None)
        if close is not None:
            close()
    samples = request.workload.batch.samples
    limits = {limit.resource: limit.samples_per_second for limit in plan.limits[:3]}
    speeds = sorted(speed for speed, _ in measured)
    facts = {"median": speeds[len(speeds) // 2], "lowest": speeds[0], "sharing": rates.sharing}
    yield near(
        f"plan.rate.{name}", plan.samples_per_second, speeds[-1], 0.3, bottleneck=plan.bottleneck.resource,
        limits=limits, **facts,
    )  # fmt: skip
    # What a call of `fit` costs by itself is in both.
    used = (longer - min(cores for _, cores in measured)) / (3 * steps)
    each = {role.role: role.load.core_seconds for role in plan.roles}
    yield near(
        f"plan.cores.{name}", samples / sum(each.values()), samples / used, 0.3, **{"core seconds by role": each}
    )  # fmt: skip
    if request.topology.apart:
        simulated = simulate_training(costs_of(request), here(request), SimulatedMode(request.depth or 0), 60)
        yield near(
            f"plan.simulated.{name}", simulated.samples_per_second, speeds[-1], 0.3,
            bottleneck=simulated.bottleneck, **facts,
        )  # fmt: skip


def core_seconds(trainer: Any) -> float:
    """Processor seconds of all processes of a run so far."""
    return core_seconds_of(trainer.cluster) if isinstance(trainer.cluster, Ray) else time.process_time()


def costs_of(request: PlanRequest) -> BatchCosts:
    """The costs of a batch, for the simulation."""
    workload, wire, shared = request.workload, request.rates.wire, request.rates.shared
    assert wire is not None
    unique = workload.batch.unique
    rates = [(unique[table.config.name], request.rates.row(table.config)) for table in request.tables]
    return BatchCosts(
        samples=workload.batch.samples,
        traffic=batch_traffic(request.tables, workload.batch, request.topology),
        reader=workload.reader * shared,
        worker=workload.worker * shared,
        request=workload.server * shared,
        lookup=sum(rows * rate.lookup for rows, rate in rates) * shared,
        update=sum(rows * rate.update for rows, rate in rates) * shared,
        step=workload.step.seconds * shared,
        call=wire.call * shared,
        byte=wire.byte * shared,
    )


def here(request: PlanRequest) -> SimulatedCluster:
    """This machine, as a cluster of the simulation."""
    place = dict.fromkeys(request.topology.counts, "here")
    hosts = {"here": SimulatedHosts(1, request.hosts[0].cores)}
    return SimulatedCluster(hosts, place, dict(request.topology.counts), gpus=False)
