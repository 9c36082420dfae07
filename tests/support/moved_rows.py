"""What a run trains while its rows move: each row's value depends only on the number of its updates."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

import persia
from persia import IdColumn

ROWS = 64
"""Rows of a batch."""

IDS = 6000
SCHEMA = persia.Schema([persia.IdFeature("id", 4)], labels=["click"])


class EndlessBatches:
    """Batches without end. Of the ids of all batches that NN workers train at the same step, none occurs twice.

    Args:
        rows: of a batch.
        pause: seconds before each batch.
    """

    schema = SCHEMA

    def __init__(self, rows: int = ROWS, pause: float = 0.005) -> None:
        self.rows, self.pause = rows, pause

    def batches(self, epoch: int = 0, start: int = 0) -> Iterator[persia.Batch]:
        number = start
        while True:
            ids = (np.arange(number * self.rows, (number + 1) * self.rows) * 7 % IDS).astype(np.uint64)
            time.sleep(self.pause)
            yield persia.Batch(
                {"id": IdColumn(ids)}, np.zeros((self.rows, 0), np.float32), np.zeros((self.rows, 1), np.float32)
            )
            number += 1

    def __iter__(self) -> Iterator[persia.Batch]:
        return self.batches()


class SumOfRows(torch.nn.Module):
    """A network whose gradient of each row is the same at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, dense: torch.Tensor, embeddings: Any) -> torch.Tensor:
        return embeddings["id"].sum(1, keepdim=True) + self.weight

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return logits.mean()


def make_trainer(cluster: Any, mode: Any = None, **options: Any) -> persia.Trainer:
    torch.manual_seed(0)
    return persia.Trainer(
        SumOfRows(),
        SCHEMA,
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
        embedding_optimizer=persia.optim.Adagrad(lr=0.1),
        mode=mode or persia.modes.Hybrid(4),
        cluster=cluster,
        options=persia.TrainerOptions(progress=False, device="cpu", **options),
    )


def rows_of(trainer: persia.Trainer) -> tuple[bytes, bytes, list[int]]:
    """Values, optimizer states and numbers of updates of all ids. Rows of batches that were only read ahead are 0."""
    found = trainer.embeddings.rows("id", np.arange(IDS, dtype=np.uint64), state=True)
    assert found.state is not None
    updated = found.state.update_count[:, None] > 0
    return (
        np.where(updated, found.values, 0).tobytes(),
        np.where(updated, found.state.values, 0).tobytes(),
        found.state.update_count.tolist(),
    )


def expected_rows(*steps: int, nn_workers: int = 1) -> tuple[bytes, bytes, list[int]]:
    """Rows after runs of these steps in this process, with the batches of all NN workers as one."""
    trainer = make_trainer(None, persia.modes.Sync())
    for count in steps:
        trainer.fit(EndlessBatches(ROWS * nn_workers, pause=0.0), max_steps=count, again=True)
    return rows_of(trainer)
