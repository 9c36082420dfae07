"""The model checker finds all states, the shortest trace to a violation, and states without a way to an end."""

from __future__ import annotations

import pytest

from protocol.model_checker import STUCK, explore


class Walk:
    """A token on a grid, which a fault may put back to its corner; a pit has no way out."""

    faults = frozenset(["back"])

    def __init__(self, size=4, forbidden=(), pits=(), ways=("right", "up")):
        self.size, self.forbidden, self.pits, self.ways = size, set(forbidden), set(pits), ways

    def initial(self):
        return (0, 0)

    def successors(self, state):
        x, y = state
        moves = {"right": (x + 1, y), "up": (x, y + 1)}
        out = [((way,), moves[way]) for way in self.ways if max(moves[way]) < self.size and state not in self.pits]
        return [*out, (("back",), (0, 0))]

    def violation(self, state):
        return f"{state} is forbidden" if state in self.forbidden else ""

    def done(self, state):
        return state == (self.size - 1, self.size - 1)

    def explain(self, action):
        return f"goes {action[0]}"


def test_all_states_are_visited_once():
    found = explore(Walk())
    assert found.states == 16
    assert found.transitions == 2 * 4 * 3 + 15
    assert (found.depth, found.ends, found.complete, found.violation) == (6, 1, True, None)


def test_the_shortest_trace_is_found_and_printed():
    found = explore(Walk(forbidden=[(2, 1), (3, 3)]))
    assert not found.complete
    assert sorted(found.violation.trace) == ["goes right", "goes right", "goes up"]
    assert str(found.violation).splitlines()[-1] == "=> (2, 1) is forbidden"
    assert str(found.violation).splitlines()[0].startswith("1. goes ")


def test_the_first_state_may_be_wrong():
    assert explore(Walk(forbidden=[(0, 0)])).violation.trace == []


def test_progress_does_not_depend_on_faults():
    assert explore(Walk()).violation is None
    found = explore(Walk(pits=[(1, 0)]))
    assert (found.violation.wrong, found.violation.trace) == (STUCK, ["goes right"])


def test_without_an_end_the_first_state_is_stuck():
    assert explore(Walk(ways=["up"])).violation.trace == []


@pytest.mark.parametrize("most", [1, 5, 11])
def test_the_number_of_states_is_bounded(most):
    found = explore(Walk(pits=[(1, 0)]), most)
    assert most <= found.states <= most + 2
    assert (found.complete, found.violation) == (False, None)
