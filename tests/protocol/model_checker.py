"""An explicit-state model checker: visits every state that a model can reach, breadth first.

States are tuples of small integers. Only their 64-bit hashes are kept, so a collision could hide a state; among a
million states the probability of one is below 1e-7. A trace is found again by replaying the actions of its states.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from typing import NamedTuple, Protocol

import numpy as np

__all__ = ["Action", "Exploration", "Model", "State", "Violation", "explore"]

State = tuple[int, ...]
Action = tuple[Hashable, ...]
"""Name of an action, and its arguments."""


class Model(Protocol):
    """Describes a transition system."""

    faults: frozenset[str]
    """Names of actions on which no progress may depend, such as deaths."""

    def initial(self) -> State:
        """Returns the first state."""

    def successors(self, state: State) -> list[tuple[Action, State]]:
        """Returns all actions that are possible in a state, and where they lead."""

    def violation(self, state: State) -> str:
        """Returns the invariant that does not hold in a state; empty if all hold."""

    def done(self, state: State) -> bool:
        """Returns whether a run may end in a state."""

    def explain(self, action: Action) -> str:
        """Returns an action as a sentence."""


class Violation(NamedTuple):
    """A property that does not hold.

    Attributes:
        wrong: what is wrong in the last state.
        trace: actions from the first state to it; no shorter trace violates an invariant.
    """

    wrong: str
    trace: list[str]

    def __str__(self) -> str:
        width = len(str(len(self.trace)))
        return "\n".join([f"{n:{width}}. {step}" for n, step in enumerate(self.trace, 1)] + [f"=> {self.wrong}"])


class Exploration(NamedTuple):
    """Result of `explore`.

    Attributes:
        states: number of different states.
        transitions: number of actions that lead to another state.
        depth: largest number of actions that a state needs.
        complete: whether all reachable states were visited.
        violation: the first violation; None without one.
        ends: number of states in which a run may end.
    """

    states: int
    transitions: int
    depth: int
    complete: bool
    violation: Violation | None
    ends: int


STUCK = "no end can be reached from here without another fault"


def explore(model: Model, most: int = 1 << 31) -> Exploration:
    """Visits all states of a model, up to the first that violates an invariant, or a number of states.

    If all states were visited and hold, it also checks progress: from each of them, actions that are no faults lead to
    an end.

    Args:
        model: the transition system.
        most: number of states after which the search stops.
    """
    return _Search(model).run(most)


class _Search:
    def __init__(self, model: Model) -> None:
        self._model = model
        self._numbers: dict[int, int] = {}
        """Number of each state, in the order of visits, by hash."""
        self._parents = array("I")
        self._targets = array("I")
        """Successors of all states by actions that are no faults."""
        self._ends_of = array("Q")
        """For each expanded state the length of `_targets` after its successors."""
        self._done = array("I")
        self._transitions = 0

    def run(self, most: int) -> Exploration:
        model, numbers, faults = self._model, self._numbers, self._model.faults
        first = model.initial()
        numbers[hash(first)] = 0
        self._parents.append(0)
        if wrong := model.violation(first):
            return self._result(0, 0, wrong)
        level, depth = [first], 0
        expanded = 0
        while level:
            following = []
            for state in level:
                if len(numbers) >= most:
                    return self._result(depth, None, "")
                if model.done(state):
                    self._done.append(expanded)
                for action, target in model.successors(state):
                    key = hash(target)
                    number = numbers.get(key)
                    if number is None:
                        number = numbers[key] = len(self._parents)
                        self._parents.append(expanded)
                        following.append(target)
                        if wrong := model.violation(target):
                            return self._result(depth + 1, number, wrong)
                    if number != expanded:
                        self._transitions += 1
                        if action[0] not in faults:
                            self._targets.append(number)
                self._ends_of.append(len(self._targets))
                expanded += 1
            level = following
            depth += bool(level)
        stuck = self._first_stuck()
        return self._result(depth, stuck, STUCK if stuck is not None else "", complete=stuck is None)

    def _result(self, depth: int, bad: int | None, wrong: str, complete: bool = False) -> Exploration:
        violation = None if bad is None else Violation(wrong, self._trace(bad))
        return Exploration(len(self._numbers), self._transitions, depth, complete, violation, len(self._done))

    def _first_stuck(self) -> int | None:
        """Returns the number of the first state from which no end can be reached; None if there is no such state."""
        count = len(self._parents)
        targets = np.frombuffer(self._targets, np.uint32) if self._targets else np.empty(0, np.uint32)
        ends_of = np.frombuffer(self._ends_of, np.uint64).astype(np.int64)
        sources = np.repeat(np.arange(count, dtype=np.uint32), np.diff(ends_of, prepend=0))
        sources = sources[np.argsort(targets, kind="stable")]
        starts = np.concatenate(([0], np.cumsum(np.bincount(targets, minlength=count))))
        reaches = np.zeros(count, np.bool_)
        found = np.array(self._done, np.int64)
        while found.size:
            reaches[found] = True
            before = [sources[starts[n] : starts[n + 1]] for n in found.tolist()]
            candidates = np.unique(np.concatenate(before))
            found = candidates[~reaches[candidates]].astype(np.int64)
        stuck = np.flatnonzero(~reaches)
        return int(stuck[0]) if stuck.size else None

    def _trace(self, number: int) -> list[str]:
        """Returns the actions from the first state to a state."""
        path = [number]
        while path[-1]:
            path.append(self._parents[path[-1]])
        state, trace = self._model.initial(), []
        for wanted in reversed(path[:-1]):
            action, state = next(
                (action, target)
                for action, target in self._model.successors(state)
                if self._numbers.get(hash(target)) == wanted
            )
            trace.append(self._model.explain(action))
        return trace
