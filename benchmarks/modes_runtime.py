"""Modes on the real roles, with NN workers that are slow: rates, drops, staleness, Auto, and the time of a switch.

    python -m benchmarks 'modes.*' [--preset smoke|laptop|full] [--json FILE]

NN workers are threads that wait in place of computing, so that many fit on few cores. What is measured is who waits for
whom; a batch's share of Python stays small compared with its wait.
"""

from __future__ import annotations

import bisect
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import persia
from benchmarks import runner
from benchmarks.paper_figures_runs import SpeedPlan, distant_rate
from persia.data.zipf import Zipf
from persia.modes import Async, Auto, Gba, HopBw, Hybrid, Mode, Sync
from persia.ps import EmbeddingServer, ServerOptions
from persia.pushes.accumulator import GradientAccumulator
from persia.replay import ScheduleEvent, Setting, Trace, alternating, load_timeline, phases, simulate, steady
from persia.replay.virtual import VirtualTraining
from persia.schema import Adagrad, Table
from persia.testing import Threads
from persia.testing import emulation as bench
from persia.types import Gradients, PushHeader

WORKERS = 8
COMPUTE_SECONDS = {"smoke": 0.02, "laptop": 0.1, "full": 0.1}
BATCHES = {"smoke": 64, "laptop": 800, "full": 2400}
TRACED_SECONDS = {"smoke": 0.25, "laptop": 8.0, "full": 120.0}
PHASES = {"smoke": (2,), "laptop": (2, 10, 50), "full": (2, 10, 50)}
SLOW_SHARE, FACTOR = 0.25, 4.0
NN_WORKERS = {"smoke": (1, 2), "laptop": (1, 2, 4, 8), "full": (1, 2, 4, 8)}
STEPS_OF_PS = {"smoke": 2, "laptop": 40, "full": 200}
SWITCH_PARAMETERS = {"smoke": 100_000, "laptop": 12_000_000, "full": 12_000_000}


def gba() -> Gba:
    return Gba(WORKERS * bench.ROWS)


