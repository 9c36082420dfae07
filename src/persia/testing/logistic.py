"""Logistic regression on two embeddings, written by hand: trained along timelines, and by the rule of delayed Sync.

Small, smooth and in any precision, to check the result of a mode: `Problem` follows `persia.replay`; `delayed_sync`
uses neither modes nor servers.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from persia.modes import Mode
from persia.replay import (
    PlainRows,
    PlainTable,
    ReplayDense,
    ReplayRows,
    ReplayServer,
    Setting,
    Timeline,
    replay,
    simulate,
    steady,
)
from persia.replay.plain import PlainOptimizer
from persia.replay.replay_servers import Numbers
from persia.types import Ids

__all__ = ["DIM", "IDS", "LOCAL", "Problem", "delayed_sync", "lock_step"]

IDS, DIM, LOCAL = 40, 3, 4


@functools.lru_cache(1024)
def _global_batch(step: int, rows: int) -> tuple[Ids, NDArray[np.int64]]:
    """Returns ids `[rows, 2]` and labels `[rows]` of a step. Cached, as each part, lookup and run reads them."""
    rng = np.random.default_rng((99, step))
    ids = (rng.zipf(1.3, (rows, 2)) % IDS).astype(np.uint64)
    labels = rng.integers(0, 2, rows)
    ids.flags.writeable = labels.flags.writeable = False
    return ids, labels


class Problem:
    """Logistic regression on the sum of two embeddings, times dense weights; Adam on the weights, manual gradients.

    Args:
        dtype: precision of all numbers.
        seed: seed of the initial parameters; the rows are always the same.
        optimizer: optimizer of the embeddings.
        rows: rows of a global batch.
        parts: number of batches into which each global batch is divided.
    """

    def __init__(
        self,
        dtype: DTypeLike = np.float64,
        seed: int = 0,
        optimizer: PlainOptimizer = "adam",
        rows: int = LOCAL,
        parts: int = 1,
    ) -> None:
        rng = np.random.default_rng(seed)
        self.dtype = np.dtype(dtype)
        self.weights: Numbers = rng.normal(size=DIM).astype(dtype)
        self.moments: Numbers = np.zeros((2, DIM), dtype)
        self.updates = 0
        self.table = PlainTable(rng.normal(size=(IDS, DIM)).astype(dtype), optimizer, 0.05)
        self.servers: dict[str, ReplayServer] = {
            "ps-0": ReplayRows(PlainRows({"item": self.table}), lambda batch: {"item": np.unique(self.data(batch)[0])}),
            "dense-0": ReplayDense(self.weights.copy, self.update),
        }
        self._rows, self._parts = rows, parts

    def data(self, batch: int) -> tuple[Ids, Numbers]:
        """Returns ids `[n, 2]` and labels `[n]` of a batch."""
        step, part = divmod(batch, self._parts)
        ids, labels = _global_batch(step, self._rows)
        part_slice = slice(part * self._rows // self._parts, (part + 1) * self._rows // self._parts)
        return ids[part_slice], labels[part_slice].astype(self.dtype)

    def update(self, gradient: Numbers, step: int) -> None:
        """Updates the weights."""
        self.updates += 1
        self.moments[0] = 0.9 * self.moments[0] + 0.1 * gradient
        self.moments[1] = 0.999 * self.moments[1] + 0.001 * gradient**2
        mean, square = self.moments[0] / (1 - 0.9**self.updates), self.moments[1] / (1 - 0.999**self.updates)
        self.weights -= (0.01 * mean / (np.sqrt(square) + 1e-8)).astype(self.dtype)

    def compute(self, batch: int, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the gradients of the mean loss of a batch, by server."""
        ids, labels = self.data(batch)
        unique, rows = inputs["ps-0"]["item"]
        index = np.searchsorted(unique, ids)
        pooled = rows[index].sum(1)
        error = (1 / (1 + np.exp(-(pooled @ inputs["dense-0"]))) - labels) / len(labels)
        rows_gradient = np.zeros_like(rows)
        for place in range(2):
            np.add.at(rows_gradient, index[:, place], error[:, None] * inputs["dense-0"])
        return {"ps-0": {"item": (unique, rows_gradient)}, "dense-0": (error @ pooled).astype(self.dtype)}

    def run(self, *timelines: Timeline) -> Problem:
        """Trains along one timeline after another; returns itself."""
        for timeline in timelines:
            replay(timeline, self.servers, self.compute)
        return self

    def apart(self, other: Problem) -> float:
        """Returns the largest difference between its parameters and the parameters of another problem."""
        pairs = ((self.weights, other.weights), (self.table.rows, other.table.rows))
        return max(float(np.abs(a - b).max()) for a, b in pairs)


def lock_step(mode: Mode, workers: int, batches: int, step: int = 0, start: int = 0, local: int = LOCAL) -> Timeline:
    """Returns the timeline of equally fast NN workers that train `batches` batches from number `start` on."""
    setting = Setting(steady([1.0] * workers), local_batch=local)
    return simulate(mode, setting, range(start, start + batches), step=step)


def delayed_sync(problem: Problem, versions: Sequence[int], workers: int) -> Problem:
    """Trains a problem without modes, servers or timelines, by the rule that Hybrid must follow at any timing.

        rows[s + 1] = update(rows[s], sum of w_r * g_r / sum of w_r),    g_r = gradient(rows[v_r], dense[s], batch r)

    Args:
        problem: the problem, which is trained and returned.
        versions: number of steps that the rows of each batch contain.
        workers: number of batches of a step; the last step may have fewer.
    """
    rows: list[NDArray[Any]] = [problem.table.rows.copy()]
    for step, start in enumerate(range(0, len(versions), workers)):
        row_sum = np.zeros_like(rows[0])
        dense_sum = np.zeros_like(problem.weights)
        total, seen = 0, set[int]()
        for batch in range(start, min(start + workers, len(versions))):
            ids, labels = problem.data(batch)
            unique = np.unique(ids)
            inputs = {"ps-0": {"item": (unique, rows[versions[batch]][unique.astype(int)])}, "dense-0": problem.weights}
            gradients = problem.compute(batch, inputs)
            row_sum[unique.astype(int)] += len(labels) * gradients["ps-0"]["item"][1]
            dense_sum += len(labels) * gradients["dense-0"]
            total += len(labels)
            seen.update(unique.tolist())
        changed = np.array(sorted(seen), np.uint64)
        problem.table.update(changed, row_sum[changed.astype(int)] / total)
        problem.update(dense_sum / total, step)
        rows.append(problem.table.rows.copy())
    return problem
