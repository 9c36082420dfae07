"""The left of the Persia paper's figure 9, measured on this machine: samples/s by the size of the tables.

    python -m benchmarks 'capacity.flat*' [--preset smoke|laptop|full] [--json FILE]
    python -m benchmarks capacity.flat.disk_16    # only those sizes, and the one that they are compared with

Two embedding PSs, an embedding worker and an NN worker on Ray train an FFNN on batches of Criteo's shape: 26 ID-type
features, whose vocabularies are those of the Kaggle data, all wider by the same factor, and 13 dense ones. Ids are
Zipf(1.05) by rank, or uniform as in the paper's Criteo-Syn. Rows are bfloat16 with row-wise Adagrad. All rows are there
before a size is measured, and no batch comes twice.

Sizes in memory grow in one cluster. Where rows are on disk, a cluster is filled for each size, popular rows last, so
that they are in memory as after a long time of training. Files lie in the directory of PERSIA_SSD, else in that of
temporary files; reads and writes bypass the page cache.
"""

from __future__ import annotations

import collections
import itertools
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

import persia
from benchmarks import runner
from benchmarks.cluster import ray_here
from benchmarks.ssd import ssd
from benchmarks.store import ids_of
from persia import Batch, IdColumn, IdFeature, Schema
from persia.cluster import Ray
from persia.modes import Hybrid
from persia.ps.sizes import water_level
from persia.schema import RowwiseAdagrad, Table
from persia.types import BucketMap
from persia.worker.routing import Router

VOCABULARIES = (
    1460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5683, 8_351_593, 3194, 27, 14_992, 5_461_306,
    10, 5652, 2173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572,
)  # fmt: skip
"""Distinct values of the 26 ID-type features of Criteo's Kaggle data."""
BATCH = 4096
EXPONENT = 1.05
SERVERS = 2
FILL = 1 << 18
"""Ids of a request that fills tables."""
IN_FLIGHT = 2 * SERVERS
"""Such requests at the same time."""


class Scale(NamedTuple):
    """How much of everything a preset does.

    Attributes:
        memory: rows of each size in memory, by dim.
        disk: rows with an SSD tier, by dim.
        kept: rows in memory with an SSD tier, by dim.
        rounds: measurements of a size.
        steps: of a measurement.
    """

    memory: dict[int, tuple[int, ...]]
    disk: dict[int, tuple[int, ...]]
    kept: dict[int, int]
    rounds: int
    steps: int


SCALES = {
    "smoke": Scale({16: (40_000, 80_000)}, {16: (80_000,)}, {16: 40_000}, 1, 2),
    "laptop": Scale(
        {16: (1_000_000, 10_000_000, 50_000_000, 150_000_000), 128: (1_000_000, 10_000_000, 30_000_000)},
        {16: (1_000_000_000,), 128: (130_000_000,)},
        {16: 50_000_000, 128: 10_000_000},
        5,
        30,
    ),
}
SCALES["full"] = SCALES["laptop"]._replace(rounds=9, steps=60)
NAMES = [f"capacity.flat.{where}_{dim}" for dim in (16, 128) for where in ("memory", "disk")]


class Measured(NamedTuple):
    """A size, and its samples/s.

    Attributes:
        rows: of all tables.
        zipf: samples/s of each round, Zipf ids.
        uniform: the same, uniform ids.
        details: further facts.
    """

    rows: int
    zipf: list[float]
    uniform: list[float]
    details: dict[str, Any]


def widened(rows: int) -> list[int]:
    """Returns vocabularies of `rows` rows together, in the proportions of Criteo's."""
    factor = rows / sum(VOCABULARIES)
    return [max(3, round(size * factor)) for size in VOCABULARIES]