@runner.measures("modes.gba_vs_sync_static")
def gba_vs_sync_static(preset: str) -> runner.Measure:
    """Applied samples/s of Gba over Sync, 2 of 8 NN workers 4x slower for good. The arithmetic bound is 3.25."""
    emulation = bench.Emulation(steady([FACTOR] * 2 + [1.0] * (WORKERS - 2)), COMPUTE_SECONDS[preset])
    pairs = [
        [bench.run(mode, emulation, BATCHES[preset] // over) for mode, over in ((gba(), 1), (Sync(), 2))]
        for _ in range(runner.rounds_of(preset))
    ]
    return runner.quantity(
        "modes.gba_vs_sync_static",
        [fast.rate / slow.rate for fast, slow in pairs],
        "ratio",
        at_least=3.0,
        details={
            "of": "rows/s",
            "compute_s": COMPUTE_SECONDS[preset],
            "gba_of_bound": statistics.median(fast.of_bound for fast, _ in pairs),
            "sync_of_bound": statistics.median(slow.of_bound for _, slow in pairs),
        },
    )


def moving(preset: str, length: int) -> Trace:
    """Every NN worker is slow a quarter of the time, in phases as long as `length` steps at full speed."""
    seconds = length * COMPUTE_SECONDS[preset]
    return phases(WORKERS, length=seconds, factor=FACTOR, share=SLOW_SHARE, count=64)


def traced(mode: Mode, emulation: bench.Emulation, seconds: float) -> bench.ModeResult:
    """A run that lasts about so long."""
    return bench.run(mode, emulation, len(simulated_ends(mode, emulation, seconds)))


def simulated_ends(mode: Mode, emulation: bench.Emulation, seconds: float) -> list[float]:
    """When each batch is computed in the simulation, within `seconds` seconds."""
    batches = WORKERS * (int(seconds / emulation.compute) + 2)  # More than NN workers that are never slow can compute.
    ideal = simulate(mode, Setting(emulation.trace, emulation.compute, bench.ROWS), batches)
    ends = [event.time for event in ideal.events if event.server == "ps-0" and event.kind in ("push", "drop")]
    return ends[: bisect.bisect(ends, seconds)]


class OfBound(NamedTuple):
    """A run over its simulation.

    Attributes:
        time: how fast it computed as many batches.
        share: how much of them it applied.
        rate: samples/s that it applied.
    """

    time: float
    share: float
    rate: float


def of_bound(mode: Mode, emulation: bench.Emulation, seconds: float) -> OfBound:
    """A run over its simulation, until as many batches are computed as there in so long.

    A few more batches are there to be handed out, so that what counts is the rate, not how a run ends.
    """
    setting = Setting(emulation.trace, emulation.compute, bench.ROWS)
    ends = simulated_ends(mode, emulation, seconds)
    count = len(ends)
    batches = count + 2 * WORKERS
    ideal = simulate(mode, setting, batches).summary()
    trained = bench.train(mode, emulation, batches)
    took = sorted(itertools.chain.from_iterable(trained.finished))[count - 1]
    applied = trained.applied_rows / trained.result.rows
    share = applied / (ideal.applied_rows / (batches * bench.ROWS))
    return OfBound(ends[count - 1] / took, share, count * bench.ROWS * applied / took)


@runner.measures(
    "modes.vs_bound",
    *(f"modes.vs_bound.{type(mode).__name__}_{n}" for n in PHASES["full"] for mode in bench.all_modes(WORKERS)),
)
def vs_bound(preset: str) -> Iterator[runner.Measure]:
    """Each mode's applied samples/s over the event replay's for the same trace: the worst mode and trace.

    It is the product of two: how fast batches are computed, and the share of them that is applied, each over the
    simulation's.
    """
    measures = []
    for length in PHASES[preset]:
        emulation = bench.Emulation(moving(preset, length), COMPUTE_SECONDS[preset])
        for mode in bench.all_modes(WORKERS):
            name = f"{type(mode).__name__}_{length}"
            runs = [of_bound(mode, emulation, TRACED_SECONDS[preset]) for _ in range(runner.rounds_of(preset))]
            parts = {part: statistics.median(getattr(run, part) for run in runs) for part in OfBound._fields}
            reached = [run.time * run.share for run in runs]
            details = {"of": "rows/s, the event replay's", **parts}
            measures.append(runner.quantity(f"modes.vs_bound.{name}", reached, "ratio", at_least=0.92, details=details))
    yield from measures
    yield runner.worst("modes.vs_bound", measures)


@runner.measures("modes.dropped", *(f"modes.dropped.{mode}_{n}" for n in PHASES["full"] for mode in ("Gba", "HopBw")))
def dropped(preset: str) -> Iterator[runner.Measure]:
    """Share of the batches that Gba drops under that trace, the worst length of phases; HopBw(2) for comparison."""
    measures = []
    for length in PHASES[preset]:
        emulation = bench.Emulation(moving(preset, length), COMPUTE_SECONDS[preset])
        for mode, at_most in ((gba(), 0.03), (HopBw(2), None)):
            shares = []
            for _ in range(runner.rounds_of(preset)):
                report = traced(mode, emulation, TRACED_SECONDS[preset]).trained.result.asynchronous
                assert report is not None
                shares.append(report.dropped_batches / (report.batches + report.dropped_batches))
            name = f"modes.dropped.{type(mode).__name__}_{length}"
            measures.append(runner.quantity(name, shares, "fraction", at_most=at_most))
    yield from measures
    yield runner.worst("modes.dropped", [each for each in measures if each.at_most is not None])


@runner.measures("modes.latency.async", "modes.latency.gba")
def latency(preset: str) -> Iterator[runner.Measure]:
    """Rate over Hybrid(1), with equally fast NN workers and latencies of half a batch for a lookup and a push."""
    seconds, steps = (0.01, 5) if preset == "smoke" else (0.08, 40)
    plan = SpeedPlan(None, 4, 256, steps, 1, seconds, 0.0, False)
    modes = {"hybrid": Hybrid(1, warmup=0), "async": Async(), "gba": Gba(plan.nn_workers * plan.local)}
    rounds = [
        {kind: distant_rate(mode, plan, seconds / 2) for kind, mode in modes.items()}
        for _ in range(runner.rounds_of(preset))
    ]
    for kind in ("async", "gba"):
        ratios = [rates[kind] / rates["hybrid"] for rates in rounds]
        details = {"of": "rows/s", "compute_s": seconds, "latency_s": seconds / 2}
        yield runner.quantity(f"modes.latency.{kind}", ratios, "ratio", at_least=1.0, details=details)


@runner.measures("modes.staleness")
def staleness(preset: str) -> runner.Measure:
    """Whether a run of Gba and its replay agree on the age of every gradient, and on the parameters."""
    emulation = bench.Emulation(moving(preset, PHASES[preset][0]), COMPUTE_SECONDS[preset] / 5)
    batches = 64 if preset == "smoke" else 800
    with tempfile.TemporaryDirectory() as directory:
        trained = bench.train(gba(), emulation, batches, directory)
        schedule = load_timeline(Path(directory) / "phase-1.jsonl")
    schema, data = bench.problem(batches)
    virtual = VirtualTraining(bench.network(), schema, data.__getitem__, bench.optimizer, bench.EMBEDDING_OPTIMIZER)
    step, read, ages = schedule.step, {}, {}

    def watch(event: ScheduleEvent, gradient: object) -> None:
        nonlocal step
        if event.server != "dense-0":
            return
        if event.kind == "pull":
            read[event.batch] = step
        elif event.kind == "push":
            ages[event.batch] = step - read[event.batch]
        elif event.kind == "apply":
            step += 1

    virtual.run(schedule, watch)
    virtual.evaluate(data[:1])
    pairs = zip(virtual.model.parameters(), trained.trainer.model.parameters(), strict=True)
    apart = max(float((own - theirs).detach().abs().max()) for own, theirs in pairs)
    measured = {arrival.number: arrival.step - arrival.version for arrival in trained.arrivals}
    oldest = max(arrival.step - arrival.token for arrival in trained.arrivals if arrival.decay)
    holds = measured == ages and oldest <= gba().tolerance and apart <= 1e-6
    return runner.Measure(
        "modes.staleness",
        float(holds),
        "bool",
        at_least=1.0,
        details={
            "gradients": len(ages),
            "mean": statistics.fmean(ages.values()),
            "max": max(ages.values()),
            "oldest_by_token": oldest,
            "parameters_apart": apart,
        },
    )


AUTO_COMPUTE_SECONDS = {"smoke": 0.02, "laptop": 0.4, "full": 0.4}
QUIET, STRAINED = {"smoke": 0.4, "laptop": 30.0, "full": 120.0}, {"smoke": 0.4, "laptop": 90.0, "full": 360.0}


@runner.measures("modes.auto")
def auto(preset: str) -> runner.Measure:
    """Samples/s of Auto over the better fixed mode's, in the worst phase; `rounds` has the details of each round."""
    results = [auto_round(preset) for _ in range(runner.rounds_of(preset))]
    details = {"of": "rows/s, the better fixed mode's", "rounds": [details for _, details in results]}
    return runner.quantity("modes.auto", [worst for worst, _ in results], "ratio", at_least=0.95, details=details)


def auto_round(preset: str) -> tuple[float, dict[str, Any]]:
    """Auto in a quiet, a strained and a quiet phase: samples/s over the better fixed mode's, in the worst phase.

    A batch computes for 400 ms. All NN workers share an interpreter, so that a step of Sync, at the end of which all
    work at once, takes about 20 ms more than on processes of their own; with 100 ms, Gba is the better one always.
    """
    quiet, strained, compute = QUIET[preset], STRAINED[preset], AUTO_COMPUTE_SECONDS[preset]
    slow = [1.0] * (WORKERS - 2) + [FACTOR] * 2
    fixed: dict[str, list[float]] = {}
    for mode in (Sync(), gba()):
        lines = [traced(mode, bench.Emulation(steady(f), compute), quiet / 2) for f in ([1.0] * WORKERS, slow)]
        fixed[type(mode).__name__] = [line.rate for line in lines]
    trace = alternating(slow, quiet=quiet, strained=strained)
    bounds = [0.0, quiet, quiet + strained, 2 * quiet + strained]
    setting = Setting(trace, compute, bench.ROWS)
    ends = [
        e.time
        for e in simulate(gba(), setting, 2_000 if preset == "smoke" else 100_000).events
        if e.kind == "push" and e.server == "ps-0"
    ]
    rule = Auto(gba(), windows=2, seconds=quiet / 40)
    trained = bench.train(rule, bench.Emulation(trace, compute), bisect.bisect(ends, bounds[-1]))
    done = list(itertools.chain.from_iterable(trained.finished))
    rates = [sum(a <= t < b for t in done) * bench.ROWS / (b - a) for a, b in itertools.pairwise(bounds)]
    ratios = [rate / max(of[phase % 2] for of in fixed.values()) for phase, rate in enumerate(rates)]
    return min(ratios), {
        "per_phase": [round(ratio, 3) for ratio in ratios],
        "rows_per_s": [round(rate, 1) for rate in rates],
        **{name: [round(rate, 1) for rate in of] for name, of in fixed.items()},
        "switches": [str(choice) for choice in trained.result.mode_choices if choice.switch],
    }


@runner.measures("modes.switch_seconds")
def switch_seconds(preset: str) -> runner.Measure:
    """Time of a switch beyond draining, 12 M dense parameters with Adam, 4 NN workers in one process; the slowest."""
    size = SWITCH_PARAMETERS[preset]

    data = list(persia.data.synthetic(64 * 16, id_features=1, ids_per_feature=50, dense_features=0, batch_size=16))
    schema = persia.data.synthetic(16, id_features=1, ids_per_feature=50, dense_features=0, batch_size=16).schema
    name = schema.id_features[0].name
    dim = schema.resolved_tables()[schema.id_features[0].table_name].dim

    class Large(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.head = torch.nn.Linear(dim, 1)
            self.weights = torch.nn.Parameter(torch.zeros(size))

        def forward(self, dense: torch.Tensor, embeddings: dict[str, torch.Tensor]) -> torch.Tensor:
            return self.head(embeddings[name]) + self.weights[:1]

    schedule = [(0, Sync()), (4, Gba(4 * 16)), (6, Sync()), (8, Gba(4 * 16)), (10, Sync())]

    def work(member: object) -> list[float]:
        trainer = persia.Trainer(
            Large(),
            schema,
            optimizer=lambda p: torch.optim.Adam(p, 1e-3),
            embedding_optimizer=persia.optim.Adagrad(lr=0.05),
            mode=Sync(),
            cluster=member,
            options=persia.TrainerOptions(device="cpu", progress=False, mode_schedule=schedule),
        )
        trainer.fit(data)
        return [switch.seconds for switch in trainer.switches]

    rounds = [Threads(4).run(work) for _ in range(runner.rounds_of(preset))]
    slowest = [[max(seconds) for seconds in zip(*measured, strict=True)] for measured in rounds]
    details = {"parameters": size, "each": [[round(seconds, 3) for seconds in each] for each in slowest]}
    return runner.quantity("modes.switch_seconds", list(map(max, slowest)), "s", at_most=1.0, details=details)


@runner.measures("modes.running_sums")
def running_sums(preset: str) -> runner.Measure:
    """Rows of gradients per second that a PS adds to the sum of a step of 128 gradients; dim 16."""
    random = np.random.default_rng(0)
    most, universe = 20_000, random.integers(0, 2**63, 400_000, dtype=np.uint64)
    rates: dict[int, list[float]] = {}
    for group in (8, 128) if preset == "smoke" else (1, 8, 32, 128):
        parts = [np.unique(universe[random.zipf(1.2, 2 * most) * 7919 % len(universe)])[:most] for _ in range(group)]
        gradients = [
            Gradients(ids, random.normal(size=(len(ids), 16)).astype(np.float32)) for ids in parts
        ]  # About 9,000 rows each; many occur in several.
        weights = [np.ones(len(ids), np.float32) for ids in parts]
        sums = GradientAccumulator("per_id")
        rates[group] = []
        for _ in range(runner.rounds_of(preset)):
            began = time.perf_counter()
            for gradient, counts in zip(gradients, weights, strict=True):
                sums.add({"table": (gradient, counts)}, 128)
            sums.take()
            rates[group].append(sum(map(len, parts)) / (time.perf_counter() - began))
    details = {f"gradients_{group}": statistics.median(each) for group, each in rates.items()}
    return runner.quantity("modes.running_sums", rates[128], "rows/s", details=details)


@runner.measures(*(f"modes.combine_cpu.nn_workers_{n}" for n in NN_WORKERS["full"]))
def combine_cpu(preset: str) -> Iterator[runner.Measure]:
    """Processor time of a PS in a global step of Hybrid, over that with `combine=False`, by the number of NN workers.

    Lookups and pushes of 26 tables of dim 16, 1,024 Zipf ids each, rows of Adagrad. Calls are made in its process.
    """
    steps = STEPS_OF_PS[preset]
    for number in NN_WORKERS[preset]:
        with (
            StepsOfPS(Hybrid(4, warmup=0), number) as combined,
            StepsOfPS(Hybrid(4, combine=False, warmup=0), number) as on_arrival,
        ):
            for each in (combined, on_arrival):
                each.seconds(steps)  # Their rows are new.
            pairs = [(combined.seconds(steps), on_arrival.seconds(steps)) for _ in range(runner.rounds_of(preset))]
        ours, theirs = (statistics.median(each) for each in zip(*pairs, strict=True))
        details = {"of": "seconds of the processor a step", "ours": ours, "theirs": theirs}
        ratios = [a / b for a, b in pairs]
        yield runner.quantity(f"modes.combine_cpu.nn_workers_{number}", ratios, "ratio", details=details)


class StepsOfPS:
    """A PS, and as many threads as NN workers, which look up and push the ids of the same batches in each mode."""

    def __init__(self, mode: Mode, workers: int) -> None:
        tables = {f"t{number}": Table(f"t{number}", 16) for number in range(26)}
        self._server = EmbeddingServer(tables, Adagrad(lr=0.05), mode, 0, 1, ServerOptions(workers))
        self._server.switch(mode, 1, 0)
        self._pool = ThreadPoolExecutor(workers)
        self._workers, self._step = workers, 0
        random, zipf = np.random.default_rng(0), Zipf(1_000_000, 1.05)
        values = random.normal(size=(1_024, 16)).astype(np.float32)
        self._batches = []
        for _ in range(8 * workers):
            drawn = {name: np.unique(zipf.sample(random, 1_024).view(np.uint64)) for name in tables}
            self._batches.append({name: Gradients(ids, values[: len(ids)]) for name, ids in drawn.items()})

    def seconds(self, steps: int) -> float:
        """Makes `steps` steps; returns the processor time of one."""
        began = time.process_time()
        for _ in range(steps):
            parts = [self._batches[(self._step * self._workers + rank) % len(self._batches)] for rank in self._ranks]
            for part in parts:
                self._server.lookup({name: gradients.ids for name, gradients in part.items()}, True)
            self._step += 1
            headers = [PushHeader(1, rank, self._step, self._step - 1, 1_024) for rank in self._ranks]
            list(self._pool.map(self._server.push, headers, parts))
        return (time.process_time() - began) / steps

    @property
    def _ranks(self) -> range:
        return range(self._workers)

    def __enter__(self) -> StepsOfPS:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
        self._server.close()
