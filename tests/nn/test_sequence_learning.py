"""Models of sequences learn chains whose rule is known; and the chains are what they say."""

import numpy as np
import pytest
import torch
from benchmarks.seq_runs import DAY, ITEMS, KEPT, LONGEST_VISIT, PERIOD, Size, chain, hit_rates


@pytest.fixture(autouse=True)
def one_thread():
    """These networks are so small that threads cost more than they save."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


BEST = KEPT + (1 - KEPT) / ITEMS
"""HR@1 of answers by a rule of one event."""
RULE = np.random.default_rng(1).permutation(ITEMS)


def made(kind, length=10, rows=4_000):
    return chain(kind, rows, length, RULE, np.random.default_rng(0))


@pytest.mark.parametrize(("kind", "lag"), [("first", 1), ("second", 2)])
def test_the_next_item_follows_the_rule_as_often_as_the_best_possible(kind, lag):
    items, best, _ = made(kind)
    assert (best == items[:, -1]).mean() == pytest.approx(BEST, abs=0.02)
    assert (best == RULE[items[:, -1 - lag]]).all()


def test_the_turns_of_a_user_repeat():
    items = made("periodic").items
    # Both events are of the user's turns, or by chance.
    assert (items[:, -1] == items[:, -1 - PERIOD]).mean() == pytest.approx(KEPT * KEPT, abs=0.03)


def test_the_best_answer_to_turns_is_the_most_frequent_item():
    """Of two that differ, one is as likely as the other: no model knows which event broke the rule."""
    items, best, _ = made("periodic", 10)
    assert (best == items[:, -1]).mean() == pytest.approx(BEST * BEST, abs=0.02)
    assert (best == items[:, -1 - PERIOD]).all()
    items, best, _ = made("periodic", 103)
    assert (best == items[:, -1]).mean() == pytest.approx(BEST, abs=0.02)
    of_turn = items[:, 3:-1:PERIOD]
    assert [int(np.bincount(one).argmax()) for one in of_turn[:100]] == best[:100].tolist()


@pytest.mark.parametrize("length", [2, 10, 100])
def test_the_next_item_follows_the_event_of_a_day_ago(length):
    made_chain = made("time", length)
    magnitude = np.log2(made_chain.ages / DAY)
    assert (made_chain.ages > 0).all()
    assert (np.diff(made_chain.ages, axis=1) < 0).all()
    of_a_day = abs(magnitude) < 0.3
    assert (of_a_day.sum(1) == 1).all()
    followed = made_chain.items[:, :-1][of_a_day]
    assert (RULE[followed] == made_chain.best).all()
    assert (made_chain.best == made_chain.items[:, -1]).mean() == pytest.approx(BEST, abs=0.02)
    # It is the newest event of some users only, and then the rule is first-order.
    newest = of_a_day[:, -1]
    assert newest.mean() == pytest.approx(1 / (1 + min(LONGEST_VISIT, length - 1)), abs=0.03)


def test_hstu_learns_a_chain_as_fast_as_sasrec():
    size = Size(epochs=2, steps=60, histories=50, tested=200)
    ours, theirs = (hit_rates(model, "first", 10, 0, size) for model in ("hstu", "sasrec"))
    assert ours[0] > theirs[0] - 0.1
    assert ours[-1] > 0.8


@pytest.mark.slow
def test_hstu_finds_the_event_of_a_day_ago():
    size = Size(epochs=1, steps=150, histories=50, tested=200)
    (ours,), (theirs,) = (hit_rates(model, "time", 5, 0, size) for model in ("hstu", "sasrec"))
    assert ours > theirs + 0.2
