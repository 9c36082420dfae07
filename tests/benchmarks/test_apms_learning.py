"""How losses of APMSqueeze are compared."""

import math

import pytest
from benchmarks.apms_learning import best_rate, losses, not_worse


@pytest.mark.parametrize("best", [-6, -1, 0, 3, 7])
def test_the_best_rate_lies_between_two_others(best):
    tried = []

    def loss(lr):
        tried.append(round(math.log2(lr / 4e-3)))
        return math.inf if tried[-1] > best + 1 else abs(tried[-1] - best)

    assert best_rate(loss) == 4e-3 * 2.0**best
    assert {best - 1, best, best + 1} <= set(tried)
    assert len(tried) == len(set(tried))


def results(*values):
    return [{"loss": value, "seconds": 1.0, "skipped": 0} for value in values]


def test_not_worse_is_an_interval_that_is_not_wholly_above_zero():
    near = losses("a", results(1.0, 1.3, 1.1), results(1.0, 1.1, 1.1))
    assert near.interval[0] < 0 < near.value
    assert not_worse(near).holds
    worse = losses("a", results(1.2, 1.3, 1.25), results(1.0, 1.1, 1.1))
    assert worse.interval[0] > 0
    assert not not_worse(worse).holds


def test_seeds_on_which_the_other_one_diverged_are_left_out():
    measure = losses("a", results(1.0, 2.0, 4.0), results(0.5, math.inf, 4.0))
    assert measure.value == 0.25
    assert measure.details["pairs"] == 2
