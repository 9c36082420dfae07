"""On Ray, while it trains: staleness stays within its bound, and processes come and go without loss."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from typing import Any

import pytest
import torch

import persia
from persia.modes import Hybrid, Sync

pytest.importorskip("ray", reason='Ray is not installed: pip install "persia-recsys[ray]"')

from persia.cluster.ray import roles as on_ray
from support.cluster_samples import NumberedBatches, delayed_host, eventually, killing, options, pids, reader

pytestmark = pytest.mark.usefixtures("ray_here")


def versions(cluster: Any, mode: Any, batches: int) -> list[int]:
    """By batch of this NN worker: how many of its own steps were applied when its rows were looked up."""
    rank, count = torch.distributed.get_rank(), torch.distributed.get_world_size()
    late = random.Random(rank)
    torch.set_num_threads(1)
    data = reader(batches)
    embeddings = persia.nn.EmbeddingCollection(
        data.schema, optimizer=persia.optim.SGD(lr=0.1), mode=mode, cluster=cluster
    )
    embeddings.gate.versions = found = []
    for batch in embeddings.prefetch(embeddings.registered()):
        time.sleep(late.random() * 0.02)
        sum(e.sum() for e in embeddings(batch).values()).backward()
    assert len(found) == len(range(rank, batches, count))
    assert embeddings.staleness.max == max(number - version for number, version in enumerate(found))
    return found


@pytest.mark.parametrize(
    ("mode", "nn_workers"),
    [pytest.param(Hybrid(2, warmup=0), 2, id="hybrid"), pytest.param(Sync(), 2, id="sync", marks=pytest.mark.slow)],
)
def test_staleness_keeps_its_bound_whoever_is_late(mode, nn_workers, monkeypatch):
    """Every role answers late, by random times. Own steps: recorded at the gate; of all NN workers: at the PSs."""
    for name in ("EmbeddingServerHost", "EmbeddingWorkerHost", "DataLoaderHost"):
        monkeypatch.setattr(on_ray, name, delayed_host(getattr(on_ray, name), seed=len(name)))
    bound = mode.initial_depth()
    with persia.cluster.Ray(2, 2, 2, nn_workers, options()) as cluster:
        cluster.feed(reader(120))
        found = cluster.run(lambda: versions(cluster, mode, 120))

        def reported() -> list[float]:
            return [c.get("behind", 0.0) for name, c in cluster.statistics().items() if "embedding_ps" in name]

        eventually(lambda: max(reported()) > 0, "a PS reports")
        behind = reported()
    for of_one in found:
        staleness = [number - version for number, version in enumerate(of_one)]
        assert max(staleness) == bound  # Reached, and never more.
        assert min(staleness) >= 0
    assert len(behind) == 2
    assert 0 < max(behind) <= nn_workers * (max(bound, mode.lookahead) + 1) - 1  # Their rows are refreshed then.


def train_each_once(cluster: Any) -> int:
    """Adds exactly 1 to `update_count` of the row of each sample's id."""
    torch.set_num_threads(1)
    embeddings = persia.nn.EmbeddingCollection(
        NumberedBatches.schema, optimizer=persia.optim.SGD(lr=0.1), mode=Hybrid(3, warmup=0), cluster=cluster
    )
    for batch in embeddings.prefetch(embeddings.registered()):
        time.sleep(0.01)
        embeddings(batch)["id"].sum().backward()
    return embeddings.pushed.lost_batches + embeddings.pushed.lost_gradients


def update_counts(cluster: Any) -> Counter[int]:
    """Of all rows, by id."""
    connection = cluster.connect(NumberedBatches.schema, persia.optim.SGD(lr=0.1), Hybrid(3, warmup=0), 0)
    updates: Counter[int] = Counter()
    for server in connection.servers:
        for chunk in server.export_rows():
            for row, count in zip(chunk.arrays["ids"], chunk.arrays["update_count"], strict=True):
                updates[int(row)] += int(count)
    return updates


@pytest.mark.slow
@pytest.mark.parametrize("role", ["data_loader", "embedding_worker"])
def test_losses_of_a_dead_process_count_and_none_apply_twice(role):
    """A data loader goes on where it was. With an embedding worker go the batches that it had."""
    batches = 800
    with persia.cluster.Ray(2, 1, 1, 2, options()) as cluster:
        with killing(cluster, role) as gated:
            cluster.feed(gated(NumberedBatches(batches)))
            lost = sum(cluster.run(lambda: train_each_once(cluster)))
        updates = +update_counts(cluster)  # A row that was looked up, and whose gradient is lost, has none.
    missing = batches * NumberedBatches.rows - len(updates)
    assert set(updates.values()) == {1}
    assert missing <= lost * NumberedBatches.rows
    assert lost == 0 if role == "data_loader" else lost > 0


@pytest.mark.slow
def test_no_row_is_lost_or_repeated_while_processes_come_and_go():
    batches = 3000
    with persia.cluster.Ray(2, 1, 1, 2, options()) as cluster:
        cluster.feed(NumberedBatches(batches))
        outcome: list[Any] = []
        running = threading.Thread(target=lambda: outcome.extend(cluster.run(lambda: train_each_once(cluster))))
        running.start()
        for embedding_workers, data_loaders in ((3, 2), (1, 3), (2, 1)):
            eventually(lambda: cluster._roles.service is not None, "the roles are there")
            cluster.scale(embedding_workers, data_loaders)
            assert running.is_alive(), "Give it more batches: it has ended before it was resized."
            assert len(pids(cluster, "embedding_worker")) == embedding_workers
            assert len(pids(cluster, "data_loader")) == data_loaders
        running.join(120)
        assert outcome == [0, 0]
        updates = update_counts(cluster)
    ids = batches * NumberedBatches.rows
    assert len(updates) == ids
    assert set(updates) == set(range(ids))
    assert set(updates.values()) == {1}
