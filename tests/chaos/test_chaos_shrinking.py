"""A schedule that fails is shrunk to the faults that it needs to fail."""

from __future__ import annotations

import pytest
from chaos_schedule import draw
from chaos_shrinking import shrink

SCHEDULE = draw(3, 100.0, 40)


class Runner:
    """Runs that fail if a schedule has some faults, in this order."""

    def __init__(self, *needed):
        self.needed, self.runs = needed, []

    def __call__(self, faults):
        self.runs.append(faults)
        left = iter(faults)
        return all(fault in left for fault in self.needed)


@pytest.mark.parametrize("places", [(0,), (39,), (5, 23, 38), (17, 18), tuple(range(0, 40, 3)), tuple(range(40))])
def test_the_faults_that_are_needed_are_left(places):
    needed = [SCHEDULE[place] for place in places]
    assert shrink(SCHEDULE, Runner(*needed)) == needed


def test_few_runs_are_made():
    fails = Runner(SCHEDULE[5], SCHEDULE[23], SCHEDULE[38])
    shrink(SCHEDULE, fails)
    assert len(fails.runs) < 60
    assert all(fails.runs), "a run without faults was made"


def test_the_result_is_the_same_each_time():
    one, two = (Runner(SCHEDULE[5], SCHEDULE[23]) for _ in range(2))
    assert shrink(draw(3, 100.0, 40), one) == shrink(draw(3, 100.0, 40), two)
    assert one.runs == two.runs


def test_each_fault_is_needed_where_several_schedules_fail():
    """Any two stops fail, and so does the first kill with the last fault."""

    def fails(faults):
        stops = sum(fault.kind == "stop" for fault in faults)
        kill = next(fault for fault in SCHEDULE if fault.kind == "kill")
        return stops >= 2 or (kill in faults and SCHEDULE[-1] in faults)

    found = shrink(SCHEDULE, fails)
    assert len(found) == 2
    assert fails(found)


def test_one_fault_is_left_of_what_always_fails():
    assert len(shrink(SCHEDULE, lambda faults: True)) == 1
