"""A run of persia whose lookups are on record, and the same training in plain PyTorch.

The run is the product's own: in one process, in threads, or on Ray. With `TrainerOptions.record_dir` the PS writes down
how many steps the rows of each batch contain; `baselines.delayed_torch.delayed_sync` then trains with such rows.
"""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch

from benchmarks.baselines.delayed_torch import delayed_sync
from persia import Batch, Schema, Trainer, TrainerOptions, data
from persia.cluster import Ray, RayOptions
from persia.data import Synthetic
from persia.modes import Mode, Sync
from persia.nn import Embeddings
from persia.nn.models import DeepFM
from persia.optim import Adagrad
from persia.replay import load_timeline
from persia.schema import EmbeddingOptimizer
from persia.services import Cluster
from persia.testing import Threads
from persia.trainer.progress import FitResult

__all__ = ["Outcome", "Plan", "make_trainer", "train", "train_smooth"]

Network = Callable[[Schema], torch.nn.Module]

SEEDING = threading.Lock()
"""NN workers that are threads share torch's random generator."""


class Plan(NamedTuple):
    """One run.

    Attributes:
        where: "embedded", with one NN worker in this process; "threads" of this process; or "ray", processes.
        nn_workers: number of NN workers.
        mode: the mode.
        optimizer: of the rows.
        seed: of data, rows and network.
        rows: of the data.
        batch: rows of a batch.
        replayed: whether the run is recorded, and repeated in plain PyTorch.
    """

    where: Literal["embedded", "threads", "ray"]
    nn_workers: int
    mode: Mode
    optimizer: EmbeddingOptimizer
    seed: int
    rows: int
    batch: int
    replayed: bool = True


class Outcome(NamedTuple):
    """A run, compared with its replay if there was one.

    Attributes:
        auc: progressive.
        staleness_mean: number of steps that rows lacked.
        staleness_max: its maximum.
        auc_apart: progressive AUC minus the progressive AUC of the replay.
        network_apart: largest difference of a parameter of the network after training.
        rows_apart: largest difference of a number of a row after training.
        moved: largest change of a number of a row by training.
    """

    auc: float
    staleness_mean: float
    staleness_max: int
    auc_apart: float = 0.0
    network_apart: float = 0.0
    rows_apart: float = 0.0
    moved: float = 0.0


class Smooth(torch.nn.Module):
    """A network in which a rounding error stays one.

    With ReLU it switches a unit on whose input is near 0, and Adam makes whole steps of the first gradient of a unit
    that was never on.
    """

    def __init__(self, schema: Schema) -> None:
        super().__init__()
        width = sum(feature.dim or 0 for feature in schema.id_features)
        self.layers = torch.nn.Sequential(torch.nn.Linear(width, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))

    def forward(self, dense: torch.Tensor, embeddings: Embeddings) -> torch.Tensor:
        """Returns logits `[batch, 1]`."""
        logits: torch.Tensor = self.layers(torch.cat(list(embeddings.values()), 1))
        return logits


def stationary(rows: int, seed: int, batch: int) -> Synthetic:
    """12 features of 100,000 Zipf(1.05) ids with latent pair interactions."""
    return data.synthetic(rows, pairs=12, latent_dim=4, seed=seed, batch_size=batch)


def make_trainer(
    schema: Schema,
    mode: Mode,
    optimizer: EmbeddingOptimizer,
    seed: int,
    cluster: Cluster | None = None,
    record_dir: str | None = None,
    network: Network = DeepFM,
) -> Trainer:
    """Makes a trainer, with Adam 1e-3 for the network."""
    with SEEDING:
        torch.manual_seed(seed)
        model = network(schema)
    return Trainer(
        model,
        schema,
        optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-3, fused=True),
        embedding_optimizer=optimizer,
        mode=mode,
        cluster=cluster,
        options=TrainerOptions(seed=seed, device="cpu", progress=False, record_dir=record_dir),
    )


def train_smooth(plan: Plan) -> Outcome:
    """Trains `Smooth` in place of DeepFM."""
    return train(plan, Smooth)


def train(plan: Plan, network: Network = DeepFM) -> Outcome:
    """Trains once over the data, and again in plain PyTorch if the plan says so."""
    reader = stationary(plan.rows, plan.seed, plan.batch)
    batches = list(reader)
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:

        def fit(cluster: Cluster | None, source: Iterable[Batch]) -> tuple[Trainer, FitResult]:
            record_dir = directory if plan.replayed else None
            trainer = make_trainer(reader.schema, plan.mode, plan.optimizer, plan.seed, cluster, record_dir, network)
            return trainer, trainer.fit(source)

        if plan.where == "ray":
            cluster = Ray(nn_workers=plan.nn_workers, options=RayOptions(threads=1))
            trainer, result = fit(stack.enter_context(cluster), reader)
        elif plan.where == "threads":
            trainer, result = Threads(plan.nn_workers).run(lambda member: fit(member, batches))[0]
        else:
            trainer, result = fit(None, batches)
        outcome = Outcome(result.progressive.auc, result.staleness_mean, result.staleness_max)
        return _compared(plan, network, outcome, trainer, batches, _versions(directory)) if plan.replayed else outcome


def _versions(directory: str) -> list[int]:
    """Returns the number of steps that the rows of each batch contain."""
    read: dict[int, int] = {}
    for phase in Path(directory).glob("phase-*.jsonl"):
        read |= {event.batch: event.version for event in load_timeline(phase).events if event.kind == "lookup"}
    return [read[number] for number in range(len(read))]


def _compared(
    plan: Plan, network: Network, outcome: Outcome, trainer: Trainer, batches: Sequence[Batch], versions: Sequence[int]
) -> Outcome:
    schema = trainer.schema
    fresh = make_trainer(schema, Sync(), Adagrad(lr=0.05), plan.seed).embeddings.connection.servers[0]

    def initial(table: str, ids: np.ndarray) -> np.ndarray:
        return fresh.lookup({table: np.ascontiguousarray(ids)}, train=True)[table].copy()

    torch.set_num_threads(1)
    again = delayed_sync(
        batches,
        schema,
        plan.seed,
        versions,
        plan.nn_workers,
        initial,
        network=network,
        embedding_optimizer=plan.optimizer,
    )
    pairs = zip(trainer.model.parameters(), again.network.parameters(), strict=True)
    parameters = [float((trained - theirs).detach().abs().max()) for trained, theirs in pairs]
    rows, moved = [], []
    for table, ids in again.tables.ids.items():
        trained = trainer.embeddings.rows(table, ids).values
        theirs = again.tables.rows[again.tables.positions(table, ids)].numpy()
        rows.append(float(np.abs(trained - theirs).max()))
        moved.append(float(np.abs(trained - initial(table, ids)).max()))
    return outcome._replace(
        auc_apart=outcome.auc - again.auc, network_apart=max(parameters), rows_apart=max(rows), moved=max(moved)
    )
