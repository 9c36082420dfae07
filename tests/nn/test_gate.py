"""The gate counts steps, not batches, and waits for nothing it need not."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia.modes import Hybrid, Sync
from persia.nn.gate import WINDOW, StalenessGate


@given(st.integers(1, 4), st.integers(1, 4), st.lists(st.booleans(), max_size=60))
def test_every_interleaving_stays_below_the_bound(depth, accumulation, choices):
    gate = StalenessGate(Hybrid(depth, warmup=0), accumulation)
    gate.open()
    gate.versions = []
    looked_up = done = 0
    for lookup in choices:
        allowed = gate.mode.gate(looked_up // accumulation - done // accumulation, gate.depth)
        if lookup and allowed:
            assert gate.pass_lookup()
            looked_up += 1
        elif done + accumulation <= looked_up:
            gate.done(accumulation)
            done += accumulation
    for number, version in enumerate(gate.versions):
        assert 0 <= number // accumulation - version <= depth
    assert gate.measured.max <= depth


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("first", [0, 3, 9])
def test_the_bound_rises_by_global_steps(first, accumulation):
    """As many lookups pass ahead of the last applied step as the warm-up allows, and in a later pass it continues."""
    gate = StalenessGate(Hybrid(4, warmup=8), accumulation)
    gate.open(first)

    def asks():
        asking = threading.Thread(target=gate.pass_lookup, daemon=True)
        asking.start()
        return asking

    def passes(asking):
        asking.join(5)
        return not asking.is_alive()

    bounds = [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 4, 4, 4, 4, 4, 4]  # Of the global steps 0 ...
    looked_up = 0
    for done in range(8):
        while looked_up - done <= bounds[min(first + looked_up, 15)] and looked_up < 12:
            assert all(passes(asks()) for _ in range(accumulation))
            looked_up += 1
        if looked_up < 12:
            waiter = asks()
            waiter.join(0.02)
            assert waiter.is_alive()
            gate.done(accumulation)
            assert passes(waiter)
            assert all(passes(asks()) for _ in range(accumulation - 1))
            looked_up += 1


@pytest.mark.parametrize(("first", "depth"), [(0, 1), (5 * WINDOW, 2)])
def test_auto_does_not_adapt_to_the_waits_of_a_warm_up(monkeypatch, first, depth):
    """A clock in which each draw waits for the gate; from its end on this raises the depth."""
    now = [0.0]
    monkeypatch.setattr("persia.nn.gate.time.monotonic", lambda: now[0])
    gate = StalenessGate(Hybrid("auto", warmup=5 * WINDOW), 1)
    gate.open(first)
    for _ in range(2 * WINDOW):
        assert gate.pass_lookup()
        gate._held[-1] = 0.5  # Seconds that the gate has delayed it.
        now[0] += 1.0
        gate.drawn(-0.5)
        gate.done(1)
        if gate.depth != 1:
            break
    assert gate.depth == depth


def test_closing_wakes_the_waiter():
    gate = StalenessGate(Sync(), 1)
    gate.open()
    assert gate.pass_lookup()
    answers = []
    waiter = threading.Thread(target=lambda: answers.append(gate.pass_lookup()))
    waiter.start()
    gate.close()
    waiter.join(5)
    assert answers == [False]


def test_a_new_pass_begins_at_a_step_boundary():
    gate = StalenessGate(Sync(), 2)
    gate.versions = []
    gate.open()
    assert gate.pass_lookup()
    gate.done(1)
    gate.open()
    assert gate.pass_lookup()
    assert gate.versions == [0, 1]


@pytest.mark.parametrize(("staleness", "ahead"), [(2, 1), (5, 3), (8, 4)])
def test_lookups_leave_half_of_the_staleness_to_copies_of_rows(staleness, ahead):
    gate = StalenessGate(Hybrid(staleness, warmup=0), 1)
    gate.reserves = True
    gate.open()
    for step in range(ahead + 1):  # The first one, and those ahead of its step.
        assert gate.pass_lookup() == (step <= ahead)
        assert gate.last_lookup == (step, 0, staleness)
    waiting = threading.Thread(target=gate.pass_lookup, daemon=True)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    gate.done(1)
    waiting.join(5)
    assert gate.last_lookup == (ahead + 1, 1, staleness)
    assert gate.measured.max == ahead
    gate.aged(staleness)
    assert gate.measured == (pytest.approx((sum(range(ahead + 1)) + staleness) / (ahead + 2)), staleness, ahead + 2)


@pytest.mark.parametrize(("use_wait", "depth"), [(0.0, 0), (0.004, 2)])
def test_auto_weighs_waiting_for_pushes_if_rows_are_refreshed(use_wait, depth, monkeypatch):
    """Steps of 10 ms whose rows were ready for all of it; and the same, less a wait for pushes at the use of rows."""
    now = [0.0]
    monkeypatch.setattr("persia.nn.gate.time.monotonic", lambda: now[0])
    gate = StalenessGate(Hybrid("auto", warmup=0), 1)
    gate.refreshing, gate.lookahead = True, 1
    gate.open()
    depths = []
    for _ in range(WINDOW + 1):
        assert gate.pass_lookup()
        now[0] += 0.01
        gate.drawn(0.01, use_wait=use_wait)
        gate.done(1)
        depths.append(gate.depth)
    assert depths[-1] == depth