def schema_of(dim: int, kept: int = 0, rows: int = 0, spill: str | None = None) -> Schema:
    """Returns a schema with a table a feature; with `spill`, `kept` of `rows` are in memory."""
    features = [IdFeature(f"c{i}", dim=dim) for i in range(len(VOCABULARIES))]
    sizes = widened(rows)
    tables = []
    # Equal parts, as PSs divide their memory by themselves: small tables are wholly in memory.
    for feature, size, memory in zip(features, sizes, map(int, water_level(sizes, kept)), strict=True):
        if spill is None:
            tables.append(Table(feature.name, dim, dtype="bfloat16"))
        else:
            capacity = size + size // 8 + 10_000  # Above their sizes: hashes do not divide them equally.
            tables.append(
                Table(feature.name, dim, dtype="bfloat16", capacity=capacity, spill=spill, memory_rows=memory)
            )
    return Schema(features, [f"i{i}" for i in range(13)], ["click"], tables=tables)


class Ids:
    """Draws ids of batches.

    Args:
        rows: of all tables.
        uniform: all ids of a feature are as likely; else Zipf(1.05) by rank, and an id is its rank.
    """

    def __init__(self, rows: int, uniform: bool) -> None:
        self._sizes = widened(rows)
        self._uniform = uniform
        self._random = np.random.default_rng(rows + uniform)

    def batch(self) -> Batch:
        """Returns a batch of `BATCH` samples."""
        columns = {f"c{i}": IdColumn(ids_of(self._ranks(size))) for i, size in enumerate(self._sizes)}
        labels = (self._random.random((BATCH, 1)) < 0.25).astype(np.float32)
        return Batch(columns, self._random.standard_normal((BATCH, 13)).astype(np.float32), labels)

    def _ranks(self, size: int) -> NDArray[np.int64]:
        if self._uniform:
            return self._random.integers(0, size, BATCH)
        # The inverse of the continuous distribution, as a table of a billion ranks would fill the memory.
        share = 1 - EXPONENT
        drawn = (1 + self._random.random(BATCH) * ((size + 1.0) ** share - 1)) ** (1 / share)
        return np.minimum(drawn.astype(np.int64) - 1, size - 1)


class Run:
    """A cluster that trains.

    Args:
        schema: of its model.
        cluster: two embedding PSs.
    """

    def __init__(self, schema: Schema, cluster: Ray) -> None:
        torch.manual_seed(0)
        self._schema = schema
        self._trainer = persia.Trainer(
            persia.nn.models.FFNN(schema, hidden=(256, 128)),
            schema,
            optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-3),
            embedding_optimizer=RowwiseAdagrad(lr=0.05),
            mode=Hybrid(4, warmup=0),
            cluster=cluster,
            options=persia.TrainerOptions(device="cpu", progress=False),
        )
        self._servers = self._trainer.embeddings.connection.servers
        self._filled = [0] * len(VOCABULARIES)

    def fill(self, rows: int) -> float:
        """Adds the rows that are missing, popular ones last; returns rows per second."""
        began, sizes = time.perf_counter(), widened(rows)
        asked: collections.deque[Future[Any]] = collections.deque()
        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            for i, (before, size) in enumerate(zip(self._filled, sizes, strict=True)):
                schema = Schema([self._schema.id_features[i]], tables=[self._schema.tables[i]])
                router = Router(schema, BucketMap.even(SERVERS), 1)
                for end in range(size, before, -FILL):
                    ids = ids_of(np.arange(max(before, end - FILL), end))
                    routed = router.route({f"c{i}": IdColumn(ids)})
                    for number, ps in enumerate(self._servers):
                        asked.append(pool.submit(ps.lookup, router.ids_of(routed, number), True))
                    while len(asked) > IN_FLIGHT:
                        asked.popleft().result()
            while asked:
                asked.popleft().result()
        added = sum(sizes) - sum(self._filled)
        self._filled = sizes
        return added / (time.perf_counter() - began)

    def rate(self, ids: Ids, steps: int) -> float:
        """Returns samples/s of `steps` steps."""
        return self._trainer.fit([ids.batch() for _ in range(steps)]).rows_per_second

    def measure(self, rows: int, scale: Scale) -> Measured:
        """Returns samples/s with all rows of a size there."""
        filled = self.fill(rows)
        zipf, uniform = Ids(rows, False), Ids(rows, True)
        self.rate(zipf, scale.steps)
        before = self.counts()
        of_zipf = [self.rate(zipf, scale.steps) for _ in range(scale.rounds)]
        between = self.counts()
        of_uniform = [self.rate(uniform, scale.steps) for _ in range(scale.rounds)]
        after = self.counts()
        details = {
            "rows": rows, "there": after["rows"], "filled_rows_per_s": filled,
            "memory_bytes": after["bytes"], "disk_rows": after.get("disk_rows", 0),
            "disk_bytes": after.get("disk_bytes", 0),
            "read_a_batch": missed(before, between) / (scale.rounds * scale.steps),
            "read_a_batch_uniform": missed(between, after) / (scale.rounds * scale.steps),
        }  # fmt: skip
        return Measured(rows, of_zipf, of_uniform, details)

    def counts(self) -> dict[str, int]:
        """Returns the counters of all tables in all PSs."""
        total: dict[str, int] = {}
        for table in itertools.chain.from_iterable(ps.statistics().values() for ps in self._servers):
            for name, value in table.items():
                total[name] = total.get(name, 0) + value
        return total


