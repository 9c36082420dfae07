"""Theorem 1 and Corollary 1 of APMSqueeze (arXiv 2008.11343, section 4), measured: the bound, and the speed-up by n.

    python -m benchmarks 'paper.apms_*' [--preset smoke|laptop|full] [--json FILE]

paper.apms_theorem1      Mean over T steps of |f'|^2_V over what inequality (3) allows, the largest of all n, seeds and
                         rates of `KINDS` for which its left side has a positive factor.
paper.apms_speed_up.KIND.nN
                         Mean of |f'|^2_V over n T steps of one worker, over that of T steps of n workers: all see n T
                         samples. Corollary 1 says O(1 / sqrt(n T)), a linear speed-up: 1. KIND:
                         printed       at the learning rate of Corollary 1, whose epsilon is measured
                         parallel      without its term for compression: the rate of parallel SGD
                         uncompressed  at this rate, and without compression: what the loss allows

The loss is sum s_j log cosh(x_j - a_j), whose gradients have Gaussian noise of known variance; x has 1,024 elements,
and the frozen v differs between them. In float64, in one process, by Algorithm 1 with the mean magnitude as scale; a
test holds it against the optimizer's twin.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks import runner
from benchmarks.modes_runs import everywhere

SEEDS = {"smoke": (0,), "laptop": (0, 1, 2, 3, 4), "full": (0, 1, 2, 3, 4)}
WORKERS = {"smoke": (2,), "laptop": (2, 4, 8, 16), "full": (2, 4, 8, 16, 32)}
STEPS = {"smoke": 64, "laptop": 2_000, "full": 16_000}
"""T of n workers; one worker has n times as many."""
KINDS = ("printed", "parallel", "uncompressed")
DIM = 1_024
BETA = 0.9
SIGMA = 8.0
"""Root of the expected squared length of a sample's noise. The gradient at the start has a length of about 12."""

Vector = NDArray[np.float64]


class Plan(NamedTuple):
    """A training: one of `KINDS`, the number of workers and of steps, and the seed."""

    kind: str
    workers: int
    steps: int
    seed: int


class Run(NamedTuple):
    """Result of a training.

    Attributes:
        mean: mean over steps of |f'|^2_V.
        allowed: what inequality (3) allows for it; None where its left side has no positive factor.
        error: largest sum of the lengths of errors, twice that of a worker or that of the servers: epsilon.
        rate: learning rate.
    """

    mean: float
    allowed: float | None
    error: float
    rate: float


class Squeezed(NamedTuple):
    """What a training was: the mean over steps of |f'|^2_V, epsilon, and x at the end."""

    mean: float
    error: float
    x: Vector


class Loss:
    """f(x) = sum s_j log cosh(x_j - a_j), at x = 0 at the start."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng((seed, 1))
        self._scales = rng.uniform(0.25, 1.0, DIM)
        self._scales[0] = 1.0
        self._targets = rng.normal(0.0, 1.0, DIM)
        self.v: Vector = rng.uniform(0.5, 2.0, DIM)
        """The divisor of the momentum: sqrt(v_Tw) in Algorithm 1, and v_Tw in the theorem."""
        self.lipschitz = 1.0

    def gradient(self, x: Vector) -> Vector:
        """Returns f'."""
        return self._scales * np.tanh(x - self._targets)

    def start(self) -> float:
        """Returns f(0) - f*, as f* is 0."""
        return float(self._scales @ np.log(np.cosh(self._targets)))


def one_bit(values: Vector) -> Vector:
    """Returns C[values] `[..., n]`: signs times the mean magnitude of the last axis."""
    return np.where(values >= 0, 1.0, -1.0) * np.abs(values).mean(-1, keepdims=True)


