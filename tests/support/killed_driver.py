"""A program that trains on Ray and is killed while it does: `python -m support.killed_driver SETTINGS`.

The settings are JSON. It calls `fit` for each number of steps in `calls`, scales the PSs to `scale`, and then calls it
until the end of its data. Once the rows of `mark` batches are there, it makes the file `trained`. At the end it writes
what it has counted, and the rows.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import persia
from persia.modes import decode
from persia.types import SourceFingerprint, SourcePart
from support.cluster_samples import eventually, make_trainer, options, reader

ROWS = 16


class Numbered:
    """Each sample has an id of its own. Batches from number `stop` on come once the file `gate` exists."""

    schema = persia.Schema([persia.IdFeature("id", 4)])
    batch_size = ROWS

    def __init__(self, batches: int, stop: int, gate: str) -> None:
        self.count, self.stop, self.gate = batches, stop, Path(gate)

    def batches(self, epoch: int = 0, start: int = 0) -> Iterator[persia.Batch]:
        for number in range(start, self.count):
            if number >= self.stop:
                eventually(self.gate.exists, "the test opens the gate", 240.0)
            ids = np.arange(number * ROWS, (number + 1) * ROWS, dtype=np.uint64)
            zeros = np.zeros((ROWS, 1), np.float32)
            yield persia.Batch({"id": persia.IdColumn(ids)}, zeros[:, :0], zeros)

    def __iter__(self) -> Iterator[persia.Batch]:
        return self.batches()

    def fingerprint(self) -> SourceFingerprint:
        return SourceFingerprint("numbered", (SourcePart(f"{self.count} batches"),))


class Linear(torch.nn.Module):
    """The least network that there is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)

    def forward(self, dense: torch.Tensor, embeddings: dict[str, torch.Tensor]) -> torch.Tensor:
        logits: torch.Tensor = self.linear(embeddings["id"])
        return logits


def numbered_trainer(cluster: Any, mode: Any, seconds: float) -> persia.Trainer:
    torch.manual_seed(0)
    return persia.Trainer(
        Linear(),
        Numbered.schema,
        optimizer=lambda params: torch.optim.SGD(params, 0.1),
        embedding_optimizer=persia.optim.SGD(lr=0.1),
        mode=mode,
        cluster=cluster,
        options=persia.TrainerOptions(progress=False, timeout=60.0, recovery_point_every_seconds=seconds),
    )


def rows_of(trainer: persia.Trainer) -> dict[str, np.ndarray]:
    """All rows by table, sorted by id, and how often they were updated; and the network."""
    found: dict[str, np.ndarray] = {}
    chunks = [chunk for server in trainer.embeddings.connection.servers for chunk in server.export_rows()]
    for table in {chunk.table for chunk in chunks}:
        columns = {
            name: np.concatenate([chunk.arrays[name] for chunk in chunks if chunk.table == table])
            for name in ("ids", "update_count", "embeddings", "state")
        }
        order = np.argsort(columns["ids"])
        found |= {f"{table}.{name}": column[order] for name, column in columns.items()}
    for name, value in trainer.model.state_dict().items():
        found[f"network.{name}"] = value.numpy()
    return found


def mark(cluster: Any, rows: int, path: Path) -> None:
    """Makes a file once there are so many rows."""

    def enough() -> bool:
        return sum(counters.get("id.rows", 0.0) for counters in cluster.statistics().values()) >= rows

    eventually(enough, f"{rows} rows are there", 240.0)
    path.touch()


def main() -> None:
    given = json.loads(sys.argv[1])
    folder = Path(given["folder"])
    mode = decode(json.dumps(given["mode"]))
    settings = options(address=given["address"], regions=str(folder / "regions"), run=str(folder / "run"))
    with persia.cluster.Ray(given["ps"], 1, 1, given["nn_workers"], settings) as cluster:
        if given["values"]:
            data: Any = reader(given["batches"])
            trainer = make_trainer(cluster, mode)
        else:
            data = Numbered(given["batches"], given["stop"], str(folder / "gate"))
            trainer = numbered_trainer(cluster, mode, given["seconds"])
        if given["mark"]:
            arguments = (cluster, given["mark"] * ROWS, folder / "trained")
            threading.Thread(target=mark, args=arguments, daemon=True).start()
        steps = [trainer.fit(data, max_steps=count).steps for count in given["calls"]]
        if given["scale"]:
            cluster.scale(ps=given["scale"])
        if given["waits"] and not (folder / "gate").exists():
            (folder / "waiting").touch()
            threading.Event().wait()
        result = trainer.fit(data)
        np.savez(folder / "rows.npz", **rows_of(trainer))
        found = {
            "steps": [*steps, result.steps],
            "rows": result.rows,
            "global_step": result.global_step,
            "failures": result.failures,
            "finished": trainer.finished,
            "history": result.history.rows,
        }
        (folder / "out").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
