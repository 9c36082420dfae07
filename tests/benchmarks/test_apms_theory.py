"""The algorithm behind `paper.apms_*` against the optimizer's twin, and the formulas of the theorem."""

import math

import numpy as np
import pytest
from benchmarks.apms_theory import BETA, DIM, SIGMA, Loss, Plan, allowed, one_bit, rate_of, squeezed, train

from benchmarks import apms_theory
from persia.optim.compressors import OneBit
from persia.optim.options import APMSqueezeOptions
from support.twins.apmsqueeze import ReferenceAPMSqueeze


@pytest.mark.parametrize("workers", [1, 4])
def test_a_run_is_that_of_the_optimizer_with_a_frozen_v(workers):
    loss, rate, steps = Loss(0), 0.01, 12
    twin = ReferenceAPMSqueeze(
        [np.zeros(DIM)], workers, APMSqueezeOptions(compressor=OneBit()), lr=rate, betas=(BETA, 0.999), eps=0.0
    )
    twin.frozen = twin.corrected = True
    twin.variance = [loss.v**2]
    twin.steps = 10**6  # So that the momentum is no longer corrected.
    rng, squares = np.random.default_rng((3, 2, workers)), []
    for _ in range(steps):
        gradient = loss.gradient(twin.x[0])
        squares.append(gradient**2 @ (1 / loss.v))
        twin.step([[row] for row in gradient + rng.normal(0.0, SIGMA / math.sqrt(DIM), (workers, DIM))])
    run = squeezed(loss, workers, steps, rate, 3)
    np.testing.assert_allclose(run.x, twin.x[0], rtol=1e-9, atol=1e-12)
    assert run.mean == pytest.approx(np.mean(squares))


def test_errors_are_what_is_not_sent():
    values = np.random.default_rng(0).normal(size=(3, 8))
    np.testing.assert_allclose(np.abs(one_bit(values)), np.abs(values).mean(1, keepdims=True) * np.ones((3, 8)))
    assert (np.sign(one_bit(values)) == np.sign(values)).all()
    assert squeezed(Loss(0), 2, 5, 0.01, 0, compressed=False).error == 0.0
    assert squeezed(Loss(0), 2, 5, 0.01, 0).error > 0.0


def test_gradients_are_those_of_the_loss():
    loss, x = Loss(1), np.random.default_rng(2).normal(size=DIM)
    step = 1e-5 * np.eye(DIM)[7]

    def value(at):
        return float(loss._scales @ np.log(np.cosh(at - loss._targets)))

    assert loss.gradient(x)[7] == pytest.approx((value(x + step) - value(x - step)) / 2e-5, rel=1e-6)
    assert loss.start() == pytest.approx(value(np.zeros(DIM)))
    assert loss._scales.max() == loss.lipschitz


def test_rate_and_bound_are_those_of_the_paper():
    loss, least = Loss(0), Loss(0).v.min()
    assert 1 / rate_of(loss, 4, 100, 8.0) - 1 / rate_of(loss, 4, 100) == pytest.approx(4 * 100 ** (1 / 3) / least)
    assert rate_of(loss, 4, 400) == pytest.approx(1 / (4 / least + SIGMA * 10))
    slow, rate = 1 - BETA, 1e-4
    left = 1 - rate / least - 2 * rate**2 / (slow * least) ** 2
    right = (
        2 * loss.start() / (rate * 10)
        + rate * SIGMA**2 / (2 * least)
        + 2 * (rate * SIGMA) ** 2 / (2 * (slow * least) ** 2)
    )
    assert allowed(loss, 2, 10, rate, 0.0) == pytest.approx(right / left)
    more = 6 * (rate * 3.0) ** 2 / (slow**2 * least**3)
    assert allowed(loss, 2, 10, rate, 3.0) == pytest.approx((right + more) / left)
    assert allowed(loss, 2, 10, 1.0, 0.0) is None


def test_one_worker_sees_as_many_samples(monkeypatch):
    seen = []

    def everywhere(function, plans, result):
        assert function is train
        seen.extend(plans)
        return [apms_theory.Run(1.0 / plan.workers, 2.0, 0.0, 0.1) for plan in plans]

    monkeypatch.setattr(apms_theory, "everywhere", everywhere)
    found = {one.name: one for one in apms_theory.speed_up("smoke")}
    steps = apms_theory.STEPS["smoke"]
    assert Plan("printed", 2, steps, 0) in seen
    assert Plan("printed", 1, 2 * steps, 0) in seen
    assert found["paper.apms_speed_up.printed.n2"].value == pytest.approx(2.0)
    assert {one.rsplit(".", 2)[1] for one in found} == set(apms_theory.KINDS)


def test_noise_is_less_with_more_workers():
    many, alone = (train(Plan("uncompressed", n, 400, 0)) for n in (8, 1))
    assert many.mean < 0.7 * alone.mean
