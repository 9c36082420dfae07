"""What is trained while things go wrong: a task that is soon learned, and for ever new."""

from __future__ import annotations

from typing import Any

import chaos_disk  # noqa: F401  It registers the disk.
import torch

import persia
from persia.modes import Gba, Hybrid, Mode, Sync
from persia.nn.models import FFNN

BATCH = 256
LEARNING_RATE = 5.0
MODES: dict[str, Mode] = {"hybrid": Hybrid(2), "sync": Sync(), "gba": Gba(2 * BATCH)}
TEST_BATCHES = 200
MOST_EXTRA = 200_000


class Net(FFNN):
    """NN workers find it here, and so import this module, which knows the disk."""


def make_trainer(cluster: Any, mode: str, checkpoints: str | None) -> persia.Trainer:
    torch.manual_seed(0)
    schema = make_schema()
    return persia.Trainer(
        Net(schema, hidden=(32,)),
        schema,
        optimizer=lambda params: torch.optim.Adam(params, 1e-2),
        embedding_optimizer=persia.optim.SGD(lr=LEARNING_RATE),
        mode=MODES[mode],
        cluster=cluster,
        options=persia.TrainerOptions(
            progress=False,
            timeout=120.0,
            checkpoint_dir=checkpoints,
            checkpoint_every_seconds=5.0 if checkpoints else None,
            keep_last=3,
            snapshot_every_seconds=5.0,
            max_failures=1000,
        ),
    )


def make_data() -> Any:
    """Few ids, so that the AUC is soon what it will be; and ever new ones, so that regions grow."""
    return persia.data.synthetic(
        1 << 40,
        id_features=3,
        ids_per_feature=10,
        dense_features=2,
        extra_id_features=1,
        batch_size=BATCH,
        dim=8,
        seed=1,
    )


def make_schema() -> persia.Schema:
    found = make_data().schema
    tables = [persia.Table("extra_0", 8, capacity=MOST_EXTRA)]
    return persia.Schema(found.id_features, found.dense_features, found.labels, tables)


def make_test_data() -> list[persia.Batch]:
    """Of another epoch: the same truth."""
    batches = make_data().batches(epoch=1)
    return [next(batches) for _ in range(TEST_BATCHES)]
