"""Statistical bars: does persia train as well as it should?

    python -m benchmarks 'quality.*' [--preset smoke|laptop|full] [--json FILE]

quality.hybrid, quality.hybrid_auto, quality.hybrid_cold
                   Hybrid(4), Hybrid("auto"), and Hybrid(4) without a warm-up, minus Sync, paired by seed: progressive
                   AUC on stationary synthetic data with one NN worker.
quality.workers_2, quality.workers_4 (and their _auto, _cold)
                   The same with 2 and 4 NN workers, processes on Ray, that share a global batch of the same size.
quality.replay     The runs without a warm-up above against "delayed Sync" in plain PyTorch with the delays that they
                   recorded: the two may differ by rounding only, so this tells whether the implementation is right. A
                   run whose rows were never stale, or never changed, makes this measure and the next one infinite.
quality.replay_parameters
                   Network and rows against delayed Sync after 100 steps: in one process, in threads and on Ray, with 1,
                   2 and 4 NN workers, with SGD, Adagrad and Adam on rows.
quality.optimum    How far DeepFM stays below the known best AUC where there are few ids.
quality.adult      Test AUC on PERSIA's example task; needs the data.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch

from benchmarks import runner
from benchmarks.cluster import ray_here
from benchmarks.modes_runs import everywhere
from benchmarks.public_data import is_here
from benchmarks.recorded import Outcome, Plan, make_trainer, train, train_smooth
from persia import Schema, Trainer, TrainerOptions, data
from persia.modes import Hybrid, Mode, Sync
from persia.nn import Embeddings
from persia.optim import SGD, Adagrad, Adam

SEEDS = {"smoke": 1, "laptop": 5, "full": 5}
ROWS = {"smoke": 20_480, "laptop": 3_000_000, "full": 3_000_000}
WORKERS_ROWS = {"smoke": 8_192, "laptop": 1_024_000, "full": 3_072_000}
"""Of the measures with several NN workers: a whole number of steps, 1,000 of preset `laptop`."""
BATCH, PARAMETERS_BATCH = 1024, 256
"""Rows of a global step, and of a batch in runs whose parameters are compared."""
STEPS = {"smoke": 10, "laptop": 100, "full": 100}
OPTIMIZER = Adagrad(lr=0.05)
ROW_OPTIMIZERS = (SGD(lr=5.0), OPTIMIZER, Adam(lr=0.005, eps=1e-6))
"""With an `eps` of 1e-8 Adam makes a step of gradients that are rounding errors: after 100 steps 3e-5 of difference."""
SYNC, COLD = "sync", "_cold"
MODES: dict[str, Mode] = {SYNC: Sync(), "": Hybrid(4), "_auto": Hybrid("auto"), COLD: Hybrid(4, warmup=0)}
KINDS = ("", "_auto", COLD)
PLACES: dict[str, tuple[tuple[Literal["embedded", "threads", "ray"], int], ...]] = {
    "smoke": (("embedded", 1), ("threads", 2)),
    "laptop": (("embedded", 1), ("threads", 2), ("threads", 4), ("ray", 1), ("ray", 2), ("ray", 4)),
}
"""Places of the runs that are compared with delayed Sync, and numbers of NN workers; smoke starts no processes."""
PLACES["full"] = PLACES["laptop"]


@runner.measures(*(f"quality.hybrid{kind}" for kind in KINDS))
def hybrid(preset: str) -> Iterator[runner.Measure]:
    """Hybrid against Sync with one NN worker."""
    yield from gaps("quality.hybrid", preset, 1)


def workers(preset: str, *, nn_workers: int) -> Iterator[runner.Measure]:
    """Hybrid against Sync with several NN workers."""
    yield from gaps(f"quality.workers_{nn_workers}", preset, nn_workers)


for _count in (2, 4):
    _names = (f"quality.workers_{_count}{kind}" for kind in KINDS)
    runner.measures(*_names)(functools.partial(workers, nn_workers=_count))


@runner.measures("quality.replay")
def replay(preset: str) -> runner.Measure:
    """The runs of the measures above without a warm-up against their replay: mean distance of AUC."""
    by_count = {count: runs(preset, count, COLD) for count in (1, 2, 4)}
    every = list(itertools.chain(*by_count.values()))
    mean = statistics.fmean(abs(run.auc_apart) for run in every)
    details: dict[str, Any] = {f"NN workers: {n}": [run.auc_apart for run in each] for n, each in by_count.items()}
    details |= least(every)
    return runner.Measure("quality.replay", if_it_tells(mean, every), "AUC", at_most=0.0003, details=details)


def if_it_tells(apart: float, compared: Sequence[Outcome]) -> float:
    """Returns a distance, or infinity if it tells nothing: a run had no stale row, or left all rows as they were."""
    return apart if all(run.staleness_max > 0 and run.moved > 0 for run in compared) else math.inf


def least(compared: Sequence[Outcome]) -> dict[str, float]:
    """Least staleness and change of rows of several runs, as details."""
    return {
        "least_staleness_max": min(run.staleness_max for run in compared),
        "least_moved": min(run.moved for run in compared),
    }


def gaps(name: str, preset: str, nn_workers: int) -> Iterator[runner.Measure]:
    """Progressive AUC of each kind of Hybrid minus the AUC of Sync."""
    sync = [run.auc for run in runs(preset, nn_workers, SYNC)]
    for kind in KINDS:
        late = runs(preset, nn_workers, kind)
        details = {
            "staleness_mean": [run.staleness_mean for run in late],
            "staleness_max": max(run.staleness_max for run in late),
        }
        target = None if kind == COLD else -0.001
        yield runner.paired(name + kind, [run.auc for run in late], sync, "AUC", at_least=target, details=details)


@functools.cache
def runs(preset: str, nn_workers: int, kind: str) -> list[Outcome]:
    """Runs of all seeds; those without a warm-up are recorded and replayed."""
    rows = (ROWS if nn_workers == 1 else WORKERS_ROWS)[preset]
    where: Any = "embedded" if nn_workers == 1 else "threads" if preset == "smoke" else "ray"
    batch, mode, recorded = BATCH // nn_workers, MODES[kind], kind == COLD
    plans = [Plan(where, nn_workers, mode, OPTIMIZER, seed, rows, batch, recorded) for seed in range(SEEDS[preset])]
    return outcomes(train, plans, preset)


def outcomes(function: Callable[[Plan], Outcome], plans: Sequence[Plan], preset: str) -> list[Outcome]:
    """Results of all runs. One at a time, as they use all cores; those on Ray share one Ray."""
    if all(plan.where != "ray" for plan in plans):
        return everywhere(function, plans, Outcome, processes=1)
    with ray_here(preset):
        return everywhere(function, plans, Outcome, processes=1)


@runner.measures("quality.replay_parameters")
def replay_parameters(preset: str) -> runner.Measure:
    """Largest difference of a parameter or a number of a row from delayed Sync."""
    plans = [
        Plan(
            where, count, Hybrid(4, warmup=0), optimizer, 0, STEPS[preset] * count * PARAMETERS_BATCH, PARAMETERS_BATCH
        )
        for where, count in PLACES[preset]
        for optimizer in ROW_OPTIMIZERS
    ]
    runs = outcomes(train_smooth, plans, preset)
    details: dict[str, Any] = {
        f"{plan.where} {plan.nn_workers} {type(plan.optimizer).__name__}": run._asdict()
        for plan, run in zip(plans, runs, strict=True)
    }
    worst = if_it_tells(max(max(run.network_apart, run.rows_apart) for run in runs), runs)
    details |= least(runs)
    return runner.Measure("quality.replay_parameters", worst, "norm", at_most=1e-5, details=details)


@runner.measures("quality.optimum")
def optimum(preset: str) -> runner.Measure:
    """DeepFM's AUC minus the best on rows that it was not trained on."""
    rows = {"smoke": 20_000, "laptop": 2_000_000, "full": 3_000_000}[preset]
    test_rows = min(rows, 500_000)
    reader = data.synthetic(rows, ids_per_feature=100, batch_size=BATCH)
    trainer = make_trainer(reader.schema, Hybrid(4, warmup=0), OPTIMIZER, 0)
    trainer.fit(reader)
    test = data.synthetic(rows, ids_per_feature=100, batch_size=BATCH)
    batches = [b for b, _ in zip(test.batches(epoch=1), range(test_rows // BATCH), strict=False)]
    reached = trainer.evaluate(batches).auc
    best = test.best_auc(test_rows // BATCH * BATCH, epoch=1)
    details = {"best": best, "reached": reached, "rows": rows}
    return runner.Measure("quality.optimum", reached - best, "AUC", at_least=-0.01, details=details)


class AdultNet(torch.nn.Module):
    """PERSIA's example network: numbers to 16 and embeddings to 128, each batch-normalised, then 256-128-1."""

    def __init__(self, schema: Schema) -> None:
        super().__init__()
        norm, linear = torch.nn.BatchNorm1d, torch.nn.Linear
        slots = sum(feature.dim or 0 for feature in schema.id_features)
        self.numbers = torch.nn.Sequential(linear(schema.dense_width, 16), norm(16), torch.nn.ReLU())
        self.slots = torch.nn.Sequential(linear(slots, 128), norm(128), torch.nn.ReLU())
        self.top = torch.nn.Sequential(
            linear(144, 256), norm(256), torch.nn.ReLU(), linear(256, 128), norm(128), torch.nn.ReLU(), linear(128, 1)
        )

    def forward(self, dense: torch.Tensor, embeddings: Embeddings) -> torch.Tensor:
        """Logits `[batch, 1]`."""
        ids = torch.cat(list(embeddings.values()), dim=1)
        logits: torch.Tensor = self.top(torch.cat([self.numbers(dense), self.slots(ids)], dim=1))
        return logits


@runner.measures("quality.adult")
def adult(preset: str) -> runner.Measure | None:
    """Test AUC after one pass, batch 128, SGD 0.1 and Adagrad 0.05; mean of three seeds."""
    if not is_here("adult"):
        return None
    areas = []
    for seed in range(1 if preset == "smoke" else 3):
        train = data.adult(split="train", batch_size=128, shuffle_rows=50_000, seed=seed)
        torch.manual_seed(seed)
        trainer = Trainer(
            AdultNet(train.schema),
            train.schema,
            optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
            embedding_optimizer=OPTIMIZER,
            mode=Sync(),
            options=TrainerOptions(seed=seed, device="cpu", progress=False),
        )
        result = trainer.fit(train, data.adult(split="test", batch_size=1024))
        assert result.evaluation is not None
        areas.append(result.evaluation.auc)
    return runner.Measure("quality.adult", statistics.fmean(areas), "AUC", at_least=0.885, details={"per_seed": areas})
