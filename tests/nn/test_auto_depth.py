"""`Hybrid("auto")` on a simulated NN worker: it settles, follows the load up and down, and does not swing.

Times are in units of what the network takes for one batch. As in `nn/pass_threads.py`, one thread looks up, one trains,
one pushes; `delay` is what every gradient is under way besides, and `lookup` and `push` keep their thread busy.
"""

import functools
import itertools

import numpy as np
import pytest

from persia.modes import Hybrid, Observation
from persia.nn.gate import WINDOW, Window


class Worker:
    """Trains batch after batch; `depths` and `shares` (of the time waited) are by window."""

    def __init__(self, mode, noise=0.05, seed=0):
        self.mode = mode
        self.depth = mode.initial_depth()
        self.window = Window(accumulation=1)
        self.rng = np.random.default_rng(seed)
        self.noise = noise
        self.normal = iter(())
        self.depths, self.shares = [], []
        self.applied = [0.0]
        self.looked_up = self.pushed = self.trained = self.drawn = 0.0

    def train(self, windows, *, lookup=0.1, push=0.1, delay=0.0, hiccup=0.0):
        """Returns batches per unit of time."""
        begin = self.trained
        for _ in range(windows):
            waited, start = 0.0, self.trained
            for _ in range(WINDOW):
                waited += self.batch(*self.jitter(lookup, push, delay), hiccup)
            self.depths.append(self.depth)
            self.shares.append(waited / (self.trained - start))
            depth = self.mode.next_depth(self.depth, self.window.observation())
            if depth != self.depth:
                self.window.changed(depth - self.depth)
                self.depth = depth
        return windows * WINDOW / (self.trained - begin)

    def jitter(self, *times):
        return [max(0.0, t + min(t, 1.0) * self.noise * self.next_normal()) for t in times]

    def next_normal(self):
        """A block at a time, which takes a tenth of the time of single numbers."""
        for number in self.normal:
            return number
        self.normal = iter(self.rng.standard_normal(1024).tolist())
        return next(self.normal)

    def batch(self, lookup, push, delay, hiccup):
        opened = self.applied[max(0, len(self.applied) - 1 - self.depth)]
        held = max(0.0, opened - self.looked_up)
        self.looked_up = max(self.looked_up, opened) + lookup
        lead = self.trained - self.looked_up
        drawn = max(self.trained, self.looked_up)
        self.trained = drawn + self.jitter(1.0)[0]
        if self.rng.random() < hiccup:
            self.trained += 3.0
        self.pushed = max(self.pushed, self.trained) + push
        self.applied.append(max(self.pushed + delay, self.applied[-1]))
        self.window.add(drawn - self.drawn, lead, held)
        self.drawn = drawn
        return max(0.0, -lead)


@functools.cache
def share_waited(depth, **load):
    """Of the time, by the training thread, at a fixed depth."""
    worker = Worker(Hybrid(depth, warmup=0))
    worker.train(20, **load)
    return np.mean(worker.shares)


def needed(share=0.02, **load):
    """The least fixed depth at which the training thread waits for less than this share of the time."""
    return next(depth for depth in itertools.count(1) if share_waited(depth, **load) < share)


# Both seeds near the borders between two depths.
DELAYS = {0.0: [0], 0.78: [0, 1], 0.82: [0, 1], 0.9: [1], 1.5: [0], 1.8: [1], 3.79: [0, 1], 6.2: [0], 11.0: [1]}


@pytest.mark.parametrize(("delay", "seed"), [(delay, seed) for delay, seeds in DELAYS.items() for seed in seeds])
def test_it_settles_at_what_is_needed_and_keeps_the_speed(delay, seed):
    worker = Worker(Hybrid("auto", warmup=0), seed=seed)
    worker.train(60, delay=delay)
    rate = worker.train(120, delay=delay)
    depths = worker.depths[60:]
    least, most = needed(delay=delay), needed(share=0.004, delay=delay)
    assert set(depths) <= {least - 1, least, most}
    assert np.mean(depths) > least - 0.3
    assert sum(a != b for a, b in itertools.pairwise(depths)) <= 2 * 120 / 8
    assert rate > 0.97 * Worker(Hybrid(least + 4, warmup=0), seed=seed).train(60, delay=delay)


@pytest.mark.parametrize("seed", range(2))
def test_away_from_a_border_it_does_not_move_at_all(seed):
    for delay in (0.3, 1.3, 2.3, 4.3):
        worker = Worker(Hybrid("auto", warmup=0), seed=seed)
        worker.train(120, delay=delay)
        assert len(set(worker.depths[60:])) == 1


