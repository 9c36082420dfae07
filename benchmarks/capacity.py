"""The Persia paper's capacity experiment: what its hosts hold, and by simulation how fast they train.

    python -m benchmarks 'plan.paper*' 'capacity.simulated*' [--preset smoke|laptop|full] [--json FILE]

The hosts and the model come from the paper (arXiv 2111.05897, section 6): 30 m2-ultramem-416 as embedding PSs, 100
c2-standard-30 as embedding workers, 8 a2-highgpu-8g with 8 A100 each; 6.25 to 100 trillion parameters in rows of 128.
The costs of PSs, embedding workers, calls and rows that come from an SSD (PERSIA_SSD, else that of temporary files) are
measured on this machine, a moment before, and so is the speed of a checkpoint. Not in the paper, so assumed here, and
said with each result: 26 ID-type features, batches of 4,096 samples, networks of 32 Gbit/s (100 for hosts with GPUs),
fp16 between embedding workers and NN workers, reads of SSDs. No A100 was here: a step of the paper's network takes 14
ms on an H100 (`gpu.ffnn_paper_vs_dense_only`), and results are given for other times, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks import runner
from benchmarks.plan import short_measurements
from benchmarks.ssd import ssd
from persia import IdFeature, Schema
from persia.batching.batch import Batch
from persia.batching.id_column import IdColumn
from persia.plan import PlannedTable, Topology, bytes_of, planned_tables
from persia.plan.distinct_ids import distinct_ids, missing_share
from persia.plan.load import batch_traffic
from persia.plan.measure import measure_checkpoint, measure_disk, measure_rows, measure_wire
from persia.plan.queue_simulation import BatchCosts, SimulatedCluster, SimulatedHosts, SimulatedMode, simulate_training
from persia.plan.rates import BatchShape
from persia.plan.workload import measure_server, measure_worker
from persia.schema import SGD, Adagrad, EmbeddingOptimizer, RowwiseAdagrad, Table

DIM = 128
FEATURES = 26
BATCH = 4096
SIZES = (6.25e12, 12.5e12, 25e12, 50e12, 100e12)
"""Parameters: Criteo-Syn1 to 5 of Table 1."""
PARAMETERS = 12_000_000
"""Of the network, by Table 1."""
SERVERS, WORKERS, GPUS = 30, 100, 64
PAPER_MEMORY = 12e12
"""Bytes of memory of an m2-ultramem-416, as the paper says."""
LISTED_MEMORY = 11_776 * 2**30
"""The same, as Google lists it."""
GBIT = 1e9 / 8
STEP_SECONDS = {
    "smoke": (0.014,),
    "laptop": (0.007, 0.014, 0.028, 0.056, 0.084),
    "full": (0.007, 0.014, 0.028, 0.056, 0.084),
}
STEPS = {"smoke": 6, "laptop": 12, "full": 40}
STEP = 0.014
"""Seconds of a step, as on an H100."""
SPILLED = 10
"""Rows of the table of `plan.paper` with rows on SSD, for each row in memory."""
SSD_MEMORY = 3e12
"""Bytes of memory of a host with an SSD tier, a quarter of the paper's."""
READS = 1e6
"""Random reads/s of the SSDs of such a host, assumed."""
ZIPF = 1.05

ROWS: dict[str, tuple[Any, EmbeddingOptimizer]] = {
    "float32_sgd": ("float32", SGD(0.05)),
    "float32_rowwise": ("float32", RowwiseAdagrad(0.05)),
    "float32_adagrad": ("float32", Adagrad(0.05)),
    "bf16_sgd": ("bfloat16", SGD(0.05)),
    "bf16_rowwise": ("bfloat16", RowwiseAdagrad(0.05)),
    "bf16_adagrad": ("bfloat16", Adagrad(0.05)),
}


def tables_of(
    dtype: Any, optimizer: EmbeddingOptimizer, rows: int, features: int = 1
) -> tuple[Schema, list[PlannedTable]]:
    """A schema with tables that share `rows` rows equally."""
    names = [f"f{i}" for i in range(features)]
    share = rows // features
    tables = [Table(name, DIM, dtype=dtype, capacity=share) for name in names]
    schema = Schema([IdFeature(name) for name in names], tables=tables)
    return schema, planned_tables(schema, optimizer, {}, False)


