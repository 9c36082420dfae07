"""Theorems 1 to 4 of the GBA paper (arXiv 2205.11048, appendices A and D), measured on a smooth, strongly convex loss.

    python -m benchmarks 'paper.gba_theorem*' [--preset smoke|laptop|full] [--json FILE]

paper.gba_theorem1      E F(w_k) - F* over what Theorem 1 allows, the largest of all steps and rates at which its
                        assumption holds, gamma <= 1. gamma and p_0 are measured.
paper.gba_theorem2      The same for Sync and Theorem 2.
paper.gba_theorem3.async, paper.gba_theorem4.async, paper.gba_theorem4.gba
                        The error floor after a switch, Theorem 3 from Async to Sync, Theorem 4 from Sync: over Sync's
                        floor. By the theorems' noise terms it is the number of NN workers for Async.

Ridge logistic regression on a table of samples, so that F, its gradient and its minimum are exact; local batches of one
sample; 8 NN workers, 2 of them 4 times slower, M = 8. Expectations are means over independent runs along one timeline.
Float64, by `persia.replay`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks import runner
from benchmarks.modes_runs import TWO_SLOW, everywhere
from persia.modes import Async, Gba, Mode, Sync
from persia.replay import (
    PlainRows,
    ReplayDense,
    ReplayRows,
    ScheduleEvent,
    Setting,
    TakenGradient,
    replay,
    simulate,
    steady,
)

RUNS = {"smoke": 8, "laptop": 128, "full": 1_024}
STEPS = {"smoke": 40, "laptop": 2_000, "full": 8_000}
RATES = (0.5, 0.2, 0.1, 0.05, 0.02)
"""Learning rates in units of 1 / L; the theorems hold up to 0.5."""
SWITCH_RATE = 0.2
WORKERS = 8
SAMPLES, DIM, RIDGE = 64, 8, 0.1

Parameters = NDArray[np.float64]
"""Of all runs, `[runs, DIM]`."""


class Loss:
    """F(w) = mean over samples of the cross-entropy of sigmoid(w . x), plus RIDGE / 2 |w|^2."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.inputs = rng.normal(size=(SAMPLES, DIM))
        self.clicks = (rng.random(SAMPLES) < 0.5).astype(np.float64)
        self.lipschitz = float(np.linalg.eigvalsh(self.inputs.T @ self.inputs / SAMPLES).max() / 4 + RIDGE)
        self.best = self._minimum()

    def error(self, w: Parameters) -> NDArray[np.float64]:
        """Returns F(w) - F* of each run."""
        return self._value(w) - self.best

    def gradient(self, w: Parameters) -> Parameters:
        """Returns the gradient of F."""
        return self._slopes(w) @ self.inputs / SAMPLES + RIDGE * w

    def sampled(self, w: Parameters, samples: NDArray[np.int64]) -> Parameters:
        """Returns the gradient of one sample in each run."""
        inputs = self.inputs[samples]
        slope = 1 / (1 + np.exp(-np.einsum("rd,rd->r", w, inputs))) - self.clicks[samples]
        return slope[:, None] * inputs + RIDGE * w

    def variance(self, w: Parameters) -> float:
        """Returns the expected squared distance of a sample's gradient from that of F."""
        slopes, mean = self._slopes(w), self.gradient(w) - RIDGE * w
        squares = slopes**2 @ (self.inputs**2).sum(1) / SAMPLES
        return float(np.mean(squares - (mean**2).sum(1)))

    def _slopes(self, w: Parameters) -> NDArray[np.float64]:
        return np.asarray(1 / (1 + np.exp(-w @ self.inputs.T)) - self.clicks)

    def _value(self, w: Parameters) -> NDArray[np.float64]:
        logits = w @ self.inputs.T
        entropy = np.logaddexp(0.0, logits) - self.clicks * logits
        return np.asarray(entropy.mean(1) + RIDGE / 2 * (w**2).sum(1))

    def _minimum(self) -> float:
        w = np.zeros((1, DIM))
        for _ in range(50):  # Newton's method.
            chances = self._slopes(w)[0] + self.clicks
            hessian = (self.inputs.T * (chances * (1 - chances))) @ self.inputs / SAMPLES + RIDGE * np.eye(DIM)
            w = w - self.gradient(w) @ np.linalg.inv(hessian)
        return float(self._value(w)[0])


