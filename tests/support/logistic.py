"""Logistic regression on two embeddings, by hand: trained along schedules, and by the rule of delayed Sync."""

from __future__ import annotations

import numpy as np

from persia.replay import PlainRows, PlainTable, ReplayDense, ReplayRows, Setting, replay, simulate, steady

IDS, DIM, LOCAL = 40, 3, 4


class Problem:
    """Logistic regression on the sum of two embeddings, times dense weights; Adam on both. Gradients by hand."""

    def __init__(self, dtype=np.float64, seed=0, optimizer="adam"):
        rng = np.random.default_rng(seed)
        self.dtype = dtype
        self.weights = rng.normal(size=DIM).astype(dtype)
        self.moments = np.zeros((2, DIM), dtype)
        self.updates = 0
        self.table = PlainTable(rng.normal(size=(IDS, DIM)).astype(dtype), optimizer, 0.05)
        self.servers = {
            "ps-0": ReplayRows(PlainRows({"item": self.table}), lambda batch: {"item": np.unique(self.data(batch)[0])}),
            "dense-0": ReplayDense(self.weights.copy, self.update),
        }

    def data(self, batch):
        rng = np.random.default_rng((99, batch))
        ids = (rng.zipf(1.3, (LOCAL, 2)) % IDS).astype(np.uint64)
        return ids, rng.integers(0, 2, LOCAL).astype(self.dtype)

    def update(self, gradient, step):
        self.updates += 1
        self.moments[0] = 0.9 * self.moments[0] + 0.1 * gradient
        self.moments[1] = 0.999 * self.moments[1] + 0.001 * gradient**2
        mean, square = self.moments[0] / (1 - 0.9**self.updates), self.moments[1] / (1 - 0.999**self.updates)
        self.weights -= (0.01 * mean / (np.sqrt(square) + 1e-8)).astype(self.dtype)

    def compute(self, batch, found):
        ids, labels = self.data(batch)
        unique, rows = found["ps-0"]["item"]
        at = np.searchsorted(unique, ids)
        pooled = rows[at].sum(1)
        error = (1 / (1 + np.exp(-(pooled @ found["dense-0"]))) - labels) / len(labels)
        rows_gradient = np.zeros_like(rows)
        for place in range(2):
            np.add.at(rows_gradient, at[:, place], error[:, None] * found["dense-0"])
        return {"ps-0": {"item": (unique, rows_gradient)}, "dense-0": (error @ pooled).astype(self.dtype)}

    def run(self, *schedules):
        for schedule in schedules:
            replay(schedule, self.servers, self.compute)
        return self

    def apart(self, other):
        return max(np.abs(self.weights - other.weights).max(), np.abs(self.table.rows - other.table.rows).max())


def lock_step(mode, workers, batches, step=0, start=0):
    setting = Setting(steady([1.0] * workers), local_batch=LOCAL)
    return simulate(mode, setting, range(start, start + batches), step=step)


def delayed_sync(problem, versions, workers):
    """Trains a problem without modes, servers or schedules: the rule that Hybrid has to follow, whatever the timing.

        rows[s + 1] = update(rows[s], sum of w_r * g_r / sum of w_r),    g_r = gradient(rows[v_r], dense[s], batch r)

    Args:
        problem: is trained.
        versions: by batch, the number of steps that its rows contain.
        workers: number of batches of a step; the last step may have fewer.
    """
    rows = [problem.table.rows.copy()]
    for step, start in enumerate(range(0, len(versions), workers)):
        row_sum = np.zeros_like(rows[0])
        dense_sum = np.zeros_like(problem.weights)
        total, seen = 0, set()
        for batch in range(start, min(start + workers, len(versions))):
            ids, labels = problem.data(batch)
            unique = np.unique(ids)
            found = {"ps-0": {"item": (unique, rows[versions[batch]][unique.astype(int)])}, "dense-0": problem.weights}
            gradients = problem.compute(batch, found)
            row_sum[unique.astype(int)] += len(labels) * gradients["ps-0"]["item"][1]
            dense_sum += len(labels) * gradients["dense-0"]
            total += len(labels)
            seen.update(unique.tolist())
        changed = np.array(sorted(seen), np.uint64)
        problem.table.update(changed, row_sum[changed.astype(int)] / total)
        problem.update(dense_sum / total, step)
        rows.append(problem.table.rows.copy())
    return problem
