"""Theorem 1 of the Persia paper (arXiv 2111.05897, section 5), measured: what a delay of rows costs, by alpha * tau.

    python -m benchmarks 'paper.theorem1*' [--preset smoke|laptop|full] [--json FILE]

The cost is T times the mean of |f'|^2 over T steps, less the same of a run without delay on the same samples.

paper.theorem1           The theorem's learning rate, which is lower with a delay: the largest cost over what the proof
                         allows, 16 L (f(w_0) - f*) alpha tau.
paper.theorem1_one_rate  One learning rate for all: the largest cost over that of the run without delay, by alpha * tau.

A smooth loss in float64, along the timeline of `Hybrid(tau)` with one NN worker and batches of one row: logistic
regression on the row of one id and a bias, which stands for the network. Ids are uniform over 1 / alpha of them.
docs/concepts/modes.md explains it. A laptop run takes half a minute.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks import runner
from persia.modes import Hybrid, Sync
from persia.replay import (
    PlainRows,
    PlainTable,
    ReplayDense,
    ReplayRows,
    ScheduleEvent,
    Setting,
    replay,
    simulate,
    steady,
)

ALPHAS = {"smoke": (1.0, 0.1), "laptop": (1.0, 0.1, 0.01, 0.001), "full": (1.0, 0.1, 0.01, 0.001)}
DELAYS = {"smoke": (4, 16), "laptop": (1, 4, 16, 63), "full": (1, 4, 16, 63)}
"""No more: of at most 64 batches whose rows are looked up, one is computed."""
STEPS = {"smoke": 128, "laptop": 4096, "full": 65_536}
LIPSCHITZ = 0.5
"""L: the logistic loss has a second derivative of at most 1/4, and a sample moves two parameters."""
VARIANCE = 0.5
"""sigma^2: the squared gradient of a sample at w_0, where both errors are 1/2; it falls from there."""
LOGIT = 2.0
"""Ids have logits of this size, half of them of either sign."""
ONE_RATE = 0.5


class Cost(NamedTuple):
    """T times the mean of |f'|^2, with a delay and without."""

    alpha: float
    tau: int
    delayed: float
    undelayed: float

    @property
    def per_missed_update(self) -> float:
        """Cost over alpha * tau, the updates of its row that a sample misses on average."""
        return (self.delayed - self.undelayed) / (self.alpha * self.tau)


def sigmoid(logits: Any) -> Any:
    return 1 / (1 + np.exp(-logits))


class Clicks:
    """f(rows, bias): the mean over ids of the cross-entropy of sigmoid(row + bias) and clicks of the id."""

    def __init__(self, alpha: float, steps: int, rate: float) -> None:
        count = round(1 / alpha)
        rng = np.random.default_rng(0)
        self._alpha, self._rate = 1 / count, rate
        self._chances = sigmoid(np.where(np.arange(count) % 2, -LOGIT, LOGIT))[:, None]
        self._ids = rng.integers(count, size=(steps, 1)).astype(np.uint64)
        self._clicks = (rng.random((steps, 1)) < self._chances[self._ids[:, 0].astype(np.int64)]).astype(np.float64)
        self._bias = np.zeros(1)
        self._table = PlainTable(np.zeros((count, 1)), "sgd", rate)
        self._total = 0.0

    def run(self, tau: int) -> float:
        """Trains once on all samples, and returns the sum over steps of |f'|^2."""
        mode = Hybrid(tau, warmup=0) if tau else Sync()
        timeline = simulate(mode, Setting(steady([1.0])), len(self._ids))
        assert timeline.summary().row_staleness_max == tau
        rows = ReplayRows(PlainRows({"id": self._table}), lambda number: {"id": self._ids[number]})
        dense = ReplayDense(self._bias.copy, self._update)
        replay(timeline, {"ps-0": rows, "dense-0": dense}, self._compute, self._watch)
        return self._total

    def _compute(self, number: int, looked_up: Mapping[str, Any]) -> dict[str, Any]:
        ids, rows = looked_up["ps-0"]["id"]
        error = sigmoid(rows + looked_up["dense-0"]) - self._clicks[number]
        return {"ps-0": {"id": (ids, error)}, "dense-0": error[0]}

    def _update(self, gradient: Any, step: int) -> None:
        self._bias -= self._rate * gradient

    def _watch(self, event: ScheduleEvent, gradient: Any) -> None:
        if event.kind == "pull":  # All steps before are applied.
            error = sigmoid(self._table.rows + self._bias) - self._chances
            self._total += float(self._alpha**2 * np.sum(error**2) + np.mean(error) ** 2)


def theorem_rate(alpha: float, tau: int, steps: int) -> float:
    """Returns gamma of Theorem 1."""
    return 1 / (LIPSCHITZ + math.sqrt(steps * LIPSCHITZ * VARIANCE) + 4 * tau * LIPSCHITZ * alpha)


def at_start() -> float:
    """Returns f(w_0) - f*."""
    p = sigmoid(LOGIT)
    return float(math.log(2) + p * math.log(p) + (1 - p) * math.log(1 - p))


def costs(preset: str, rate: Callable[[float, int], float]) -> list[Cost]:
    """Trains with every alpha and tau, at the learning rate for them."""
    measured = []
    for alpha in ALPHAS[preset]:
        runs = {tau: Clicks(alpha, STEPS[preset], rate(alpha, tau)).run(tau) for tau in (0, *DELAYS[preset])}
        measured += [Cost(alpha, tau, runs[tau], runs[0]) for tau in DELAYS[preset]]
    return measured


@runner.measures("paper.theorem1")
def theorem(preset: str) -> runner.Measure:
    """The largest cost per missed update at the theorem's rates, over the constant in the proof."""
    measured = costs(preset, lambda alpha, tau: theorem_rate(alpha, tau, STEPS[preset]))
    allowed = 16 * LIPSCHITZ * at_start()
    details = {"of": "16 L (f(w_0) - f*)", "allowed": allowed, "steps": STEPS[preset], "costs": points(measured)}
    value = max(cost.per_missed_update for cost in measured) / allowed
    return runner.Measure("paper.theorem1", value, "ratio", at_most=1.0, details=details)


@runner.measures("paper.theorem1_one_rate")
def one_rate(preset: str) -> runner.Measure:
    """The largest cost per missed update at one rate, over what the run without delay comes to."""
    measured = costs(preset, lambda alpha, tau: ONE_RATE)
    details = {"of": "T times the mean of |f'|^2 without delay", "rate": ONE_RATE, "costs": points(measured)}
    value = max(cost.per_missed_update / cost.undelayed for cost in measured)
    return runner.Measure("paper.theorem1_one_rate", value, "ratio", details=details)


def points(measured: Sequence[Cost]) -> list[list[float]]:
    """Returns alpha, tau, the cost, and the sum without delay, of each pair."""
    return [[cost.alpha, cost.tau, cost.delayed - cost.undelayed, cost.undelayed] for cost in measured]
