"""Training with rows on disk, whose PSs are in other processes, while the disk is full."""

from __future__ import annotations

import threading
import time

import pytest
import torch

import persia
from persia.errors import StoreFullError
from persia.modes import Hybrid, Sync
from persia.nn.models import FFNN
from support.cluster_samples import eventually
from support.disks import filled, small_disk
from support.ps_processes import PSProcesses

pytestmark = pytest.mark.processes

BATCH, BATCHES = 200, 25
TIMEOUT = 12.0
"""A PS gives up a quarter of it before its callers: more than a stall."""


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "disk", "64m") as place:
        yield place


def reader():
    return persia.data.synthetic(
        BATCH * BATCHES, id_features=1, ids_per_feature=50_000, dense_features=1, batch_size=BATCH, seed=1
    )


def trainer(cluster, mode, **options):
    torch.manual_seed(0)
    schema = reader().schema
    if "spill" in options:
        settings = {"spill": str(options.pop("spill")), "memory_rows": 400, "capacity": 100_000}
        tables = [persia.Table("id_0", 16, **settings)]
        schema = persia.Schema(schema.id_features, schema.dense_features, schema.labels, tables)
    return persia.Trainer(
        FFNN(schema, hidden=(8,)),
        schema,
        optimizer=lambda params: torch.optim.SGD(params, 1e-2),
        embedding_optimizer=persia.optim.SGD(lr=0.1),
        mode=mode,
        cluster=cluster,
        options=persia.TrainerOptions(progress=False, **options),
    )


def test_training_pauses_while_the_disk_of_a_ps_is_full(disk, tmp_path):
    """And then computes what it computes with all rows in memory."""
    expected = trainer(persia.cluster.Embedded(1), Sync()).fit(reader())
    with PSProcesses(tmp_path / "log", 60.0) as cluster:
        t = trainer(cluster, Sync(), spill=disk / "ssd")
        filler = filled(disk)
        results = []
        training = threading.Thread(target=lambda: results.append(t.fit(reader())))
        training.start()
        eventually(lambda: "waits for space, so training pauses" in cluster.log.read_text(), "a PS waits for space")
        assert f"{disk}/ssd" in cluster.log.read_text()
        training.join(0.5)
        assert training.is_alive()
        filler.unlink()
        training.join(60.0)
        (result,) = results
        assert "training continues" in cluster.log.read_text()
        assert (result.rows, result.lost_batches, result.lost_gradients) == (BATCH * BATCHES, 0, 0)
        assert result.progressive == expected.progressive
        counts = t.embeddings.statistics()["id_0"]
        assert counts["rows"] == expected.stored_rows
        assert counts["disk_rows"] > 500


@pytest.mark.parametrize(
    "mode", [Sync(), pytest.param(Hybrid(4, warmup=0), marks=pytest.mark.slow)], ids=["sync", "hybrid"]
)
def test_a_disk_that_stays_full_ends_training(disk, tmp_path, mode):
    """With the error of the PS, which says where and what to do, not with that of a call that is late."""
    with PSProcesses(tmp_path / "log", TIMEOUT, 1) as cluster:
        t = trainer(cluster, mode, spill=disk / "ssd", timeout=TIMEOUT)
        filled(disk)
        began = time.monotonic()
        with pytest.raises(StoreFullError, match=r"no room to grow .*lookup waited \d+\.\d s for space") as caught:
            t.fit(reader())
        assert time.monotonic() - began < 2 * TIMEOUT
        assert f"{disk}/ssd" in str(caught.value)
        assert "free there: 0" in str(caught.value)