@pytest.mark.parametrize("seed", range(2))
def test_it_follows_the_load_up_and_down(seed):
    worker = Worker(Hybrid("auto", warmup=0), seed=seed)
    for delay, least in ((0.2, 1), (4.5, 5), (1.4, 2), (7.5, 8), (0.2, 1)):
        assert needed(delay=delay) == least
        worker.train(24, delay=delay)
        assert worker.depths[-1] == least
        assert np.mean(worker.shares[-4:]) < 0.02


@pytest.mark.parametrize(("depth", "expected"), [(1, 0), (2, 1), (3, 1), (4, 2)])
def test_a_raise_that_did_not_help_is_taken_back(depth, expected):
    seen = Observation(waited=50.0, elapsed=100.0, would_wait=0.0, change=1, windows=1, before=50.0 / 128, steps=128)
    assert Hybrid("auto", warmup=0).next_depth(depth, seen) == expected


def test_a_load_that_no_depth_helps_is_not_answered_with_depth():
    slow_push, slow_lookup = Worker(Hybrid("auto", warmup=0)), Worker(Hybrid("auto", warmup=0))
    slow_push.train(300, push=1.5)
    assert max(slow_push.depths) <= 3
    assert np.mean(slow_push.depths[20:]) < 2.5
    slow_lookup.train(300, lookup=1.5)
    assert max(slow_lookup.depths) <= 3
    for worker in (slow_push, slow_lookup):
        worker.train(20)
        assert worker.depths[-1] == 1


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("latency", [0.02, 0.1])
def test_one_step_in_flight_that_saves_little_is_given_up(latency, seed):
    """As on a single machine: Sync's order costs `latency` of a step."""
    load = {"lookup": latency / 2, "push": latency / 2, "hiccup": 0.02}
    worker = Worker(Hybrid("auto", warmup=0), noise=0.2, seed=seed)
    rate = worker.train(100, **load)
    assert set(worker.depths[2:]) == {0}
    assert rate > 0.88 * Worker(Hybrid(1, warmup=0), seed=seed).train(100, **load)


@pytest.mark.parametrize(
    ("depth", "seen", "expected"),
    [
        (1, {"would_wait": 14.0}, 0),
        (1, {"would_wait": 16.0}, 1),
        (1, {"waited": 3.0, "would_wait": 11.0}, 0),
        (1, {"waited": 3.0, "would_wait": 13.0}, 2),
        (1, {"would_wait": 14.0, "change": 1, "windows": 7}, 1),
        (1, {"would_wait": 14.0, "change": 1, "windows": 8}, 0),
        (1, {"would_wait": 14.0, "change": -1, "windows": 1}, 0),
        (0, {"waited": 14.0}, 0),
        (0, {"waited": 16.0}, 1),
        (2, {"would_wait": 14.0}, 2),
        (2, {"would_wait": 0.9}, 1),
    ],
)
def test_the_last_step_in_flight_must_save_15_percent(depth, seen, expected):
    assert (
        Hybrid("auto", warmup=0).next_depth(
            depth, Observation(**{"waited": 0.0, "elapsed": 100.0, "steps": 128, **seen})
        )
        == expected
    )


@pytest.mark.parametrize("seed", range(2))
def test_it_returns_to_a_step_in_flight_when_that_saves_more(seed):
    worker = Worker(Hybrid("auto", warmup=0), seed=seed)
    for latency, depth in ((0.1, 0), (0.4, 1), (0.1, 0), (1.6, 2), (0.1, 0), (0.1, 0)):
        worker.train(24, lookup=latency / 2, push=latency / 2)
        assert worker.depths[-1] == depth
        assert sum(a != b for a, b in itertools.pairwise(worker.depths[-24:])) <= 4


@pytest.mark.parametrize("seed", range(2))
def test_a_slow_ps_does_not_make_auto_leave_sync_and_return(seed):
    """Border of 15 %: it may be on either side, and changes at most once in 8 windows."""
    worker = Worker(Hybrid("auto", warmup=0), seed=seed)
    worker.train(120, lookup=0.08, push=0.08)
    assert set(worker.depths) <= {0, 1}
    assert sum(a != b for a, b in itertools.pairwise(worker.depths)) <= 2 * 120 / 8


def test_hiccups_of_the_network_raise_nothing():
    worker = Worker(Hybrid("auto", warmup=0), noise=0.2)
    worker.train(200, hiccup=0.02)
    assert np.mean(worker.depths) < 1.2


def test_a_fixed_bound_stays():
    worker = Worker(Hybrid(3, warmup=0))
    worker.train(20, delay=9.0)
    assert set(worker.depths) == {3}
