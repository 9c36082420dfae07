"""Training on a stream on Ray: each message once, beyond what is counted, whichever process dies."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

import persia
from persia.modes import Gba, Hybrid, Sync

pytest.importorskip("ray", reason='Ray is not installed: pip install "persia-recsys[ray]"')

from support.cluster_samples import eventually, options, pids, signal_process
from support.kafka import SCHEMA, Kafka, clicks

pytestmark = pytest.mark.usefixtures("ray_here")

PARTITIONS = 3
"""Of four; the last one is idle."""


def trainer(cluster, mode, **changes):
    torch.manual_seed(0)
    return persia.Trainer(
        persia.nn.models.DeepFM(SCHEMA, hidden=(8,)),
        SCHEMA,
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
        embedding_optimizer=persia.optim.Adagrad(lr=0.1),
        mode=mode,
        cluster=cluster,
        options=persia.TrainerOptions(progress=False, timeout=60.0, **changes),
    )


def written(kafka, first, count):
    """Writes messages, each with an id of its own."""
    for partition in range(PARTITIONS):
        kafka.write(clicks(range(first + partition * count, first + (partition + 1) * count)), partition)
    return PARTITIONS * count


def times_trained(one, messages):
    """Returns how often each message was trained, by the updates of its row."""
    rows = one.embeddings.rows("item", one.embeddings.row_ids("item", np.arange(messages)), state=True)
    return rows.state.update_count


def kill(cluster, role):
    """SIGKILL for one process of a role, once rows are looked up."""

    def calls():
        return sum(c.get("rpc.calls", 0.0) for n, c in cluster.statistics().items() if n.startswith("embedding_ps"))

    eventually(lambda: bool(pids(cluster, role)), "it starts", 60.0)
    before = calls()
    eventually(lambda: calls() > before + 40, "it trains", 60.0)
    signal_process(cluster, role)


@pytest.mark.parametrize(
    ("mode", "role"),
    [
        pytest.param(Hybrid(2, warmup=0), "data_loader", id="hybrid, data loader", marks=pytest.mark.slow),
        pytest.param(Gba(40), "data_loader", id="gba, data loader", marks=pytest.mark.slow),
        pytest.param(Sync(), "nn_worker", id="sync, NN worker", marks=pytest.mark.slow),
        pytest.param(Gba(40), "nn_worker", id="gba, NN worker", marks=pytest.mark.slow),
        pytest.param(Sync(), "embedding_worker", id="sync, embedding worker", marks=pytest.mark.slow),
        pytest.param(Sync(), "embedding_ps", id="sync, embedding PS", marks=pytest.mark.slow),
        pytest.param(Sync(), "coordinator", id="sync, coordinator", marks=pytest.mark.slow),
    ],
)
def test_messages_are_trained_once_beyond_what_is_counted(mode, role, tmp_path):
    kafka = Kafka()
    count = 2000
    total = written(kafka, 0, count)
    with persia.cluster.Ray(1, 2, 2, 2, options(regions=str(tmp_path))) as cluster:
        one = trainer(cluster, mode, recovery_point_every_seconds=0.5)
        killer = threading.Thread(target=kill, args=(cluster, role))
        killer.start()
        result = one.fit(kafka.reader(20))
        killer.join(60)
        assert not killer.is_alive()
        assert one.state.offsets == {kafka.topic: {0: count, 1: count, 2: count, 3: 0}}
        times = times_trained(one, total)
        lost = (result.lost_batches + result.lost_gradients) * 20
        if role == "nn_worker" and isinstance(mode, Sync):
            assert result.failures == 1
            assert times.min() >= 1
            assert times.max() <= 2  # Since the last recovery point.
        elif isinstance(mode, Gba):
            report = result.asynchronous
            assert times.max() == 1
            lost += (report.lost_batches + report.abandoned) * 20  # Rows of gradients that are dropped have changed.
            assert (times == 0).sum() <= lost
        else:
            assert times.max() == 1
            assert (times == 0).sum() <= lost
        total += written(kafka, total, 100)
        again = one.fit(kafka.reader(20))
        assert again.rows == PARTITIONS * 100
        assert times_trained(one, total)[-300:].tolist() == [1] * 300