class Trace(NamedTuple):
    """What was measured along a timeline.

    Attributes:
        errors: E F(w_k) - F* before each step and after the last.
        gamma: largest of E |F'(w_k) - F'(w_read)|^2 / E |F'(w_k)|^2, over gradients with weight.
        p0: smallest share of a step's gradients that were computed with its own parameters.
        variance: largest sigma^2.
    """

    errors: list[float]
    gamma: float
    p0: float
    variance: float

    @property
    def floor(self) -> float:
        """Mean error of the second half."""
        half = self.errors[len(self.errors) // 2 :]
        return sum(half) / len(half)


class _NoRows(ReplayRows):
    """The timeline's embedding PS, which has nothing to do."""

    def __init__(self) -> None:
        super().__init__(PlainRows({}), lambda batch: {})

    def add(self, gradient: Any, taken: TakenGradient) -> None:
        """No-op."""


class Training:
    """Independent runs along the same timelines, from w = 0.

    Args:
        rate: learning rate.
        runs: number of runs.
        seed: seed of the samples.
    """

    def __init__(self, rate: float, runs: int, seed: int = 0) -> None:
        self.loss = Loss()
        self.w: Parameters = np.zeros((runs, DIM))
        self._rate, self._seed = rate, seed
        self._step = 0
        self._batches = 0

    def run(self, mode: Mode, batches: int) -> Trace:
        """Trains and measures; continues where the previous call ended."""
        numbers = range(self._batches, self._batches + batches)
        setting = Setting(steady(TWO_SLOW))
        timeline = simulate(mode, setting, numbers, step=self._step)
        read: dict[int, Parameters] = {}
        stale: list[float] = []
        own: list[float] = []
        shares: list[float] = []
        errors, variances = [float(self.loss.error(self.w).mean())], [self.loss.variance(self.w)]
        current: list[Parameters] = [self.loss.gradient(self.w)]

        def compute(number: int, inputs: Mapping[str, Any]) -> dict[str, Any]:
            w = inputs["dense-0"]
            read[number] = self.loss.gradient(w)
            samples = np.random.default_rng((self._seed, number)).integers(SAMPLES, size=len(w))
            return {"ps-0": {}, "dense-0": self.loss.sampled(w, samples)}

        def watch(event: ScheduleEvent, _: Any) -> None:
            if event.server != "dense-0":
                return
            if event.kind == "push" and mode.decay(event.version, event.token):
                then = read.pop(event.batch)
                square = np.mean(((current[0] - then) ** 2).sum(1))
                stale.append(float(square / np.mean((current[0] ** 2).sum(1))))
                own.append(float(square == 0.0))
            elif event.kind == "apply":
                shares.append(sum(own) / len(own) if own else 0.0)
                own.clear()
                current[0] = self.loss.gradient(self.w)
                errors.append(float(self.loss.error(self.w).mean()))
                variances.append(self.loss.variance(self.w))

        replay(timeline, {"ps-0": _NoRows(), "dense-0": ReplayDense(self.w.copy, self._update)}, compute, watch)
        self._step, self._batches = timeline.end_step, numbers.stop
        return Trace(errors, max(stale, default=0.0), min(shares[:-1] or shares), max(variances))

    def _update(self, gradient: Parameters, _step: int) -> None:
        self.w -= self._rate * gradient


def allowed(trace: Trace, rate: float, lipschitz: float, group: int, gamma: float | None = None) -> list[float]:
    """Returns what Theorem 1 allows for each error of a trace; Theorem 2 with gamma' = 1.

    Infinite where the theorem says nothing: gamma above 1, or a floor that is not positive.
    """
    prime = 1 - trace.gamma + trace.p0 / 2 if gamma is None else gamma
    if prime <= 0 or trace.gamma > 1:
        return [math.inf] * len(trace.errors)
    floor = rate * lipschitz * trace.variance / (2 * RIDGE * prime * group)
    return [floor + (1 - rate * prime * RIDGE) ** k * (trace.errors[0] - floor) for k in range(len(trace.errors))]


class Plan(NamedTuple):
    """A mode, or one after the other; the rate in units of 1 / L; the number of runs and of steps in each mode."""

    modes: tuple[Mode, ...]
    units: float
    runs: int
    steps: int


def train(plan: Plan) -> list[Trace]:
    """Returns the trace of each mode."""
    training = Training(plan.units / Loss().lipschitz, plan.runs, seed=len(plan.modes) - 1)
    return [training.run(mode, plan.steps * WORKERS) for mode in plan.modes]


def traces(preset: str, cases: Sequence[tuple[tuple[Mode, ...], float]]) -> list[list[Trace]]:
    """Returns the traces of modes at rates."""
    plans = [Plan(modes, units, RUNS[preset], STEPS[preset]) for modes, units in cases]
    return everywhere(train, plans, list[Trace])


def bound(preset: str, name: str, mode: Mode, gamma: float | None) -> runner.Measure:
    """Returns the largest error over what a theorem allows."""
    lipschitz, points, ratios = Loss().lipschitz, [], []
    for units, (trace,) in zip(RATES, traces(preset, [((mode,), units) for units in RATES]), strict=True):
        limits = allowed(trace, units / lipschitz, lipschitz, WORKERS, gamma)
        ratio = max(error / limit for error, limit in zip(trace.errors[1:], limits[1:], strict=True))
        points.append([units, trace.gamma, trace.p0, trace.floor, limits[-1], ratio])
        ratios += [ratio] if math.isfinite(limits[-1]) else []
    details = {
        "of": "what the theorem allows",
        "columns": ["rate * L", "gamma", "p_0", "floor", "allowed at the end", "ratio"],
        "rates": [[None if math.isinf(number) else number for number in point] for point in points],
        "rates_that_qualify": len(ratios),
        "steps": STEPS[preset],
        "runs": RUNS[preset],
    }
    return runner.Measure(name, max(ratios, default=math.nan), "ratio", at_most=1.0, details=details)


@runner.measures("paper.gba_theorem1")
def theorem1(preset: str) -> runner.Measure:
    """Gba with a tolerance of 3."""
    return bound(preset, "paper.gba_theorem1", Gba(WORKERS), None)


@runner.measures("paper.gba_theorem2")
def theorem2(preset: str) -> runner.Measure:
    """Sync."""
    return bound(preset, "paper.gba_theorem2", Sync(), 1.0)


SWITCHES: dict[str, tuple[Mode, Mode]] = {
    "paper.gba_theorem3.async": (Async(), Sync()),
    "paper.gba_theorem4.async": (Sync(), Async()),
    "paper.gba_theorem4.gba": (Sync(), Gba(WORKERS)),
}


@runner.measures(*SWITCHES)
def switches(preset: str) -> Iterator[runner.Measure]:
    """The mean error of the second half after a switch, over Sync's."""
    cases = [((Sync(),), SWITCH_RATE), *((modes, SWITCH_RATE) for modes in SWITCHES.values())]
    (throughout,), *switched = traces(preset, cases)
    sync = throughout.floor
    for name, (before, after) in zip(SWITCHES, switched, strict=True):
        details = {
            "of": "error floor of Sync",
            "sync": sync,
            "before": before.floor,
            "after": after.floor,
            "first_step_after": after.errors[1] / after.errors[0],
            "nn_workers": WORKERS,
            "rate": SWITCH_RATE,
        }
        yield runner.Measure(name, after.floor / sync, "ratio", details=details)