@runner.measures(*(f"plan.paper.{name}" for name in ROWS), "plan.paper")
def paper(preset: str) -> Iterator[runner.Measure]:
    """Bytes of 100 T parameters in rows of 128 on 30 PSs, compared with the memory of the paper's hosts."""
    rows = round(SIZES[-1] / DIM)
    fits = {}
    for name, (dtype, optimizer) in ROWS.items():
        _, (table,) = tables_of(dtype, optimizer, rows)
        size = bytes_of(table, SERVERS).memory
        fits[name] = size <= SERVERS * PAPER_MEMORY
        details = {
            "rows": rows,
            "bytes per row": size / rows,
            "hosts of 12 TB": -(-size // int(0.9 * PAPER_MEMORY)),
            "of the paper's 360 TB": size / (SERVERS * PAPER_MEMORY),
            "of the listed 379 TB": size / (SERVERS * LISTED_MEMORY),
            "fits": fits[name],
        }
        yield runner.Measure(f"plan.paper.{name}", float(size), "bytes", details=details)
    _, (table,) = tables_of("bfloat16", RowwiseAdagrad(0.05), rows)
    whole, spilled = bytes_of(table, SERVERS), bytes_of(table, SERVERS, rows // SPILLED)
    with short_measurements(preset):
        speed = measure_checkpoint().write
    details = {
        "of": "bytes of bfloat16 rows with row-wise state over 360 TB",
        "fits": fits,
        "with a tenth of the rows in memory": {
            "bytes of memory": spilled.memory,
            "hosts of 12 TB": -(-spilled.memory // int(0.9 * PAPER_MEMORY)),
            "bytes of SSD": spilled.disk,
        },
        "checkpoint": {
            "bytes": whole.checkpoint, "bytes/s here": speed, "days": whole.checkpoint / speed / 86_400,
        },
    }  # fmt: skip
    yield runner.Measure("plan.paper", whole.memory / (SERVERS * PAPER_MEMORY), "ratio", details=details)


def measured_costs(step: float) -> BatchCosts:
    """Costs of a batch of uniform ids, which are nearly all distinct, in bfloat16 rows with row-wise state."""
    schema, tables = tables_of("bfloat16", RowwiseAdagrad(0.05), FEATURES * 1_000_000, FEATURES)
    rng = np.random.default_rng(0)
    batches = [
        Batch(
            {f"f{i}": IdColumn(rng.integers(0, 2**40, BATCH, dtype=np.uint64)) for i in range(FEATURES)},
            np.zeros((BATCH, 13), np.float32),
            np.zeros((BATCH, 1), np.float32),
        )
        for _ in range(4)
    ]
    rate, wire = measure_rows(tables[0].config), measure_wire()
    unique = float(FEATURES * BATCH)
    return BatchCosts(
        samples=BATCH,
        traffic=traffic_of(tables, float(BATCH)),
        reader=0.0,  # Not part of the experiment: generated.
        worker=measure_worker(schema, batches),
        request=measure_server(schema, RowwiseAdagrad(0.05)),
        lookup=unique * rate.lookup,
        update=unique * rate.update,
        step=step,
        call=wire.call,
        byte=wire.byte,
    )


def traffic_of(tables: list[PlannedTable], unique: float) -> Any:
    names = [table.config.name for table in tables]
    shape = BatchShape(
        BATCH, dict.fromkeys(names, float(BATCH)), dict.fromkeys(names, unique), {}, BATCH * 56.0, PARAMETERS
    )  # fmt: skip
    counts = {"embedding_ps": SERVERS, "embedding_worker": WORKERS, "data_loader": WORKERS, "nn_worker": GPUS}
    return batch_traffic(tables, shape, Topology(counts, compressed=True))  # As in the paper, section 4.2.3.


def cluster_of(reads: float = float("inf"), network: float = 32 * GBIT) -> SimulatedCluster:
    """The paper's hosts."""
    hosts = {
        "ps": SimulatedHosts(SERVERS, 416, network, reads),
        "worker": SimulatedHosts(WORKERS, 30, network),
        "gpu": SimulatedHosts(GPUS // 8, 96, 100 * GBIT),
    }
    place = {"embedding_ps": "ps", "embedding_worker": "worker", "data_loader": "worker", "nn_worker": "gpu"}
    counts = {"embedding_ps": SERVERS, "embedding_worker": WORKERS, "data_loader": WORKERS, "nn_worker": GPUS}
    return SimulatedCluster(hosts, place, counts)


@runner.measures("capacity.simulated.modes", "capacity.simulated.sensitivity")
def modes(preset: str) -> Iterator[runner.Measure]:
    """Figure 9, right: Hybrid over Sync and Async over Hybrid, by the time of a step; and what doubles or halves it."""
    with short_measurements(preset):
        base, steps, by_step = measured_costs(STEP), STEPS[preset], []
        for seconds in STEP_SECONDS[preset]:
            costs = base._replace(step=seconds)
            rates = [
                simulate_training(costs, cluster_of(), mode, steps)
                for mode in (SimulatedMode(0), SimulatedMode(4), SimulatedMode(4, False))
            ]
            sync, hybrid, free = (rate.samples_per_second for rate in rates)
            by_step.append({
                "step_ms": seconds * 1e3, "sync": sync, "hybrid": hybrid, "async": free,
                "hybrid over sync": hybrid / sync, "async over hybrid": free / hybrid,
                "bottleneck": rates[1].bottleneck,
                "busy": {name: round(share, 3) for name, share in rates[1].busy.items()},
            })  # fmt: skip
        at = min(by_step, key=lambda line: abs(line["step_ms"] / 1e3 - STEP))
        details = {
            "of": "samples/s of Hybrid(4) over Sync, simulated",
            "paper": {"hybrid over sync": 2.6, "async over hybrid": 1.2},
            "by step": by_step,
            "costs": base._replace(traffic=None)._asdict() | {"traffic": base.traffic._asdict()},
        }
        yield runner.Measure("capacity.simulated.modes", at["hybrid over sync"], "ratio", details=details)
        plain = at["hybrid"]
        changes = {
            "PS work x 4": (base._replace(lookup=4 * base.lookup, update=4 * base.update), cluster_of()),
            "embedding worker work x 4": (base._replace(worker=4 * base.worker), cluster_of()),
            "network of PSs and embedding workers / 2": (base, cluster_of(network=16 * GBIT)),
            "costs of calls x 4": (base._replace(call=4 * base.call, byte=4 * base.byte), cluster_of()),
        }
        changed = {
            name: simulate_training(costs, cluster, SimulatedMode(4), steps).samples_per_second / plain
            for name, (costs, cluster) in changes.items()
        }
        lowest = min(changed.values())
        yield runner.Measure(
            "capacity.simulated.sensitivity", lowest, "ratio", details={"of": "samples/s of Hybrid(4)", "each": changed}
        )  # fmt: skip


@runner.measures("capacity.simulated")
def flat(preset: str) -> runner.Measure:
    """Figure 9, left: samples/s at 100 T over that at 6.25 T, in memory and with an SSD tier on smaller hosts."""
    with ssd() as path, short_measurements(preset):
        base, steps = measured_costs(STEP)._replace(miss=measure_disk(str(path)).row), STEPS[preset]
        by_size: dict[str, list[tuple[float, float]]] = {}
        facts: list[dict[str, Any]] = []
        known: dict[tuple[BatchCosts, float], float] = {}
        for kind, zipf, reads in (
            ("memory, uniform", 0.0, 0.0), ("memory, Zipf", ZIPF, 0.0), ("SSD, Zipf", ZIPF, READS),
            ("SSD of a tenth, Zipf", ZIPF, READS / 10), ("SSD, uniform", 0.0, READS),
        ):  # fmt: skip
            for parameters in SIZES:
                share = round(parameters / DIM / FEATURES)
                _, tables = tables_of("bfloat16", RowwiseAdagrad(0.05), share * FEATURES, FEATURES)
                unique = distinct_ids(share, zipf, BATCH)
                scale = unique / BATCH
                missing = 0.0
                if reads:
                    missing = missing_share(share, round(memory_rows(tables, SSD_MEMORY)), zipf, BATCH)
                costs = base._replace(
                    traffic=traffic_of(tables, unique), lookup=base.lookup * scale, update=base.update * scale,
                    misses=FEATURES * unique * missing,
                )  # fmt: skip
                cluster = cluster_of(reads or float("inf"))
                if (key := (costs, reads if costs.misses else 0.0)) not in known:
                    known[key] = simulate_training(costs, cluster, SimulatedMode(4), steps).samples_per_second
                by_size.setdefault(kind, []).append((parameters / 1e12, known[key]))
                facts.append({"kind": kind, "T": parameters / 1e12, "distinct": unique, "missing": missing})
        ratios = {kind: points[-1][1] / points[0][1] for kind, points in by_size.items()}
        details = {
            "of": "samples/s at 100 T over that at 6.25 T, simulated", "step_ms": STEP * 1e3, "each": ratios,
            "by_size": by_size, "batches": facts, "assumed reads/s of a host": READS,
            "core seconds of a row from SSD": base.miss,
        }  # fmt: skip
        return runner.Measure("capacity.simulated", ratios["memory, uniform"], "ratio", details=details)


def memory_rows(tables: list[PlannedTable], memory: float) -> float:
    """Rows of a table that are in memory on PS hosts with so much memory each; the index of all rows comes first."""
    none = sum(bytes_of(table, SERVERS, 0).memory for table in tables)
    whole = sum(bytes_of(table, SERVERS).memory for table in tables)
    share = (0.9 * SERVERS * memory - none) / (whole - none)
    return tables[0].rows * min(1.0, max(0.0, share))
