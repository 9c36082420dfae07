"""No death, loss or repetition violates the protocol; without one of its rules, some do."""

from __future__ import annotations

from dataclasses import fields

import pytest

from protocol.model_checker import explore
from protocol.model_mutations import MUTATIONS
from protocol.model_protocol import Protocol
from protocol.model_rules import CASES, LARGE, Rules

MOST = 200_000
"""States of a small case, with a mistake too."""

IMPLIED = {"logs_order", "sorts_refused"}
"""Rules that others imply: without one of them, nothing goes wrong."""


class Ending(Protocol):
    """Notes whether a run may end after the last move."""

    moved = False

    def done(self, state):
        ends = super().done(state)
        self.moved = self.moved or (ends and not self.maps[state[self.DECIDED]].following)
        return ends


@pytest.mark.parametrize("case", CASES)
def test_no_invariant_is_violated_and_the_move_can_be_made(case):
    protocol = Ending(CASES[case])
    found = explore(protocol, MOST)
    assert found.violation is None, str(found.violation)
    assert found.complete
    assert found.ends
    assert protocol.moved


@pytest.mark.parametrize("mistake", MUTATIONS)
def test_a_mistake_is_found(mistake):
    mutation = MUTATIONS[mistake]
    found = explore(Protocol(CASES[mutation.case], mutation.rules), MOST).violation
    assert found is not None
    assert (found.wrong, len(found.trace)) == (mutation.wrong, mutation.steps), str(found)


def test_each_rule_is_needed():
    alone = {mutation.off[0] for mutation in MUTATIONS.values() if len(mutation.off) == 1}
    assert alone | IMPLIED == {rule.name for rule in fields(Rules)}
    assert not alone & IMPLIED


@pytest.mark.parametrize("rule", sorted(IMPLIED))
@pytest.mark.parametrize("case", ["without lookups", "restart", "combined"])
def test_rules_that_others_imply(rule, case):
    found = explore(Protocol(CASES[case], Rules(**{rule: False})), MOST)
    assert (found.complete, found.violation) == (True, None)


@pytest.mark.parametrize(
    ("changed", "wrong"),
    [
        ({"ROW": 0}, "PS 0 owns bucket 0 by the coordinator's map and lacks an acknowledged update"),
        ({"GONE": 1}, "PS 0 has a row of bucket 0 that was evicted"),
        ({"DECIDED": 1, "ROW": 0}, "PS 0 answers for bucket 0, without its row or an acknowledged update"),
        ({"DECIDED": 1, "MAP": 1}, "two PSs answer for bucket 0"),
        ({"DECIDED": 1, "MAP": 1, "SEALED": 2}, ""),
        ({"BAD": 1}, "an update was applied twice"),
        ({"BAD": 2}, "a push was applied in another phase"),
    ],
)
def test_invariants(changed, wrong):
    """Bucket 0 moves from PS 0 to PS 1, which has its row."""
    protocol = Protocol(CASES["one move"])
    state = list(protocol.initial())
    state[protocol.ROW[1][0]] = state[protocol.ACKED] = 1
    places = {"ROW": protocol.ROW[0][0], "GONE": protocol.GONE[0], "MAP": protocol.MAP[1], "SEALED": protocol.SEALED[0]}
    for name, value in changed.items():
        state[places.get(name) or getattr(protocol, name)] = value
    assert protocol.violation(tuple(state)) == wrong


class Answering(Protocol):
    """Without the invariant that one PS answers."""

    def violation(self, state):
        found = super().violation(state)
        return "" if found.startswith("two PSs answer") else found


@pytest.mark.parametrize(
    ("case", "wrong"),
    [
        ("one move", None),
        ("restart", None),
        ("write", "PS 1 owns bucket 0 by the coordinator's map and lacks an acknowledged update"),
        ("evict", "PS 1 has a row of bucket 0 that was evicted"),
    ],
)
def test_the_seal_protects_rows_that_are_set_and_evicted(case, wrong):
    """Quiescing protects pushes: two PSs may answer without it, but with the same rows."""
    found = explore(Answering(CASES[case], Rules(seals=False)), MOST).violation
    assert (None if found is None else found.wrong) == wrong


def test_a_trace_reads_as_a_list_of_actions():
    mutation = MUTATIONS["a push whose answer was lost is sent by another map"]
    found = explore(Protocol(CASES[mutation.case], mutation.rules), MOST).violation
    assert str(found) == TRACE


TRACE = """\
 1. coordinator: logs that map 1 is wanted
 2. NN worker 0: push 0 of generation 1; its embedding worker sends it by map 0
 3. NN worker 0: all are quiesced; asks receivers of map 1 for the last difference (round 1)
 4. PS 1: follows PS 0 for bucket 0; changes of all its rows are noted
 5. PS 0: push 0 of NN worker 0, generation 1, sent by map 0: applied, the answer is lost
 6. PS 1: asks PS 0 for the last difference
 7. PS 0: seals itself; sends the last difference to PS 1, which arrives
 8. PS 1: complete for map 1; NN worker 0 is told
 9. NN worker 0: asks the coordinator to commit map 1
10. coordinator: commits map 1; the answer arrives
11. PS 1: adopts map 1 (round 1); the answer is lost
12. embedding worker 0: gets map 1 from a PS
13. embedding worker 0: sorts push 0 of generation 1 again, and sends it by map 1
14. PS 1: push 0 of NN worker 0, generation 1, sent by map 1: applied, the answer is lost
=> an update was applied twice"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_million_states():
    states = 0
    for name, case in LARGE.items():
        found = explore(Protocol(case))
        assert found.violation is None, f"{name}\n{found.violation}"
        assert found.complete
        states += found.states
    assert states >= 1_000_000
