"""Runs on real roles for benchmarks/paper_figures.py: emulated computation, emulated or shaped networks.

    ip netns exec NAME python -m benchmarks.paper_figures_runs PLAN

trains on Ray along a `SpeedPlan` in JSON, and prints `Speeds` in JSON: a process has to start in a network namespace.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

import msgspec
import torch

from persia import Batch, Schema, Trainer, TrainerOptions, data
from persia.cluster import Ray, RayOptions
from persia.modes import Async, Hybrid, Mode, Sync
from persia.nn import Embeddings
from persia.nn.models import DeepFM
from persia.optim import Adagrad
from persia.services import Cluster
from persia.testing import Threads

__all__ = ["MODES", "Curve", "CurvePlan", "SpeedPlan", "Speeds", "distant_rate", "learn", "rates"]

MODES: dict[str, Mode] = {"sync": Sync(), "hybrid": Hybrid("auto", warmup=0), "async": Async()}
SEEDING = threading.Lock()
"""NN workers that are threads share torch's random generator."""


class CurvePlan(NamedTuple):
    """One run of Figure 6.

    Attributes:
        kind: of `MODES`.
        seed: of data, rows and network.
        nn_workers: threads.
        local: rows of a batch.
        pieces: number of points of the curve.
        rows: between two points.
        test_rows: on which AUC is measured.
        compute: seconds that a batch takes, on average.
        jitter: standard deviation of the logarithm of this time.
        network: seconds that a lookup takes, and a push.
        lr: of the rows.
        network_lr: of the network.
    """

    kind: str
    seed: int
    nn_workers: int
    local: int
    pieces: int
    rows: int
    test_rows: int
    compute: float
    jitter: float
    network: float
    lr: float
    network_lr: float


class Curve(NamedTuple):
    """Test AUC by seconds of training; and steps by which rows were behind, on average."""

    seconds: list[float]
    auc: list[float]
    staleness: float


class SpeedPlan(NamedTuple):
    """One run of Figure 9.

    Attributes:
        gbit: rate of the link that all processes share, in Gbit/s; None for no namespace.
        nn_workers: processes; threads where `ray` is False.
        local: rows of a batch.
        steps: global steps of a round.
        rounds: of each mode, in alternation.
        compute: seconds that a batch takes, on average.
        jitter: standard deviation of the logarithm of this time.
        ray: whether roles are processes.
    """

    gbit: float | None
    nn_workers: int
    local: int
    steps: int
    rounds: int
    compute: float
    jitter: float
    ray: bool


class Speeds(NamedTuple):
    """Samples per second of each round, by mode; the dense parameters' bytes; steps by which rows were behind."""

    rates: dict[str, list[float]]
    dense_bytes: int


class Paced(torch.nn.Module):
    """DeepFM, for which a training batch takes as long as for a large network.

    Args:
        schema: input of the network.
        compute: seconds that a batch takes, on average.
        jitter: standard deviation of the logarithm of this time.
    """

    def __init__(self, schema: Schema, compute: float, jitter: float) -> None:
        super().__init__()
        self.net = DeepFM(schema, hidden=(128, 64))
        self._compute, self._jitter = compute, jitter

    def forward(self, dense: torch.Tensor, embeddings: Embeddings) -> torch.Tensor:
        """Waits, then returns logits `[batch, 1]`."""
        if self.training:
            time.sleep(self._compute * random.lognormvariate(-(self._jitter**2) / 2, self._jitter))
        logits: torch.Tensor = self.net(dense, embeddings)
        return logits


class Distant:
    """An embedding worker behind a network; evaluation passes it at once.

    Args:
        worker: the embedding worker.
        seconds: that a lookup takes longer, and a push; a refresh as much as its share of the rows.
    """

    def __init__(self, worker: Any, seconds: float) -> None:
        self._worker, self._seconds = worker, seconds
        self._rows = 1
        """Of the last lookup."""

    def lookup(self, batch_id: int, train: bool = True, pool: bool = False) -> Any:
        """Looks up rows."""
        time.sleep(self._seconds if train else 0.0)
        return self._worker.lookup(batch_id, train, pool)

    def lookup_ahead(self, batch_id: int, pool: bool = False, recent: int = 0) -> Any:
        """Looks up rows ahead of their use."""
        time.sleep(self._seconds)
        found = self._worker.lookup_ahead(batch_id, pool, recent)
        self._rows = max(1, sum((found.left_out or found.rows).counts))
        return found

    def refresh(self, batch_id: int, seen: Any, left_out: Any = None) -> Any:
        """Reads the rows that have changed."""
        fresh = self._worker.refresh(batch_id, seen, left_out)
        time.sleep(self._seconds * sum(fresh.rows.counts) / self._rows)
        return fresh

    def push(self, header: Any, contributions: Any) -> Any:
        """Pushes gradients."""
        time.sleep(self._seconds)
        return self._worker.push(header, contributions)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)


