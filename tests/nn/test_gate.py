"""The gate counts steps, not batches, and waits for nothing it need not."""

import threading

from hypothesis import given
from hypothesis import strategies as st

from persia.modes import Hybrid, Sync
from persia.nn.gate import StalenessGate


@given(st.integers(1, 4), st.integers(1, 4), st.lists(st.booleans(), max_size=60))
def test_every_interleaving_stays_below_the_bound(depth, accumulation, choices):
    gate = StalenessGate(Hybrid(depth), accumulation)
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
