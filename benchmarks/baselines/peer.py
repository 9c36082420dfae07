"""What the sides of `peers.py` share that run in an environment of their own: needs numpy only.

A script gets its `Work` as JSON in its argument and prints `ready` once the table is full. Then it answers each line
`lookup` or `train` with `seconds S`, the time for all batches, until its input ends. Anything else that libraries print
goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Work:
    """The table, and what a measurement does. `cores`: processors that a side may use."""

    rows: int = 2_000_000
    dim: int = 16
    batch: int = 65_536
    batches: int = 10
    cores: int = 1


def ids_of(rows: np.ndarray) -> np.ndarray:
    """Row numbers to ids that are spread over 63 bits; int64, and not negative, as PaddlePaddle requires."""
    return (rows.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(1)).astype(np.int64)


def fills(work: Work) -> list[np.ndarray]:
    """All ids, in pieces."""
    return [ids_of(np.arange(start, min(start + work.batch, work.rows))) for start in range(0, work.rows, work.batch)]


def batches(work: Work) -> list[np.ndarray]:
    """The ids of a measurement: distinct within a batch, uniform over all rows."""
    random = np.random.default_rng(0)
    return [ids_of(random.choice(work.rows, work.batch, replace=False)) for _ in range(work.batches)]


class Peer:
    """A table of another library. `lookup` returns the rows of a batch as an array; `train` updates them as well."""

    def __init__(self, work: Work) -> None:
        self.work = work

    def prepare(self, ids: np.ndarray) -> Any:
        """The ids as the library wants them."""
        return ids

    def fill(self, ids: Any) -> None:
        raise NotImplementedError

    def lookup(self, ids: Any) -> Any:
        raise NotImplementedError

    def train(self, ids: Any) -> Any:
        raise NotImplementedError

    def finish(self) -> None:
        """Waits for updates that are under way."""

    def close(self) -> None:
        """Ends what the library has started."""


def serve(make: Callable[[Work], Peer]) -> None:
    """Speaks the protocol."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    work = Work(**json.loads(sys.argv[1]))
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: work.cores])
    peer = make(work)
    for ids in fills(work):
        peer.fill(peer.prepare(ids))
    peer.finish()
    prepared = [peer.prepare(ids) for ids in batches(work)]
    print("ready", file=answers)
    for line in sys.stdin:
        call = {"lookup": peer.lookup, "train": peer.train}[line.strip()]
        start = time.perf_counter()
        for ids in prepared:
            call(ids)
        peer.finish()
        print("seconds", time.perf_counter() - start, file=answers)
    peer.close()