class DistantCluster:
    """A cluster whose embedding workers are behind a network."""

    def __init__(self, cluster: Any, seconds: float) -> None:
        self._cluster, self._seconds = cluster, seconds

    def connect(self, *arguments: Any) -> Any:
        """Connects an NN worker."""
        connection = self._cluster.connect(*arguments)
        return connection._replace(worker=Distant(connection.worker, self._seconds))


def _trainer(
    schema: Schema, mode: Mode, plan: CurvePlan | SpeedPlan, cluster: Cluster, seed: int, lr: float, network_lr: float
) -> Trainer:
    with SEEDING:
        torch.manual_seed(seed)
        model = Paced(schema, plan.compute, plan.jitter)
    return Trainer(
        model,
        schema,
        optimizer=lambda parameters: torch.optim.Adam(parameters, network_lr),
        embedding_optimizer=Adagrad(lr=lr),
        mode=mode,
        cluster=cluster,
        options=TrainerOptions(seed=seed, device="cpu", progress=False),
    )


def learn(plan: CurvePlan) -> Curve:
    """Trains piece by piece, and evaluates in between; the clock stops meanwhile."""
    reader = data.synthetic(
        plan.rows * plan.pieces, id_features=8, pairs=8, latent_dim=2, dim=8, seed=plan.seed, batch_size=plan.local
    )
    batches = list(reader)
    step = plan.rows // plan.local
    pieces = [batches[at : at + step] for at in range(0, len(batches), step)]
    test = [Batch.concat(list(islice(reader.batches(1), plan.test_rows // plan.local)))]

    def work(member: Any) -> Curve:
        cluster = DistantCluster(member, plan.network)
        trainer = _trainer(reader.schema, MODES[plan.kind], plan, cluster, plan.seed, plan.lr, plan.network_lr)
        curve = Curve([], [], 0.0)
        for piece in pieces:
            began = time.perf_counter()
            result = trainer.fit(piece)
            curve.seconds.append((curve.seconds[-1] if curve.seconds else 0.0) + time.perf_counter() - began)
            curve.auc.append(trainer.evaluate(test).auc)
        report = result.asynchronous
        return curve._replace(staleness=report.staleness_mean if report is not None else result.staleness_mean)

    return Threads(plan.nn_workers).run(work)[0]


def distant_rate(mode: Mode, plan: SpeedPlan, network: float) -> float:
    """Returns the rows/s of a mode, on threads; a lookup and a push take `network` seconds."""
    reader = data.synthetic(plan.steps * plan.nn_workers * plan.local, id_features=8, dim=16, batch_size=plan.local)

    def work(member: Any) -> float:
        cluster = DistantCluster(member, network)
        return _trainer(reader.schema, mode, plan, cluster, 0, 0.05, 1e-3).fit(reader).rows_per_second

    return Threads(plan.nn_workers).run(work)[0]


def rates(plan: SpeedPlan) -> Speeds:
    """Trains in each mode in turn, switching between calls of `fit`."""
    steps = plan.steps * plan.nn_workers
    reader = data.synthetic(steps * plan.local, id_features=8, dim=16, batch_size=plan.local)
    if plan.ray:
        with Ray(nn_workers=plan.nn_workers, options=RayOptions(threads=1)) as cluster:
            return _rates(plan, reader, cluster)
    return Threads(plan.nn_workers).run(lambda member: _rates(plan, reader, member))[0]


def _rates(plan: SpeedPlan, reader: data.Synthetic, cluster: Any) -> Speeds:
    trainer = _trainer(reader.schema, MODES["sync"], plan, cluster, 0, 0.05, 1e-3)
    speeds: dict[str, list[float]] = {kind: [] for kind in MODES}
    for number in range(plan.rounds + 1):
        for kind, mode in MODES.items():
            if getattr(cluster, "rank", 0) == 0:
                trainer.switch(mode)
            result = trainer.fit(reader, again=True)
            if number:  # The first one warms up.
                speeds[kind].append(result.rows_per_second)
    return Speeds(speeds, sum(p.nbytes for p in trainer.model.parameters()))


def main(arguments: Sequence[str]) -> None:
    """Runs one plan on a separate Ray, which a namespace without other addresses can run."""
    import ray

    plan = msgspec.json.decode(arguments[0], type=SpeedPlan)
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_raylet_start_wait_time_s": "120"}
    ray.init(address="local", include_dashboard=False, logging_level="error", _node_ip_address="127.0.0.1")
    try:
        measured = rates(plan)
    finally:
        ray.shutdown()
    sys.stdout.write(msgspec.json.encode(measured).decode() + "\n")


if __name__ == "__main__":
    from benchmarks.paper_figures_runs import main as imported  # Its classes have this name in other processes too.

    imported(sys.argv[1:])
