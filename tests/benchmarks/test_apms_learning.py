"""How losses of APMSqueeze are compared."""

import math

import pytest
from benchmarks.apms_learning import best_rate, losses, not_worse
from benchmarks.compressed.tasks import TASKS

from benchmarks import runner


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
    assert not_worse(near, 1.0).holds
    assert not not_worse(near, near.interval[1] - 1e-6).holds
    worse = losses("a", results(1.2, 1.3, 1.25), results(1.0, 1.1, 1.1))
    assert worse.interval[0] > 0
    assert not not_worse(worse, 1.0).holds


def test_seeds_on_which_the_other_one_diverged_are_left_out():
    measure = losses("a", results(1.0, 2.0, 4.0), results(0.5, math.inf, 4.0))
    assert measure.value == 0.25
    assert (measure.details["pairs"], measure.details["dropped"]) == (2, 1)


@pytest.mark.parametrize(
    ("ours", "theirs"), [((1.0, math.inf), (1.0, 1.1)), ((math.inf,), (1.0,)), ((1.0, 1.0), (math.inf, math.inf))]
)
def test_a_target_is_missed_where_ours_or_all_of_theirs_diverged(ours, theirs):
    measure = losses("a", results(*ours), results(*theirs), at_most=0.5)
    assert measure.interval is None
    assert not measure.holds
    assert not not_worse(measure, 0.5).holds
    assert runner.worst("b", [runner.Measure("c", 9.0, "loss", at_most=0.5), measure]).details["worst"] == "a"


def test_theirs_counts_where_it_is_what_has_to_be_better():
    worse = losses("a", results(2.0, 2.0), results(1.0, math.inf), drop=False, at_least=0.0)
    assert worse.holds is False
    assert losses("a", results(2.0, math.inf), results(1.0, 1.0), drop=False, at_least=0.0).holds is True


def test_a_search_without_end_is_an_error():
    with pytest.raises(RuntimeError, match="The best of 4 learning rates"):
        best_rate(lambda lr: -lr, most=4)


@pytest.mark.parametrize("name", ["digits", "language"])
def test_rates_are_tuned_without_the_test_part(name, monkeypatch):
    for task in (TASKS["language"], TASKS["language_tuning"]):
        monkeypatch.setattr(task, "modules", 10)  # The whole text takes seconds.
    task, tuning = TASKS[name](0, 1, 0), TASKS[f"{name}_tuning"](0, 1, 0)
    whole, part = (task.train, tuning.train) if name == "digits" else (task.text, tuning.text)
    assert whole.tolist() == [*tuning.test.tolist(), *part.tolist()]
    assert len(tuning.test) > len(whole) // 11
