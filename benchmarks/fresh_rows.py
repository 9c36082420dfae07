"""Rows that are looked up ahead and refreshed: the bits and the rate of `Sync`, and what refreshing costs.

    python -m benchmarks 'fresh.sync_*' fresh.bytes fresh.ps_cpu [--preset smoke|laptop|full] [--json FILE]

fresh.sync_bits          Share of cases in which a row or its optimizer state differs between `Sync` whose
                         lookups run ahead and `Sync` whose lookups wait. Cases: 1, 2 and 4 NN workers, 1 and 3 PSs,
                         optimizers of rows, their dtypes, accumulation; with one NN worker, tables that evict.
fresh.sync_rate.network  Rate of `Sync` over `Sync` whose lookups wait, on Ray: 40 ms of network, 30 ms of lookups.
fresh.sync_rate.disk     The same in one process, with a tenth of the rows of a table in memory.
fresh.bytes              Bytes of rows and their places to the NN worker in `Hybrid(4)`, refreshed over not:
                         ids of Zipf(1.05).
fresh.ps_cpu             CPU time of a PS for the same batches, refreshed over not.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch

from benchmarks import runner
from benchmarks.cluster import COMPUTE_SECONDS, EMULATED_ROUNDS, EMULATED_STEPS, Slow, ray_here, waiting
from benchmarks.cluster import batches as uniform
from persia import Batch, IdColumn, IdFeature, Schema, Table
from persia.cluster import Embedded, Ray, RayOptions
from persia.modes import Hybrid, Mode, Sync
from persia.nn import CollectionOptions, EmbeddingCollection
from persia.optim import SGD, Adagrad, Adam
from persia.ps import EmbeddingServer
from persia.schema import EmbeddingOptimizer
from persia.services import EmbeddingPS
from persia.testing import Threads
from persia.types import Contribution, Floats, LookedUp, Packed, PushHeader
from persia.types.half_floats import Dtype
from persia.worker import Worker

FEATURES, DIM, ROWS = 4, 8, 128
WARM = 10
BITS_STEPS = {"smoke": 6, "laptop": 40, "full": 200}
BITS_IDS, BITS_ROWS = 300, 48
AHEAD = 4
DISK_ROWS = {"smoke": 20_000, "laptop": 2_000_000, "full": 20_000_000}
DISK_BATCH, DISK_DIM = {"smoke": 64, "laptop": 4096, "full": 4096}, 64
DISK_STEPS = {"smoke": 5, "laptop": 60, "full": 300}
TABLES, IDS, BATCH, SKEW = 26, 100_000, 4096, 1.05
COST_STEPS, COST_DIM = {"smoke": 6, "laptop": 40, "full": 200}, 16


# --- bits ---------------------------------------------------------------------------------------------------------


def trained(
    workers: int, ps: int, optimizer: EmbeddingOptimizer, dtype: Dtype, room: int | None, accumulation: int, count: int
) -> list[np.ndarray[Any, Any]]:
    """Returns the rows that NN workers in threads have trained, with their state, under a fixed network."""
    names = ["a", "b", "c"]
    tables = [Table(name, dim=8, dtype=dtype, capacity=room) for name in names[:2]]
    features = [IdFeature("a", table="a"), IdFeature("b", table="b"), IdFeature("c", table="b")]
    schema = Schema(features, tables=tables)
    weights = torch.linspace(-1, 1, 24)

    def batches(rank: int) -> Iterator[Batch]:
        for step in range(count * accumulation):
            draw = np.random.default_rng([rank, step])
            ids = {name: IdColumn(np.minimum(draw.zipf(1.3, BITS_ROWS), BITS_IDS).astype(np.uint64)) for name in names}
            yield Batch(ids, np.zeros((BITS_ROWS, 0), np.float32), draw.random((BITS_ROWS, 1), np.float32))

    def work(member: Any) -> list[np.ndarray[Any, Any]]:
        options = CollectionOptions(accumulation_steps=accumulation)
        embeddings = EmbeddingCollection(schema, optimizer=optimizer, mode=Sync(), cluster=member, options=options)
        for batch in embeddings.prefetch(list(batches(member.rank))):
            scores = torch.cat(list(embeddings(batch).values()), 1) @ weights
            (scores.sigmoid() - batch.labels[:, 0]).square().mean().backward()
        parts = [embeddings.rows(name, np.arange(BITS_IDS + 1, dtype=np.uint64), state=True) for name in ("a", "b")]
        return [array for p in parts if p.state is not None for array in (p.found, p.values, p.state.values)]

    return Threads(workers, ps=ps).run(work)[0]


@runner.measures("fresh.sync_bits")
def bits(preset: str) -> runner.Measure:
    """Without evictions if several NN workers train: whose lookup evicts a row is chance, then, also in `Sync`."""
    optimizers: tuple[EmbeddingOptimizer, ...] = (SGD(lr=0.1), Adagrad(lr=0.1), Adam(lr=0.01))
    dtypes: tuple[Dtype, ...] = ("float32", "bfloat16")
    rooms = {1: (None, 3_000, 100), 2: (None,), 4: (None,)}
    cases = [
        case
        for case in itertools.product((1, 2, 4), (1, 3), optimizers, dtypes, (None, 3_000, 100), (1, 3))
        if case[4] in rooms[case[0]]
    ]
    if preset == "smoke":
        cases = cases[:: len(cases) // 12]
    different = 0
    for case in cases:
        runs = []
        for ahead in (False, True):
            with waiting(ahead):
                runs.append(trained(*case, BITS_STEPS[preset]))
        different += not all(map(np.array_equal, *runs))
    return runner.Measure(
        "fresh.sync_bits", different / len(cases), "fraction", at_most=0, details={"cases": len(cases)}
    )


# --- rate ---------------------------------------------------------------------------------------------------------


def network_seconds(cluster: Any, mode: Mode, steps: int, ahead: bool) -> float:
    """Returns the seconds of some steps on this NN worker."""
    schema = Schema([IdFeature(f"f{i}", dim=DIM) for i in range(FEATURES)])
    net = torch.nn.Linear(FEATURES * DIM, 1)
    with waiting(ahead):
        embeddings = EmbeddingCollection(schema, optimizer=Adagrad(lr=0.05), mode=mode, cluster=Slow(cluster))
        began = 0.0
        for number, batch in enumerate(embeddings.prefetch(uniform(WARM + steps, ROWS, 0, FEATURES))):
            if number == WARM:
                began = time.perf_counter()
            time.sleep(COMPUTE_SECONDS)
            logits = net(torch.cat(list(embeddings(batch).values()), 1))
            torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.labels).backward()
        return time.perf_counter() - began


@runner.measures("fresh.sync_rate.network")
def network(preset: str) -> runner.Measure:
    """Samples/s of `Sync` whose lookups run ahead, over samples/s of `Sync` whose lookups wait."""
    steps, ratios = EMULATED_STEPS[preset], list[float]()
    with ray_here(preset), Ray(options=RayOptions(threads=1)) as cluster:
        for number in range(EMULATED_ROUNDS[preset]):
            seconds: dict[bool, float] = {}
            for ahead in (True, False) if number % 2 else (False, True):
                seconds[ahead] = cluster.run(lambda ahead=ahead: network_seconds(cluster, Sync(), steps, ahead))[0]
            ratios.append(seconds[False] / seconds[True])
    return runner.quantity("fresh.sync_rate.network", ratios, "ratio", at_least=1.5, details={"of": "rows/s"})


@runner.measures("fresh.sync_rate.disk")
def disk(preset: str) -> runner.Measure:
    """The same for a table with a tenth of its rows in memory, next to a network that takes as long as its lookups."""
    rows, size = DISK_ROWS[preset], DISK_BATCH[preset]
    with tempfile.TemporaryDirectory(prefix="persia-fresh-") as folder:
        table = Table("id", dim=DISK_DIM, spill=folder, memory_rows=rows // 10, capacity=2 * rows)
        schema = Schema([IdFeature("id", table="id")], tables=[table])
        embeddings = EmbeddingCollection(schema, optimizer=Adagrad(lr=0.05), mode=Sync(), cluster=Embedded(threads=1))
        for first in range(0, rows, 100_000):
            ids = np.arange(first, min(rows, first + 100_000), dtype=np.uint64)
            embeddings.set_rows("id", ids, np.zeros((len(ids), DISK_DIM), np.float32))
        draw = np.random.default_rng(0)

        def seconds(ahead: bool, compute: float) -> float:
            ids = draw.integers(0, rows, (DISK_STEPS[preset] + 5, size), dtype=np.uint64)
            loader = [
                Batch({"id": IdColumn(own)}, np.zeros((size, 0), np.float32), np.zeros((size, 1), np.float32))
                for own in ids
            ]
            with waiting(ahead):
                began = 0.0
                for number, batch in enumerate(embeddings.prefetch(loader)):
                    if number == 5:
                        began = time.perf_counter()
                    time.sleep(compute)
                    embeddings(batch)["id"].sum().backward()
                return time.perf_counter() - began

        compute = seconds(False, 0.0) / DISK_STEPS[preset]
        ratios = []
        for number in range(runner.rounds_of(preset)):
            both = {ahead: seconds(ahead, compute) for ahead in ((True, False) if number % 2 else (False, True))}
            ratios.append(both[False] / both[True])
    details = {"of": "rows/s", "seconds of a network": compute}
    return runner.quantity("fresh.sync_rate.disk", ratios, "ratio", at_least=1.3, details=details)


# --- cost ---------------------------------------------------------------------------------------------------------


class Clocked:
    """A PS, and the CPU seconds of the thread that calls it, which does all its work."""

    def __init__(self, server: EmbeddingServer) -> None:
        self._server = server
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._server, name)

        def call(*arguments: Any) -> Any:
            began = time.thread_time()
            try:
                return method(*arguments)
            finally:
                self.seconds += time.thread_time() - began

        return call


class Costs:
    """One PS and one embedding worker serve an NN worker whose lookups run 4 steps ahead; one more is in flight."""

    def __init__(self, refreshed: bool) -> None:
        schema = Schema([IdFeature(f"t{i}", dim=COST_DIM) for i in range(TABLES)])
        tables = schema.resolved_tables()
        self.ps = Clocked(EmbeddingServer(tables, Adagrad(lr=0.05), Hybrid(AHEAD, warmup=0), 0, 1))
        self._worker = Worker(schema, cast("list[EmbeddingPS]", [self.ps]))
        self._refreshed = refreshed
        self._ahead = deque[tuple[int, LookedUp]]()
        self._computed = deque[tuple[int, LookedUp]]()
        self._steps = 0

    def run(self, batches: Sequence[dict[str, IdColumn]], gradients: Floats) -> int:
        """Trains with batches, after those before. Returns the bytes of rows, and of their places, that are sent."""
        sent, ahead, computed = 0, self._ahead, self._computed
        for batch in batches:
            batch_id = self._worker.register(batch)
            if self._refreshed:
                found = self._worker.lookup_ahead(batch_id, recent=len(ahead) + len(computed))
                sent += 0 if found.left_out is None else found.left_out.buffer.nbytes
            else:
                found = self._worker.lookup(batch_id)
            sent += found.rows.buffer.nbytes
            ahead.append((batch_id, found))
            if len(ahead) > AHEAD:
                batch_id, found = ahead.popleft()
                if self._refreshed:
                    fresh = self._worker.refresh(batch_id, found.seen or [], found.left_out)
                    sent += fresh.rows.buffer.nbytes + fresh.places.buffer.nbytes
                computed.append((batch_id, found))
            if len(computed) > 1:
                self._push(computed.popleft(), gradients)
        return sent

    def _push(self, batch: tuple[int, LookedUp], gradients: Floats) -> None:
        ids = self._worker.distinct_ids(batch[0])
        rows = Packed(ids.names, ids.counts, gradients[: len(ids.buffer) * COST_DIM], [COST_DIM] * TABLES)
        header = PushHeader(1, 0, self._steps + 1, self._steps, BATCH)
        self._worker.push(header, [Contribution(batch[0], rows)])
        self._steps += 1


@runner.measures("fresh.bytes", "fresh.ps_cpu")
def cost(preset: str) -> list[runner.Measure]:
    """Without the messages between the roles."""
    chances = np.cumsum(1.0 / np.arange(1, IDS + 1) ** SKEW)
    draw = np.random.default_rng(0)

    def ids() -> IdColumn:
        return IdColumn(np.searchsorted(chances / chances[-1], draw.random(BATCH)).astype(np.uint64))

    batches = [{f"t{i}": ids() for i in range(TABLES)} for _ in range(COST_STEPS[preset])]
    gradients = (draw.random(TABLES * BATCH * COST_DIM, np.float32) - 0.5) * 0.01
    ways = {refreshed: Costs(refreshed) for refreshed in (False, True)}
    for way in ways.values():
        way.run(batches, gradients)
    ratios, sizes = [], dict[bool, int]()
    for number in range(1, 1 + runner.rounds_of(preset)):
        cpu: dict[bool, float] = {}
        for refreshed in (True, False) if number % 2 else (False, True):
            way = ways[refreshed]
            before = way.ps.seconds
            sizes[refreshed] = way.run(batches, gradients)
            cpu[refreshed] = way.ps.seconds - before
        ratios.append(cpu[True] / cpu[False])
    details = {"ids": f"{TABLES} tables, Zipf({SKEW})", "dim": COST_DIM}
    return [
        runner.Measure("fresh.bytes", sizes[True] / sizes[False], "ratio", at_most=1.15, details=details),
        runner.quantity("fresh.ps_cpu", ratios, "ratio", at_most=1.15, details=details),
    ]
