"""The runs behind `paper.theorem1`, against the rule of the theorem written out."""

import numpy as np
import pytest
from benchmarks.convergence import LIPSCHITZ, Clicks, at_start, sigmoid, theorem_rate


def delayed_sgd(clicks, rate, tau):
    """Sum of |f'|^2 over the steps of equation 2: rows of D(t) = t - tau, the network of t."""
    chances = clicks._chances[:, 0]
    rows, bias, total = [np.zeros(len(chances))], 0.0, 0.0
    for step, (id_, click) in enumerate(zip(clicks._ids[:, 0].astype(int), clicks._clicks[:, 0], strict=True)):
        error = sigmoid(rows[step] + bias) - chances
        total += np.sum((error / len(chances)) ** 2) + error.mean() ** 2
        gradient = sigmoid(rows[max(0, step - tau)][id_] + bias) - click
        rows.append(rows[step].copy())
        rows[-1][id_] -= rate * gradient
        bias -= rate * gradient
    return total


@pytest.mark.parametrize("alpha", [1.0, 0.25])
@pytest.mark.parametrize("tau", [0, 1, 5])
def test_a_run_is_delayed_sgd(alpha, tau):
    clicks = Clicks(alpha, 60, 0.5)
    assert clicks.run(tau) == pytest.approx(delayed_sgd(clicks, 0.5, tau), rel=1e-12)


def test_a_delay_costs_at_one_rate():
    late, fresh = (Clicks(1.0, 200, 0.5).run(tau) for tau in (16, 0))
    assert late > 1.5 * fresh


def test_the_rate_of_the_theorem():
    assert 1 / theorem_rate(0.1, 8, 100) - 1 / theorem_rate(0.1, 0, 100) == pytest.approx(4 * 8 * LIPSCHITZ * 0.1)
    assert theorem_rate(1.0, 0, 100) > theorem_rate(1.0, 0, 400)
    assert 0 < at_start() < np.log(2)
