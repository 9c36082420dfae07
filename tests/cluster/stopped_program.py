"""A program that trains on Ray until it gets a signal: `python stopped_program.py WHAT DIRECTORY`."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import persia
from support.cluster_samples import make_trainer, options, reader


class Blocked:
    """Batches of a reader, and after the 200th none for ever."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def batches(self, epoch: int = 0, start: int = 0) -> Iterator[Any]:
        for number, batch in enumerate(reader(1_000).batches(epoch, start), start):
            if number == 200:
                self.mark.touch()
                threading.Event().wait()
            yield batch

    def __iter__(self) -> Iterator[Any]:
        return self.batches()


if __name__ == "__main__":
    what, directory = sys.argv[1:]
    data = Blocked(Path("blocked").absolute()) if what == "blocked" else reader(1_000_000)
    Path("regions").mkdir(exist_ok=True)
    with persia.cluster.Ray(1, 1, 1, 2, options(regions=str(Path("regions").absolute()))) as cluster:
        trainer = make_trainer(cluster, checkpoint_dir=directory, checkpoint_every_steps=20)
        trainer.fit(data)
