"""What the cluster tests train; importable in the processes of the roles."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import persia
from persia.cluster import Ray, RayOptions
from persia.nn.models import FFNN

BATCH = 64


def options(**changes: Any) -> RayOptions:
    return RayOptions(threads=1, timeout=60.0, **changes)


def reader(batches: int, epoch_seed: int = 1) -> Any:
    return persia.data.synthetic(
        batches * BATCH, id_features=4, ids_per_feature=500, dense_features=2, batch_size=BATCH, dim=8, seed=epoch_seed
    )


def make_trainer(cluster: Any, mode: Any = None, **changes: Any) -> persia.Trainer:
    torch.manual_seed(0)
    schema = reader(1).schema
    return persia.Trainer(
        FFNN(schema, hidden=(16,), dropout=0.1),
        schema,
        optimizer=lambda params: torch.optim.Adam(params, 1e-2),
        embedding_optimizer=persia.optim.Adagrad(lr=0.05),
        mode=mode or persia.modes.Sync(),
        cluster=cluster,
        options=persia.TrainerOptions(progress=False, timeout=60.0, **changes),
    )


def losses(cluster: Any, batches: int, mode: Any = None) -> list[float]:
    """A bare loop on one NN worker's share of the batches."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = reader(batches)
    embeddings = persia.nn.EmbeddingCollection(
        data.schema, optimizer=persia.optim.Adagrad(lr=0.05), mode=mode or persia.modes.Sync(), cluster=cluster
    )
    net = torch.nn.Sequential(torch.nn.Linear(4 * 8 + 2, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    found = []
    for batch in embeddings.prefetch(data):
        logits = net(torch.cat([*embeddings(batch).values(), batch.dense], 1))
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def pids(cluster: Ray, role: str | None = None) -> list[int]:
    """Of the living processes."""
    assert cluster._processes is not None
    return [p.info.pid for p in cluster._processes.all() if p.info is not None and role in (None, p.role)]


def running(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def eventually(condition: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds:g} s: {what}"
        time.sleep(0.02)
