"""Modes on the real roles, with NN workers that are slow: rates, drops, staleness, and the time of a switch.

    python benchmarks/modes_runtime.py [--only NAME] [--preset smoke|laptop|full] [--json FILE]

NN workers are threads that wait in place of computing, so that many fit on few cores. What is measured is who waits for
whom; a batch's share of Python is kept small beside its wait.
"""

from __future__ import annotations

import random
import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import harness

import persia
from persia import bench
from persia.cluster import Threads
from persia.modes import Async, Gba, HopBs, HopBw, Mode, Sync

WORKERS = 8
COMPUTE_SECONDS = {"smoke": 0.01, "laptop": 0.1, "full": 0.1}
BATCHES = {"smoke": 64, "laptop": 800, "full": 2400}
ROUNDS = {"smoke": 1, "laptop": 3, "full": 5}
PHASES = (2, 10, 50)
SLOW_SHARE, FACTOR = 0.25, 4.0
SWITCH_PARAMETERS = {"smoke": 100_000, "laptop": 12_000_000, "full": 12_000_000}


def gba() -> Gba:
    return Gba(WORKERS * bench.ROWS)


def gba_vs_sync_static(preset: str) -> harness.Measure:
    """Applied samples/s of Gba over Sync, 2 of 8 NN workers 4x slower for good. The arithmetic bound is 3.25."""
    emulation = bench.Emulation(WORKERS, bench.static(2, FACTOR), COMPUTE_SECONDS[preset])
    ratios = []
    for _ in range(ROUNDS[preset]):
        fast, slow = (bench.run(mode, emulation, BATCHES[preset]).rate for mode in (gba(), Sync()))
        ratios.append(fast / slow)
    return harness.quantity(
        "modes.gba_vs_sync_static", ratios, "x samples/s", 3.0, details={"compute_ms": 1000 * COMPUTE_SECONDS[preset]}
    )


def phases(length: int, seed: int = 0) -> bench.Slowness:
    """Every NN worker is slow a quarter of the time, in phases of so many of its steps."""
    drawn: dict[tuple[int, int], float] = {}
    generator = random.Random(seed)
    for rank in range(WORKERS):
        for phase in range(10_000 // length):
            drawn[rank, phase] = FACTOR if generator.random() < SLOW_SHARE else 1.0
    return lambda rank, step: drawn[rank, step // length % (10_000 // length)]


def dropped(preset: str) -> list[harness.Measure]:
    """Share of the batches that are dropped under that trace: Gba, with HopBw(2) beside it."""
    shares: dict[str, list[float]] = {"gba": [], "hop_bw": []}
    staleness, above = [], 0
    for length in PHASES:
        emulation = bench.Emulation(WORKERS, phases(length), COMPUTE_SECONDS[preset])
        for name, mode in (("gba", gba()), ("hop_bw", HopBw(2))):
            line = bench.run(mode, emulation, BATCHES[preset])
            report = line.result.asynchronous
            assert report is not None
            shares[name].append(report.dropped_batches / (report.batches + report.dropped_batches))
            if name == "gba":
                staleness.append(report.staleness_sum / max(1, report.batches))
                above += report.token_staleness_max > gba().tolerance
    values = {
        f"{name}_{length}": value for name, of in shares.items() for length, value in zip(PHASES, of, strict=True)
    }
    return [
        harness.Measure("modes.dropped", max(shares["gba"]), "of batches", 0.03, at_least=False, details=values),
        harness.Measure(
            "modes.staleness_runtime",
            statistics.mean(staleness),
            "steps",
            details={"above_tolerance_by_token": above},
        ),
    ]


def rates(preset: str) -> list[harness.Measure]:
    """Applied samples/s of every mode over Sync, under that trace with phases of 10 steps."""
    emulation = bench.Emulation(WORKERS, phases(10), COMPUTE_SECONDS[preset])
    sync = bench.run(Sync(), emulation, BATCHES[preset]).rate
    modes: list[tuple[str, Mode]] = [("gba", gba()), ("async", Async()), ("hop_bs", HopBs(2)), ("hop_bw", HopBw(2))]
    found = {name: bench.run(mode, emulation, BATCHES[preset]).rate / sync for name, mode in modes}
    return [harness.Measure(f"modes.rate_{name}", value, "x samples/s of Sync") for name, value in found.items()]


def switch_seconds(preset: str) -> harness.Measure:
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

    def work(member: object) -> list[float]:
        trainer = persia.Trainer(
            Large(),
            schema,
            optimizer=lambda p: torch.optim.Adam(p, 1e-3),
            embedding_optimizer=persia.optim.Adagrad(lr=0.05),
            mode=Sync(),
            cluster=member,
            options=persia.TrainerOptions(
                progress=False, mode_schedule=[(0, Sync()), (4, Gba(4 * 16)), (8, Sync()), (12, Gba(4 * 16))]
            ),
        )
        trainer.fit(data)
        return [switch.seconds for switch in trainer.switches]

    found = Threads(4).run(work)
    slowest = [max(seconds) for seconds in zip(*found, strict=True)]
    return harness.quantity("modes.switch_seconds", slowest, "s", 1.0, at_least=False, details={"parameters": size})


MEASURES: dict[str, harness.Function] = {
    "modes.gba_vs_sync_static": gba_vs_sync_static,
    "modes.dropped": dropped,
    "modes.rates": rates,
    "modes.switch_seconds": switch_seconds,
}

if __name__ == "__main__":
    harness.main(MEASURES)
