"""Trains on a topic and saves every two steps; resumes if there is a checkpoint. Tests kill it.

python -m support.stream_run BOOTSTRAP TOPIC DIRECTORY
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import torch

import persia
from persia.batching.batch import Batch
from persia.checkpoint import list_checkpoints
from support.kafka import SCHEMA


def optimizer(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1)


def model(seconds: float = 0.0) -> torch.nn.Module:
    """A model that takes a while for a batch, so that a kill comes in the middle of a run."""
    torch.manual_seed(0)
    made = persia.nn.models.DeepFM(SCHEMA, hidden=(8,))
    made.register_forward_pre_hook(lambda *_: time.sleep(seconds))
    return made


def trainer(directory: str, seconds: float = 0.0) -> persia.Trainer:
    options = persia.TrainerOptions(progress=False, checkpoint_dir=directory, checkpoint_every_steps=2, keep_last=2)
    if list_checkpoints(directory):
        return persia.Trainer.resume(directory, model(seconds), optimizer=optimizer)
    return persia.Trainer(
        model(seconds),
        SCHEMA,
        optimizer=optimizer,
        embedding_optimizer=persia.optim.SGD(lr=0.1),
        mode=persia.modes.Sync(),
        options=options,
    )


def keep_killable(one: persia.Trainer, directory: str) -> None:
    """Has training wait for its checkpoints, and at last for the kill, however late that comes."""
    begin = one.global_step

    def last() -> int:
        found = list_checkpoints(directory)
        return found[-1].step if found else 0

    def wait(*_: object) -> None:
        end = time.monotonic() + 1.0
        while one.global_step > begin + 28 or (one.global_step > last() + 6 and time.monotonic() < end):
            time.sleep(0.01)

    one.model.register_forward_pre_hook(wait)


def reader(bootstrap: str, topic: str) -> Iterator[Batch]:
    return persia.data.kafka(topic, SCHEMA, 5, bootstrap=bootstrap, until="now")


if __name__ == "__main__":
    bootstrap, topic, directory = sys.argv[1:]
    one = trainer(directory, 0.03)
    keep_killable(one, directory)
    one.fit(reader(bootstrap, topic))
