"""The runs behind `paper.gba_theorem*` against SGD written out, and the formulas of the theorems."""

import math

import numpy as np
import pytest
from benchmarks.gba_theory import DIM, RIDGE, SAMPLES, WORKERS, Loss, Trace, Training, allowed

from persia.modes import Async, Gba, Sync


def test_loss_gradient_and_minimum():
    loss = Loss()
    rng = np.random.default_rng(1)
    w = rng.normal(size=(3, DIM))
    for at in range(DIM):
        step = 1e-6 * np.eye(DIM)[at]
        slope = (loss.error(w + step) - loss.error(w - step)) / 2e-6
        np.testing.assert_allclose(loss.gradient(w)[:, at], slope, rtol=1e-5, atol=1e-8)
    each = np.stack([loss.sampled(w, np.full(3, sample)) for sample in range(SAMPLES)])
    np.testing.assert_allclose(each.mean(0), loss.gradient(w), rtol=1e-10)
    apart = ((each - loss.gradient(w)) ** 2).sum(-1)
    assert loss.variance(w) == pytest.approx(apart.mean())
    assert (loss.error(w) > 0).all()
    assert (2 * RIDGE * loss.error(w) <= (loss.gradient(w) ** 2).sum(1)).all()  # Strongly convex.
    low = rng.normal(size=(500, DIM)) * 0.1
    gaps = loss.gradient(low[1:]) - loss.gradient(low[:-1])
    assert (np.linalg.norm(gaps, axis=1) <= loss.lipschitz * np.linalg.norm(low[1:] - low[:-1], axis=1)).all()


def test_sync_is_sgd_with_the_global_batch():
    training, loss, rate = Training(0.1, 5), Loss(), 0.1
    trace = training.run(Sync(), 3 * WORKERS)
    w = np.zeros((5, DIM))
    errors = [loss.error(w).mean()]
    for step in range(3):
        numbers = range(step * WORKERS, (step + 1) * WORKERS)
        samples = [np.random.default_rng((0, number)).integers(SAMPLES, size=5) for number in numbers]
        w = w - rate * np.mean([loss.sampled(w, each) for each in samples], axis=0)
        errors.append(loss.error(w).mean())
    np.testing.assert_allclose(training.w, w, rtol=1e-12)
    assert trace.errors == pytest.approx(errors)
    assert (trace.gamma, trace.p0) == (0.0, 1.0)


def test_stale_gradients_have_a_gamma():
    gba = Training(0.1, 8).run(Gba(WORKERS), 20 * WORKERS)
    slow = Training(0.01, 8).run(Gba(WORKERS), 20 * WORKERS)
    assert 0 < slow.gamma < gba.gamma
    assert 0 < gba.p0 < 1
    assert len(gba.errors) == 21


def test_a_run_continues_where_the_last_one_ended():
    training = Training(0.1, 4)
    before = training.run(Sync(), 5 * WORKERS)
    after = training.run(Async(), 3)
    assert after.errors[0] == before.errors[-1]
    assert len(after.errors) == 4


def test_bounds_are_those_of_the_theorems():
    trace = Trace([2.0, 1.5, 1.2], gamma=0.3, p0=0.2, variance=4.0)
    floor = 0.1 * 5.0 * 4.0 / (2 * RIDGE * 0.8 * WORKERS)
    limits = allowed(trace, 0.1, 5.0, WORKERS)
    assert limits == pytest.approx([floor + (1 - 0.1 * 0.8 * RIDGE) ** k * (2.0 - floor) for k in range(3)])
    sync = allowed(trace, 0.1, 5.0, WORKERS, gamma=1.0)
    assert sync[0] == 2.0
    assert sync[2] - 0.8 * floor == pytest.approx((1 - 0.1 * RIDGE) ** 2 * (2.0 - 0.8 * floor))
    assert allowed(trace._replace(gamma=1.2), 0.1, 5.0, WORKERS) == [math.inf] * 3
