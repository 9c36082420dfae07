"""Statistical bars: does persia train as well as it should?

    python -m benchmarks 'quality.*' [--preset smoke|laptop|full] [--json FILE]

quality.replay   Hybrid(4) on stationary synthetic data against a plain-PyTorch replay of the delays it recorded: the
                 two may differ by rounding only, so this tells whether the implementation is right.
quality.hybrid   Hybrid(4) minus Sync on the same data, paired by seed.
quality.workers_2, quality.workers_4
                 Hybrid(4) with 2 and 4 NN workers in processes, against a replay of the steps that each lookup at
                 the PS had seen; `gap to Sync` is that to as many NN workers in Sync.
quality.optimum  How far DeepFM stays below the known best AUC where there are few ids.
quality.adult    Test AUC on PERSIA's example task; needs the data.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator

import numpy as np
import torch

from benchmarks import recorded, runner
from benchmarks.baselines.delayed_torch import replay, replay_workers
from persia import Batch, Schema, Trainer, TrainerOptions, data
from persia.modes import Hybrid, Mode, Sync
from persia.nn import Embeddings
from persia.nn.models import DeepFM
from persia.optim import Adagrad
from persia.services import Cluster

SEEDS = {"smoke": 1, "laptop": 5, "full": 5}
ROWS = {"smoke": 20_000, "laptop": 3_000_000, "full": 3_000_000}
WORKERS_ROWS = {"smoke": 20_480, "laptop": 1_024_000, "full": 3_072_000}
"""Of the measures with several NN workers: a whole number of steps."""
BATCH = 1024
OPTIMIZER = Adagrad(lr=0.05)


def stationary(rows: int, seed: int) -> tuple[Schema, list[Batch]]:
    """12 features of 100,000 Zipf(1.05) ids with latent pair interactions."""
    reader = data.synthetic(rows, pairs=12, latent_dim=4, seed=seed, batch_size=BATCH)
    return reader.schema, list(reader)


def make_trainer(schema: Schema, mode: Mode, seed: int, cluster: Cluster | None, options: TrainerOptions) -> Trainer:
    torch.manual_seed(seed)
    return Trainer(
        DeepFM(schema),
        schema,
        optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-3, fused=True),
        embedding_optimizer=OPTIMIZER,
        mode=mode,
        cluster=cluster,
        options=options,
    )


def trainer_for(schema: Schema, mode: Mode, seed: int) -> Trainer:
    return make_trainer(schema, mode, seed, None, TrainerOptions(seed=seed, progress=False))


def first_rows(schema: Schema, seed: int):
    """The value that each id's row begins with."""
    fresh = trainer_for(schema, Sync(), seed).embeddings.connection.servers[0]

    def initial(table: str, ids: np.ndarray) -> np.ndarray:
        return fresh.lookup({table: np.ascontiguousarray(ids)}, train=True)[table].copy()

    return initial


@runner.measures("quality.replay", "quality.hybrid")
def hybrid(preset: str) -> Iterator[runner.Measure]:
    """Hybrid(4) against its replay, and against Sync."""
    apart, gaps, staleness = [], [], []
    for seed in range(SEEDS[preset]):
        schema, batches = stationary(ROWS[preset], seed)
        trainer = trainer_for(schema, Hybrid(4), seed)
        trainer.embeddings.gate.versions = versions = []
        result = trainer.fit(batches)
        staleness.append(result.staleness_mean)
        again = replay(
            batches,
            schema,
            seed,
            versions,
            initial_rows=first_rows(schema, seed),
            initial_accumulator=OPTIMIZER.initial_accumulator,
        )
        sync = trainer_for(schema, Sync(), seed).fit(batches)
        apart.append(result.progressive.auc - again.auc)
        gaps.append(result.progressive.auc - sync.progressive.auc)
    details = {"per_seed": apart, "staleness": staleness}
    mean = statistics.fmean(apart)
    yield runner.Measure("quality.replay", mean, "AUC", **runner.within(0.0003), details=details)
    yield runner.Measure("quality.hybrid", statistics.fmean(gaps), "AUC", details={"per_seed": gaps})


@runner.measures("quality.workers_2", "quality.workers_4")
def workers(preset: str) -> Iterator[runner.Measure]:
    """Hybrid(4) with several NN workers, against the replay of what their PS recorded."""
    for nn_workers in (2, 4):
        apart, gaps, means, most = [], [], [], 0
        for seed in range(SEEDS[preset]):
            schema, batches = stationary(WORKERS_ROWS[preset], seed)
            run = recorded.train(schema, batches, nn_workers, Hybrid(4), OPTIMIZER, seed, make_trainer)
            again = replay_workers(
                batches,
                schema,
                seed,
                run.versions,
                nn_workers,
                first_rows(schema, seed),
                initial_accumulator=OPTIMIZER.initial_accumulator,
            )
            sync = recorded.train(schema, batches, nn_workers, Sync(), OPTIMIZER, seed, make_trainer, record=False)
            apart.append(run.result.progressive.auc - again)
            gaps.append(run.result.progressive.auc - sync.result.progressive.auc)
            means.append(run.result.staleness_mean)
            most = max(most, run.result.staleness_max)
        yield runner.Measure(
            f"quality.workers_{nn_workers}",
            statistics.fmean(apart),
            "AUC",
            **runner.within(0.0003),
            details={
                "per_seed": apart,
                "gap to Sync": statistics.fmean(gaps),
                "gap per_seed": gaps,
                "staleness_mean": means,
                "staleness_max": most,
            },
        )


@runner.measures("quality.optimum")
def optimum(preset: str) -> runner.Measure:
    """DeepFM's AUC minus the best on rows that it was not trained on."""
    rows = {"smoke": 20_000, "laptop": 2_000_000, "full": 3_000_000}[preset]
    test_rows = min(rows, 500_000)
    reader = data.synthetic(rows, ids_per_feature=100, batch_size=BATCH)
    trainer = trainer_for(reader.schema, Hybrid(4), 0)
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
        self.numbers = torch.nn.Sequential(linear(len(schema.dense_features), 16), norm(16), torch.nn.ReLU())
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
    if data.find("adult") is None:
        print("adult is not here; set PERSIA_DATA to the directory that holds it.", file=sys.stderr)
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
            options=TrainerOptions(seed=seed, progress=False),
        )
        result = trainer.fit(train, data.adult(split="test", batch_size=1024))
        assert result.evaluation is not None
        areas.append(result.evaluation.auc)
    return runner.Measure("quality.adult", statistics.fmean(areas), "AUC", at_least=0.885, details={"per_seed": areas})
