"""The simulation of `persia.plan.queue_simulation` against what `capacity.flat` measured on one machine, size by size.

    python -m benchmarks 'plan.simulated.capacity*' [--preset smoke|laptop|full] [--json FILE]

The measured rates come from docs/assets/capacity/measures.jsonl; nothing is trained. Costs of each role, of calls
and of the disk (PERSIA_SSD, else that of temporary files) are measured a moment before, so this has to run on the
machine of those lines: `same machine` in the details says whether it did. `shape` does not need that: it is the rate at
a size over that at the first one, simulated over measured. Rows that are read from disk are simulated, too: those that
an LRU cache of the rows in memory does not have.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

import persia
from benchmarks import runner
from benchmarks.__main__ import machine
from benchmarks.capacity_measured import EXPONENT, SCALES, SERVERS, Ids, schema_of, widened
from benchmarks.plan import near, short_measurements
from benchmarks.plot_capacity import ASSETS
from benchmarks.ssd import ssd
from persia import Batch, Schema
from persia.modes import Hybrid
from persia.plan import PlannedTable, Topology, planned_tables
from persia.plan.distinct_ids import missing_share
from persia.plan.load import batch_traffic
from persia.plan.measure import measure_disk, measure_rows, measure_wire
from persia.plan.queue_simulation import BatchCosts, SimulatedCluster, SimulatedHosts, SimulatedMode, simulate_training
from persia.plan.rates import BatchShape, DiskRate, RowRate, StepRate, WireRate
from persia.plan.workload import FakeCluster, measure_workload
from persia.ps.sizes import water_level
from persia.schema import RowwiseAdagrad

STEPS = {"smoke": 10, "laptop": 100, "full": 300}
BATCHES = 14
CORES = 2
"""Of the machine of the recorded lines."""
PLACES = [(where, dim) for dim in (16, 128) for where in ("memory", "disk")]


class Roles(NamedTuple):
    """Costs of a batch in each role, with as many distinct ids as at the first size.

    Attributes:
        ids: ids of a batch by table.
        unique: distinct ones.
        reader: core seconds of a data loader.
        worker: of an embedding worker.
        server: of a PS, for the requests.
        step: of an NN worker.
        dense: bytes of other features and labels.
        parameters: of the network.
    """

    ids: dict[str, float]
    unique: dict[str, float]
    reader: float
    worker: float
    server: float
    step: StepRate
    dense: float
    parameters: int


@cache
def roles_of(dim: int, rows: int, uniform: bool) -> Roles:
    """Measures the roles on batches of a size, between fakes of their neighbours."""
    schema, optimizer = schema_of(dim), RowwiseAdagrad(lr=0.05)
    torch.manual_seed(0)
    network = persia.nn.models.FFNN(schema, hidden=(256, 128))
    trainers: dict[int, persia.Trainer] = {}

    def fit(cluster: FakeCluster, batches: Sequence[Batch], steps: int) -> float:
        if id(cluster) not in trainers:
            trainers[id(cluster)] = persia.Trainer(
                network, schema, optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-3),
                embedding_optimizer=optimizer, mode=Hybrid(4, warmup=0), cluster=cluster,
                options=persia.TrainerOptions(device="cpu", progress=False),
            )  # fmt: skip
        return trainers[id(cluster)].fit(batches, epochs=1 << 30, max_steps=steps).seconds

    drawn = Ids(rows, uniform)
    parameters = sum(parameter.numel() for parameter in network.parameters())
    batches = [drawn.batch() for _ in range(BATCHES)]
    costs = measure_workload("capacity", schema, optimizer, batches, fit, "cpu", parameters)
    shape = costs.batch
    return Roles(
        shape.ids, shape.unique, costs.reader, costs.worker, costs.server, costs.step, shape.dense_bytes, parameters
    )


@cache
def rows_of(dim: int) -> RowRate:
    """Measures lookups and updates of a PS."""
    return measure_rows(tables_of(schema_of(dim), 1)[0].config)


@cache
def wire() -> WireRate:
    """Measures calls."""
    return measure_wire()


@cache
def disk() -> DiskRate:
    """Measures the disk."""
    with ssd() as path:
        return measure_disk(str(path))


def tables_of(schema: Schema, rows: int) -> list[PlannedTable]:
    """Returns the tables of a plan."""
    return planned_tables(schema, RowwiseAdagrad(lr=0.05), dict.fromkeys(schema.resolved_tables(), rows), False)


def simulated(dim: int, first: int, rows: int, kept: int, uniform: bool, steps: int) -> tuple[float, float]:
    """Returns samples/s of a size, and the rows of a batch that come from disk.

    Args:
        dim: of the rows.
        first: the smallest size, at which roles are measured.
        rows: of all tables.
        kept: of them in memory; 0 for all.
        uniform: whether ids are, or Zipf(1.05).
        steps: to simulate.
    """
    roles = roles_of(dim, first, uniform)
    drawn, names = Ids(rows, uniform), list(roles.ids)
    batches = [drawn.batch() for _ in range(3)]
    unique = {
        name: statistics.fmean(len(set(batch.id_features[name].values.tolist())) for batch in batches) for name in names
    }
    scale = sum(unique.values()) / sum(roles.unique.values())
    missing = 0.0
    if kept:
        sizes = widened(rows)
        for name, size, memory in zip(names, sizes, map(int, water_level(sizes, kept)), strict=True):
            exponent = 0.0 if uniform else EXPONENT
            missing += unique[name] * missing_share(size, max(1, memory), exponent, roles.ids[name])
    tables = tables_of(schema_of(dim), 1)
    samples = round(max(roles.ids.values()))
    shape = BatchShape(samples, roles.ids, unique, {}, roles.dense, roles.parameters)
    counts = {"embedding_ps": SERVERS, "embedding_worker": 1, "data_loader": 1, "nn_worker": 1}
    row = rows_of(dim)
    costs = BatchCosts(
        samples=samples,
        traffic=batch_traffic(tables, shape, Topology(counts)),
        reader=roles.reader,
        worker=roles.worker * scale,
        request=SERVERS * roles.server,
        lookup=sum(unique.values()) * row.lookup,
        update=sum(unique.values()) * row.update,
        step=roles.step.seconds,
        call=wire().call,
        byte=wire().byte,
        misses=missing,
        miss=disk().row if kept else 0.0,
    )
    hosts = {"here": SimulatedHosts(1, CORES, reads=disk().reads if kept else float("inf"))}
    cluster = SimulatedCluster(hosts, dict.fromkeys(counts, "here"), counts, gpus=False)
    return simulate_training(costs, cluster, SimulatedMode(4), steps).samples_per_second, missing


def recorded() -> dict[str, dict[str, Any]]:
    """Returns the recorded lines of `capacity.flat` by name."""
    lines = map(json.loads, Path(ASSETS / "measures.jsonl").read_text(encoding="utf-8").splitlines())
    return {line["name"]: line for line in lines if line["name"].startswith("capacity.flat.")}


@runner.measures(*(f"plan.simulated.capacity.{where}_{dim}" for where, dim in PLACES), "plan.simulated.capacity")
def capacity(preset: str) -> Iterator[runner.Measure]:
    """Samples/s by size: simulated over measured; each measure is the size that is farthest off.

    With the preset "smoke", only the largest sizes of dim 16.
    """
    lines, measures, small = recorded(), [], preset == "smoke"
    for where, dim in PLACES[:2] if small else PLACES:
        line = lines[f"capacity.flat.{where}_{dim}"]
        first = lines[f"capacity.flat.memory_{dim}"]["by_size"][0]
        with short_measurements(preset):
            sizes = [compared(dim, first, size, where, STEPS[preset]) for size in line["by_size"][-small:]]
        worst = max(
            ((size, ids) for size in sizes for ids in ("zipf", "uniform")),
            key=lambda one: abs(one[0][one[1]]["simulated over measured"] - 1),
        )
        farthest = worst[0][worst[1]]
        measure = near(
            f"plan.simulated.capacity.{where}_{dim}", farthest["simulated"], farthest["measured"], 0.3,
            by_size=sizes, **{
                "farthest": {"rows": worst[0]["rows"], "ids": worst[1]}, "commit measured": line["commit"],
                "machine measured": line["machine"], "same machine": line["machine"] == machine(),
                **({"disk": msgspec.to_builtins(disk())} if where == "disk" else {}),
            },
        )  # fmt: skip
        measures.append(measure)
        yield measure
    yield runner.worst("plan.simulated.capacity", measures)


def compared(dim: int, first: dict[str, Any], size: dict[str, Any], where: str, steps: int) -> dict[str, Any]:
    """Returns what is simulated and what was measured at a size, for both distributions of ids."""
    kept = SCALES["laptop"].kept[dim] if where == "disk" else 0
    by_ids: dict[str, Any] = {"rows": size["rows"]}
    for ids, key, read in (
        ("zipf", "samples_per_s", "read_a_batch"), ("uniform", "uniform_samples_per_s", "read_a_batch_uniform")
    ):  # fmt: skip
        uniform = ids == "uniform"
        rate, missing = simulated(dim, first["rows"], size["rows"], kept, uniform, steps)
        base, _ = simulated(dim, first["rows"], first["rows"], 0, uniform, steps)
        by_ids[ids] = {
            "simulated": rate, "measured": size[key], "simulated over measured": rate / size[key],
            "shape": (rate / base) / (size[key] / first[key]),
            "read a batch, simulated": missing, "read a batch, measured": size[read],
        }  # fmt: skip
    return by_ids
