"""What is trained while things go wrong: a task that is soon learned, and for ever new."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import chaos_disk  # noqa: F401  It registers the disk.
import numpy as np
import torch

import persia
from persia.modes import Gba, Hybrid, Mode, Sync
from persia.nn.models import FFNN

BATCH = 256
LEARNING_RATE = 10.0
MODES: dict[str, Mode] = {"hybrid": Hybrid(2, warmup=0), "sync": Sync(), "gba": Gba(3 * BATCH)}
"""Gba has three pushes in a step, so that a push that counts twice differs from one of a step that was cut short."""
TEST_BATCHES = 200
MOST_EXTRA = 200_000
MANY = 50_000


class Net(FFNN):
    """NN workers find it here, and so import this module, which knows the disk."""


def make_trainer(cluster: Any, mode: str, checkpoints: str | None, bounded: bool = True) -> persia.Trainer:
    torch.manual_seed(0)
    schema = make_schema(bounded)
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
            recovery_point_every_seconds=5.0,
            max_failures=1000,
        ),
    )


@dataclasses.dataclass(frozen=True)
class Log:
    """A synthetic click log with one more feature: `many` has `MANY` ids, which tell nothing about the label.

    Args:
        clicks: the log.
        extra_ids: number of ids of the feature `extra_0`; 0 for ever new ones.
    """

    clicks: Any
    extra_ids: int = 0

    def batches(self, epoch: int = 0, start: int = 0) -> Iterator[persia.Batch]:
        for batch in self.clicks.batches(epoch, start):
            extra = batch.id_features["extra_0"].values
            columns = {"many": extra % np.uint64(MANY)}
            if self.extra_ids:
                columns["extra_0"] = extra % np.uint64(self.extra_ids)
            others = {name: persia.IdColumn(ids) for name, ids in columns.items()}
            yield dataclasses.replace(batch, id_features={**batch.id_features, **others})

    def __iter__(self) -> Iterator[persia.Batch]:
        return self.batches()

    def shard(self, index: int, count: int) -> Log:
        return Log(self.clicks.shard(index, count), self.extra_ids)

    def fingerprint(self) -> Any:
        return self.clicks.fingerprint()


def make_data(bounded: bool = True) -> Log:
    """Few ids, so that the AUC is soon what it will be; ever new ones, so that regions grow; and many that return.

    Args:
        bounded: whether the tables are, so that rows are evicted. Else there are as many ids as rows that would stay.
    """
    clicks = persia.data.synthetic(
        1 << 40,
        id_features=3,
        ids_per_feature=10,
        dense_features=2,
        extra_id_features=1,
        batch_size=BATCH,
        dim=8,
        seed=1,
    )
    return Log(clicks, 0 if bounded else MOST_EXTRA)


def make_schema(bounded: bool = True) -> persia.Schema:
    """The schema; of tables without a declared capacity, rows may move to fewer PSs."""
    found = make_data().clicks.schema
    features = [*found.id_features, persia.IdFeature("many", dim=8)]
    capacities = {"extra_0": MOST_EXTRA, "many": 4 * MANY}
    tables = [persia.Table(name, 8, capacity=most if bounded else None) for name, most in capacities.items()]
    return persia.Schema(features, found.dense_features, found.labels, tables)


def make_test_data() -> list[persia.Batch]:
    """Of another epoch: the same truth."""
    batches = make_data().batches(epoch=1)
    return [next(batches) for _ in range(TEST_BATCHES)]
