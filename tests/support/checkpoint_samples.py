"""A small checkpoint with a bit of everything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from persia.checkpoint import CheckpointWriter
from persia.schema import Adagrad, IdFeature, Schema

SCHEMA = Schema(
    [IdFeature("item", 4), IdFeature("history", 4, table="item", pooling="mean"), IdFeature("user", 2)],
    ["price"],
    ["click"],
)
OPTIMIZER = Adagrad(0.05)


def make_rows(count: int, dim: int = 4, width: int = 4, seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        "ids": random.integers(0, 2**64, count, dtype=np.uint64, endpoint=False),
        "embeddings": random.standard_normal((count, dim), dtype=np.float32),
        "state": random.standard_normal((count, width), dtype=np.float32),
        "update_count": random.integers(0, 9, count, dtype=np.uint32),
        "last_step": random.integers(5, 50, count, dtype=np.uint32),
        "stamp": random.integers(0, 2**32, count, dtype=np.uint32, endpoint=False),
    }


def write(url: str | Path, step: int, **options: Any) -> str:
    """A small checkpoint with a bit of everything; its content depends on the step."""
    with CheckpointWriter(url, step, **options) as writer:
        writer.add_rows("item", 0, make_rows(7, seed=step))
        writer.add_rows("item", 1, make_rows(3, seed=step + 1))
        writer.add_tensors("dense", {"weight": np.full((2, 3), step, np.float32)})
        writer.add_state("trainer", {"step": step, 1: (None, [1.5])})
        return writer.commit(schema=SCHEMA, config={"lr": 0.1}, optimizer=OPTIMIZER, extra={"note": "x"})
