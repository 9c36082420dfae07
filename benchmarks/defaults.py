"""Defaults of rows: test AUC by Adagrad's initial accumulator and learning rate, and by first values.

    python -m benchmarks 'quality.adagrad.*' 'quality.first_values.*' [--preset smoke|laptop|full] [--json FILE]

quality.adagrad.sparse  Generated clicks with 100,000 Zipf(1.05) ids a feature: most rows are met a few times. DeepFM.
quality.adagrad.dense   The same with 500 ids a feature: every row is met often.
quality.adagrad.globo   The first two days of globo_ctr, tested on a random part of their rows. FFNN.
quality.adagrad.adult   PERSIA's example task; needs the data.

Each value is the test AUC with the default accumulator, at the better of its documented rates, less the best of all
accumulators and rates; `details` has all of them. Sync with one NN worker; one core. A laptop run, of one seed,
takes 7 minutes on an idle machine and 30 on a busy one; a full one has three seeds.

quality.first_values.*  On the same data: test AUC if rows begin uniform in +-1/sqrt(dim) less that with the default,
                        +-0.01, each at the better of the documented rates. Three seeds: 48 runs, 4 minutes on an
                        idle machine.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from msgspec import structs

from benchmarks import runner
from benchmarks.baselines import globo_torch
from benchmarks.public_data import is_here
from benchmarks.quality import AdultNet
from persia import Batch, Schema, Trainer, TrainerOptions, data
from persia.modes import Sync
from persia.nn.models import FFNN, DeepFM
from persia.optim import Adagrad
from persia.schema import INITIAL_ACCUMULATOR, Initializer, RsqrtDim, Uniform
from persia.trainer.progress import FitResult

ACCUMULATORS = {"smoke": (INITIAL_ACCUMULATOR, 1e-2), "laptop": (1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-2)}
RATES = {"smoke": (0.1,), "laptop": (0.05, 0.1, 0.2)}
DOCUMENTED = (0.05, 0.1)
SEEDS = {"smoke": (9,), "laptop": (9,), "full": (9, 10, 11)}
FIRST_VALUES: Mapping[str, Initializer] = {"uniform": Uniform(), "rsqrt_dim": RsqrtDim()}
FIRST_VALUES_SEEDS = {"smoke": (9,), "laptop": (9, 10, 11)}
BATCHES = {"smoke": 8}
"""Most batches of a set; all of them where the preset has no number."""
ROWS = 600_000
TEST_ROWS = 100_352

Auc = Mapping[tuple[float, float], float]
"""By accumulator and learning rate."""


class Task(NamedTuple):
    """Data with the network that is trained on them."""

    schema: Schema
    train: Iterable[Batch]
    test: Iterable[Batch]
    network: Callable[[Schema], torch.nn.Module]
    optimizer: Callable[[Iterator[torch.nn.Parameter]], torch.optim.Optimizer]


def adam(parameters: Iterator[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, 1e-3, fused=True)


def generated(ids_per_feature: int) -> Callable[[int], Task]:
    """Clicks with latent interactions; the test set is another epoch."""

    def task(seed: int) -> Task:
        train = data.synthetic(ROWS, ids_per_feature=ids_per_feature, seed=seed)
        test = data.synthetic(TEST_ROWS, ids_per_feature=ids_per_feature, seed=seed)
        return Task(train.schema, train, test.batches(epoch=1), DeepFM, adam)

    return task


def globo(seed: int) -> Task:
    def part(name: str) -> Iterable[Batch]:
        split = {"part": name, "by": "random"}
        return data.globo([str(file) for file in files], 1024, split=split, shuffle_rows=800_000, seed=seed)

    files = globo_torch.data_files(2)
    schema = data.globo([str(file) for file in files]).schema
    return Task(schema, part("train"), part("test"), lambda schema: FFNN(schema, hidden=(256, 128)), adam)


def adult(seed: int) -> Task:
    train = data.adult(split="train", batch_size=128, shuffle_rows=50_000, seed=seed)
    test = data.adult(split="test", batch_size=1024)
    return Task(train.schema, train, test, AdultNet, lambda parameters: torch.optim.SGD(parameters, 0.1))


def some(batches: Iterable[Batch], preset: str) -> list[Batch]:
    """Returns as many batches as the preset has."""
    return list(itertools.islice(batches, BATCHES.get(preset)))


def trained(seed: int, task: Task, optimizer: Adagrad, first_values: Initializer) -> FitResult:
    """Trains once over the data."""
    tables = [structs.replace(table, initializer=first_values) for table in task.schema.resolved_tables().values()]
    schema = structs.replace(task.schema, tables=tables)
    torch.manual_seed(seed)
    trainer = Trainer(
        task.network(schema),
        schema,
        optimizer=task.optimizer,
        embedding_optimizer=optimizer,
        mode=Sync(),
        options=TrainerOptions(seed=seed, device="cpu", progress=False),
    )
    torch.set_num_threads(1)
    return trainer.fit(task.train, task.test)


def test_auc(result: FitResult) -> float:
    """Returns the AUC on the test rows."""
    assert result.evaluation is not None
    return result.evaluation.auc


def grid(preset: str, seed: int, task: Task) -> tuple[Auc, Auc]:
    """Test and progressive AUC of all accumulators and rates, on the same batches from the same first values."""
    task = task._replace(train=some(task.train, preset), test=some(task.test, preset))
    tested, progressive = {}, {}
    for accumulator, lr in itertools.product(_of(ACCUMULATORS, preset), _of(RATES, preset)):
        result = trained(seed, task, Adagrad(lr=lr, initial_accumulator=accumulator), Uniform())
        tested[accumulator, lr] = test_auc(result)
        progressive[accumulator, lr] = result.progressive.auc
    return tested, progressive


def lost(auc: Auc) -> float:
    """AUC with the default accumulator, at the better of its documented rates, less the best of all."""
    default = [auc[INITIAL_ACCUMULATOR, lr] for lr in DOCUMENTED if (INITIAL_ACCUMULATOR, lr) in auc]
    return max(default) - max(auc.values())


def mean(results: Iterable[Auc]) -> Auc:
    """Means over seeds."""
    results = list(results)
    return {point: statistics.fmean(auc[point] for auc in results) for point in results[0]}


def missing(needs: str | None) -> bool:
    """Returns whether data are not here, and says so."""
    return needs is not None and not is_here(needs)


SETS: Mapping[str, tuple[Callable[[int], Task], str | None]] = {
    "sparse": (generated(100_000), None),
    "dense": (generated(500), None),
    "globo": (globo, "globo_ctr"),
    "adult": (adult, "adult"),
}
"""Data by name, and the directory that they need."""


def compare(preset: str, name: str) -> runner.Measure | None:
    """Returns the loss of AUC by the default accumulator, on the data of this name."""
    task, needs = SETS[name]
    if missing(needs):
        return None
    results = [grid(preset, seed, task(seed)) for seed in _of(SEEDS, preset)]
    tested, progressive = (mean(auc) for auc in zip(*results, strict=True))
    details = {
        "test": _table(tested),
        "progressive": _table(progressive),
        "per_seed": [round(lost(auc), 5) for auc, _ in results],
    }
    return runner.Measure(f"quality.adagrad.{name}", lost(tested), "AUC", details=details)


@runner.measures("quality.adagrad.sparse")
def sparse_rows(preset: str) -> runner.Measure | None:
    return compare(preset, "sparse")


@runner.measures("quality.adagrad.dense")
def dense_rows(preset: str) -> runner.Measure | None:
    return compare(preset, "dense")


@runner.measures("quality.adagrad.globo")
def globo_rows(preset: str) -> runner.Measure | None:
    return compare(preset, "globo")


@runner.measures("quality.adagrad.adult")
def adult_rows(preset: str) -> runner.Measure | None:
    return compare(preset, "adult")


@runner.measures(*(f"quality.first_values.{name}" for name in SETS))
def first_values(preset: str) -> Iterator[runner.Measure]:
    """Test AUC of `RsqrtDim` less the test AUC of the default, paired by seed."""
    for name, (make, needs) in list(SETS.items())[: 1 if preset == "smoke" else None]:
        if missing(needs):
            continue
        areas: dict[tuple[str, float], list[float]] = {}
        for seed in _of(FIRST_VALUES_SEEDS, preset):
            task = make(seed)
            task = task._replace(train=some(task.train, preset), test=some(task.test, preset))
            for kind, lr in itertools.product(FIRST_VALUES, DOCUMENTED):
                result = trained(seed, task, Adagrad(lr=lr), FIRST_VALUES[kind])
                areas.setdefault((kind, lr), []).append(test_auc(result))
        best = {kind: max(DOCUMENTED, key=lambda lr, kind=kind: sum(areas[kind, lr])) for kind in FIRST_VALUES}
        yield runner.paired(
            f"quality.first_values.{name}",
            areas["rsqrt_dim", best["rsqrt_dim"]],
            areas["uniform", best["uniform"]],
            "AUC",
            details={"rates": best, "areas": {f"{kind} {lr:g}": each for (kind, lr), each in areas.items()}},
        )


def _of(by_preset: Mapping[str, tuple], preset: str) -> tuple:
    return by_preset.get(preset, by_preset["laptop"])


def _table(auc: Auc) -> dict[str, dict[str, float]]:
    """By accumulator, then by learning rate."""
    rows: dict[str, dict[str, float]] = {}
    for (accumulator, lr), area in auc.items():
        rows.setdefault(f"{accumulator:g}", {})[f"{lr:g}"] = round(area, 4)
    return rows