def missed(before: dict[str, int], after: dict[str, int]) -> int:
    """Returns how many rows came from disk in between."""
    return after.get("promoted", 0) - before.get("promoted", 0)


def in_memory(dim: int, scale: Scale) -> list[Measured]:
    """Measures the sizes that memory holds, then the first one again in a new cluster."""
    with Ray(ps=SERVERS) as cluster:
        run = Run(schema_of(dim), cluster)
        measures = [run.measure(rows, scale) for rows in scale.memory[dim]]
    if scale.rounds == 1:  # A smoke run: another cluster is seconds, and its figures mean nothing.
        return measures
    with Ray(ps=SERVERS) as cluster:
        again = Run(schema_of(dim), cluster).measure(scale.memory[dim][0], scale)
    first = measures[0]
    return [
        first._replace(zipf=first.zipf + again.zipf, uniform=first.uniform + again.uniform),
        *measures[1:],
    ]


def on_disk(dim: int, scale: Scale) -> Iterator[Measured]:
    """Measures the sizes of which a part is on disk."""
    for rows in scale.disk[dim]:
        with ssd() as path, Ray(ps=SERVERS) as cluster:
            schema = schema_of(dim, scale.kept[dim], rows, str(path))
            yield Run(schema, cluster).measure(rows, scale)


@runner.measures(*NAMES, "capacity.flat")
def flat(preset: str, selected: set[str]) -> Iterator[runner.Measure]:
    """Samples/s at the largest size over those at the smallest, all in memory and with rows on disk, by dim.

    Only the sizes that the selected names compare are measured, and the smallest one in memory.
    """
    scale = SCALES[preset]
    names = set(NAMES) if "capacity.flat" in selected else selected
    measures = []
    with ray_here(preset):
        for dim in scale.memory:
            in_ram, cold = (f"capacity.flat.{where}_{dim}" for where in ("memory", "disk"))
            if not {in_ram, cold} & names:
                continue
            least = scale._replace(memory={dim: scale.memory[dim][:1]})
            sizes = in_memory(dim, scale if in_ram in names else least)
            if in_ram in names:
                measures.append(compared(in_ram, sizes[0], sizes, 0.7))
                yield measures[-1]
            if cold in names:
                measures.append(compared(cold, sizes[0], list(on_disk(dim, scale)), 0.5))
                yield measures[-1]
    if "capacity.flat" in selected:
        yield runner.worst("capacity.flat", measures)


def compared(name: str, first: Measured, sizes: list[Measured], at_least: float) -> runner.Measure:
    """Returns the rate at the largest size over that at the smallest, Zipf ids; all sizes are in the details."""
    base, largest = statistics.median(first.zipf), sizes[-1]
    details = {
        "of": f"samples/s with {largest.rows:,} rows over those with {first.rows:,} in memory",
        "by_size": [
            {
                **size.details,
                "samples_per_s": statistics.median(size.zipf),
                "slowest": min(size.zipf), "fastest": max(size.zipf),
                "uniform_samples_per_s": statistics.median(size.uniform),
            }
            for size in sizes
        ],
        "first": base,
        "uniform": statistics.median(largest.uniform) / statistics.median(first.uniform),
    }  # fmt: skip
    return runner.quantity(name, [rate / base for rate in largest.zipf], "ratio", at_least=at_least, details=details)
