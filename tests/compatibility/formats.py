"""Writes `formats-0.2.0.zip`: a checkpoint and a log of changes, and the values that are read from them.

    python tests/compatibility/formats.py TARGET.zip

A released version writes an archive once; later versions read it, and never write it again. A change of a format that
is not compatible gets a new number and an archive of its own, next to this one.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

import persia
from persia.checkpoint import CheckpointReader
from persia.modes import Gba, Sync
from persia.nn.models.registry import build
from persia.optim import Adagrad, Adam
from persia.publish import ModelDescription, PublishOptions
from persia.serve import Predictor

STEPS = 10
"""Steps of the checkpoint; a pass over the data has twice as many."""


def reader() -> Any:
    """Returns the data of the run."""
    return persia.data.synthetic(160, id_features=3, ids_per_feature=20, dense_features=1, batch_size=8, dim=4)


def schema() -> persia.Schema:
    """Returns a schema with tables of different optimizers, dtypes and admissions."""
    made = reader().schema
    tables = [
        persia.Table("id_0", 4, capacity=1000, ttl=persia.Steps(1000)),
        persia.Table("id_1", 4, capacity=1000, optimizer=Adam(0.05), dtype="bfloat16"),
        persia.Table("id_2", 4, capacity=1000, admission=persia.AdmitMinFrequency(2)),
    ]
    return persia.Schema(made.id_features, made.dense_features, made.labels, tables)


def model() -> torch.nn.Module:
    """Returns the network of the run."""
    torch.manual_seed(5)
    return build(ModelDescription("ffnn", {"hidden": [4]}), schema())


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    """Returns the optimizer of the network."""
    return torch.optim.Adam(parameters, 1e-2)


def rows_of(checkpoint: str) -> dict[str, dict[str, Any]]:
    """Returns ids, embeddings, optimizer state and last steps of a checkpoint by table, in the order of the ids."""
    found: dict[str, dict[str, Any]] = {}
    opened = CheckpointReader(checkpoint)
    for table in opened.manifest.tables:
        parts = [arrays for _, arrays in opened.rows(table)]
        arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        order = np.argsort(arrays["ids"])
        found[table] = {name: arrays[name][order].tolist() for name in ("ids", "embeddings", "state", "last_step")}
    return found


def resumed(checkpoint: str) -> dict[str, Any]:
    """Returns the result of going on to the end of the pass."""
    trainer = persia.Trainer.resume(checkpoint, model(), optimizer=optimizer)
    begun = {"global_step": trainer.global_step, "position": trainer.position}
    result = trainer.fit(reader())
    return {
        "begun": begun,
        "global_step": result.global_step,
        "log_loss": result.history.log_loss,
        "auc": result.history.auc,
        "mode": type(trainer.mode).__name__,
        "parameters": [p.sum().item() for p in trainer.model.parameters()],
        "rows": {table: counts["rows"] for table, counts in trainer.embeddings.statistics().items()},
    }


def served(log: str) -> list[float]:
    """Returns the probabilities of the first rows of the data by the log."""
    with Predictor(log) as predictor:
        return [float(p) for p in predictor.predict(next(iter(reader()))).probabilities[:, 0]]


def train() -> None:
    """Writes `checkpoint` and `log` into the working directory."""
    trainer = persia.Trainer(
        model(),
        schema(),
        optimizer=optimizer,
        embedding_optimizer=Adagrad(lr=0.1),
        mode=Sync(),
        options=persia.TrainerOptions(
            progress=False,
            device="cpu",
            checkpoint_dir="checkpoint",
            checkpoint_increments=1,
            mode_schedule=[(STEPS + 4, Gba(8))],
            publish=PublishOptions("log"),
        ),
    )
    trainer.model.register_forward_pre_hook(lambda *_: time.sleep(0.1))  # So that the log has an increment.
    for _ in range(2):  # A full checkpoint, and one that adds to it.
        trainer.fit(reader(), max_steps=STEPS // 2)


def main(target: str) -> None:
    """Writes an archive."""
    target = os.path.abspath(target)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        train()
        files = {path.as_posix(): path.read_bytes() for path in sorted(Path().rglob("*")) if path.is_file()}
        expected = {"rows": rows_of("checkpoint"), "served": served("log"), "resumed": resumed("checkpoint")}
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        archive.writestr("expected.json", json.dumps(expected))


if __name__ == "__main__":
    main(sys.argv[1])