def squeezed(loss: Loss, workers: int, steps: int, rate: float, seed: int, compressed: bool = True) -> Squeezed:
    """Runs lines 3 to 12 of Algorithm 1 from m = 0."""
    rng = np.random.default_rng((seed, 2, workers))
    compress = one_bit if compressed else np.copy
    x, momentum = np.zeros(DIM), np.zeros(DIM)
    errors, server_errors = np.zeros((workers, workers, DIM // workers)), np.zeros((workers, DIM // workers))
    total = epsilon = 0.0
    for _ in range(steps):
        gradient = loss.gradient(x)
        total += float(gradient**2 @ (1 / loss.v))
        sampled = gradient + rng.normal(0.0, SIGMA / math.sqrt(DIM), (workers, DIM))
        values = (BETA * momentum + (1 - BETA) * sampled).reshape(errors.shape) + errors  # By worker and chunk.
        sent = compress(values)
        errors = values - sent
        averages = sent.mean(0) + server_errors
        agreed = compress(averages)
        server_errors = averages - agreed
        momentum = agreed.reshape(DIM)
        x -= rate * momentum / loss.v
        lengths = (np.linalg.norm(errors, axis=-1).sum(1).max(), np.linalg.norm(server_errors, axis=-1).sum())
        epsilon = max(epsilon, *(2 * float(length) for length in lengths))
    return Squeezed(total / steps, epsilon, x)


def rate_of(loss: Loss, workers: int, steps: int, epsilon: float = 0.0) -> float:
    """Returns gamma of Corollary 1; without epsilon, of parallel SGD."""
    least = float(loss.v.min())
    compression = epsilon ** (2 / 3) * steps ** (1 / 3) / least
    return 1 / (4 * loss.lipschitz / least + SIGMA * math.sqrt(steps / workers) + compression)


def allowed(loss: Loss, workers: int, steps: int, rate: float, epsilon: float) -> float | None:
    """Returns the right side of (3) over T and over the factor of the left side, what the mean may be; None if none."""
    least, slow = float(loss.v.min()), 1 - BETA
    ratio = rate * loss.lipschitz / least
    factor = 1 - ratio - 2 * ratio**2 / slow**2
    right = (
        2 * loss.start() / (rate * steps)
        + 6 * ratio**2 * epsilon**2 / (slow**2 * least)
        + ratio * SIGMA**2 / workers
        + 2 * ratio**2 * SIGMA**2 / (workers * slow**2)
    )
    return right / factor if factor > 0 else None


def train(plan: Plan) -> Run:
    """Trains at the rate of a kind. A first run measures epsilon, which is nearly independent of the rate."""
    kind, workers, steps, seed = plan
    loss, epsilon = Loss(seed), 0.0
    if kind == "printed":
        epsilon = squeezed(loss, workers, min(steps, 256), rate_of(loss, workers, steps), seed).error
    rate = rate_of(loss, workers, steps, epsilon)
    run = squeezed(loss, workers, steps, rate, seed, kind != "uncompressed")
    return Run(run.mean, allowed(loss, workers, steps, rate, run.error), run.error, rate)


def trained(preset: str, kind: str, workers: int, factor: int = 1) -> list[Run]:
    """Returns the training of each seed, of `factor` times the steps of a preset."""
    plans = [Plan(kind, workers, factor * STEPS[preset], seed) for seed in SEEDS[preset]]
    return everywhere(train, plans, Run)


@runner.measures("paper.apms_theorem1")
def theorem(preset: str) -> runner.Measure:
    """The mean over steps of |f'|^2_V over what (3) allows."""
    runs = {(kind, n): trained(preset, kind, n) for kind in KINDS for n in (1, *WORKERS[preset])}
    every = [run for each in runs.values() for run in each]
    ratios = [run.mean / run.allowed for run in every if run.allowed is not None]
    details = {
        "of": "the right side of (3)",
        "steps": STEPS[preset],
        "runs_that_qualify": [len(ratios), len(every)],
        "first_seed": [[*case, *each[0]] for case, each in runs.items()],
    }
    return runner.Measure("paper.apms_theorem1", max(ratios, default=math.nan), "ratio", at_most=1.0, details=details)


@runner.measures(*(f"paper.apms_speed_up.{kind}.n{n}" for kind in KINDS for n in WORKERS["full"]))
def speed_up(preset: str) -> Iterator[runner.Measure]:
    """One worker over n workers, with the same number of samples."""
    for kind in KINDS:
        for n in WORKERS[preset]:
            many, alone, short = (trained(preset, kind, *case) for case in ((n,), (1, n), (1,)))
            details = {
                "of": f"mean of |f'|^2_V, 1 worker over {n} workers, equal samples",
                "steps": STEPS[preset],
                "over_1_worker_at_equal_steps": [one.mean / other.mean for one, other in zip(short, many, strict=True)],
                "rates": [many[0].rate, alone[0].rate],
            }
            means = [[run.mean for run in runs] for runs in (alone, many)]
            target = 0.9 if kind == "printed" else None
            yield runner.paired_ratio(f"paper.apms_speed_up.{kind}.n{n}", *means, at_least=target, details=details)
